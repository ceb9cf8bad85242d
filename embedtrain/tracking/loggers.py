"""Metric loggers besides metrics.jsonl: Weights & Biases and TensorBoard."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe
from embedtrain.utils.formatting import install_command

# Calls that may be queued; a logger with more is given up.
MAX_QUEUED_CALLS = 10_000
# Seconds that one call may take.
CALL_TIMEOUT = 120.0


class MetricLogger(Protocol):
    """A destination for metrics. To add one, implement these four methods and start it in `tracker.start_loggers`.

    Every method may raise. Only one thread calls them.
    """

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a training step; `row` contains `step`."""

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the results of the evaluation after `step`, as `{set: {metric: value}}`."""

    def exported(self, directory: Path) -> None:
        """The model of the run has been exported to `directory`."""

    def close(self, failed: bool) -> None:
        """Finish logging; `failed`: an error ended the run."""


class AsyncLogger:
    """Runs one metric logger in a thread. Training waits for it only at the start and at the end, with a timeout.

    Args:
        name: of the logger, in warnings.
        create: starts the logger.
        warn: prints a warning; called at most once, in the thread that calls the methods of this class.
        start_timeout: seconds that starting may take.
        finish_timeout: seconds that closing may take.
        abandon: releases whatever would keep this process alive when the logger hangs.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], MetricLogger],
        warn: Callable[[str], None],
        *,
        start_timeout: float,
        finish_timeout: float,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._warn, self._finish_timeout, self._abandon = name, warn, finish_timeout, abandon
        self.logger: MetricLogger | None = None
        self._failure: str | None = None
        self._has_warned = self._given_up = False
        self._call_started: float | None = None
        self._calls: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue(MAX_QUEUED_CALLS)
        threading.Thread(target=self._work, name=name, daemon=True).start()

        def start() -> None:
            self.logger = create()

        self._calls.put(("could not be started", start))
        if not self._wait(start_timeout):
            self._give_up(f"did not start within {start_timeout:.0f} s")
        self._report_failure()

    def step(self, row: Mapping[str, Any]) -> None:
        """Queue the metrics of a training step."""
        self._call(lambda logger: logger.step(row))

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Queue the results of an evaluation."""
        self._call(lambda logger: logger.evaluation(step, results))

    def exported(self, directory: Path) -> None:
        """Queue the notice that the model has been exported."""
        self._call(lambda logger: logger.exported(directory))

    def close(self, failed: bool) -> None:
        """Close the logger, also after a failure, because it may still send earlier metrics."""
        logger = self.logger
        if self._given_up or logger is None:
            return
        self._report_failure()
        self._failure = None
        with contextlib.suppress(queue.Full):  # it hangs, which _wait detects
            self._calls.put_nowait(("could not be finished", lambda: logger.close(failed)))
        if not self._wait(self._finish_timeout):
            self._give_up(f"did not finish within {self._finish_timeout:.0f} s")
        elif self._failure is not None:
            self._abandon()
        self._report_failure()
        self._given_up = True

    def _call(self, action: Callable[[MetricLogger], None]) -> None:
        self._report_failure()
        logger = self.logger
        if logger is None or self._has_warned or self._given_up:
            return
        call_started = self._call_started
        if call_started is not None and time.monotonic() - call_started > CALL_TIMEOUT:
            self._give_up(f"has not answered for {CALL_TIMEOUT:.0f} s")
            return
        try:
            self._calls.put_nowait(("failed", lambda: action(logger)))
        except queue.Full:
            self._give_up(f"has left {MAX_QUEUED_CALLS} calls unanswered")

    def _wait(self, seconds: float) -> bool:
        """Whether all queued calls finish in time."""
        done = threading.Event()
        try:
            self._calls.put_nowait(("", done.set))
        except queue.Full:
            return False
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            failure, action = self._calls.get()
            if failure == "failed" and (self._failure is not None or self._given_up):
                continue
            self._call_started = time.monotonic()
            try:
                action()
            except (Exception, SystemExit) as error:  # wandb has ended processes in the past
                reason = " ".join(str(error).split()) or type(error).__name__
                self._failure = f"{failure}: {reason}"
            self._call_started = None

    def _report_failure(self) -> None:
        if self._failure is not None:
            self._warn_once(self._failure)

    def _give_up(self, failure: str) -> None:
        self._given_up = True
        self._warn_once(failure)
        self._abandon()

    def _warn_once(self, failure: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        failure, _, reason = failure.partition(": ")
        self._warn(
            f"{self._name} {failure}, training continues without it (metrics.jsonl has all metrics)"
            f"{f': {reason}' if reason else ''}"
        )


_INIT_TIMEOUT = 30.0  # seconds; the other ranks wait in their first collective meanwhile
_KEY_TIMEOUT = 60.0  # seconds that a person at a terminal has to type the key
_FINISH_TIMEOUT = 60.0  # seconds that the end of a run may wait until all metrics are sent
_UPLOAD_TIMEOUT = 4 * 3600.0  # the same with a model to upload: 16 GB at 1.1 MB/s
_TEARDOWN_TIMEOUT = 5.0  # seconds to shut down a wandb that hangs
WANDB_MARGIN = 15.0  # seconds beyond wandb's own limits after which it counts as hanging
TENSORBOARD_FOLDER = "tensorboard"
TENSORBOARD_START_TIMEOUT, TENSORBOARD_FINISH_TIMEOUT = 60.0, 30.0  # seconds
_TENSORBOARD_FLUSH_SECONDS = 30


def wandb_finish_timeout(recipe: Recipe) -> float:
    """Seconds that finishing a run may take."""
    default = _UPLOAD_TIMEOUT if recipe.tracking.wandb_artifacts else _FINISH_TIMEOUT
    return _limit("WANDB_FINISH_TIMEOUT", default) + WANDB_MARGIN


def wandb_start_timeout() -> float:
    """Seconds that starting a run may take."""
    return _limit("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT) + _KEY_TIMEOUT + WANDB_MARGIN


def _limit(variable: str, default: float) -> float:
    try:
        return float(os.environ[variable])
    except (KeyError, ValueError):
        return default


def abandon_wandb() -> None:
    """Kill wandb's helper processes, which this process would wait for when it exits, forever if they hang."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "wandb-" in child.name():  # wandb-core, and its wandb-symon
                child.kill()
    # Do now what wandb would do at exit: it cannot reach its processes any more, and would print that.
    thread = threading.Thread(target=_tear_down, daemon=True)
    thread.start()
    thread.join(_TEARDOWN_TIMEOUT)


def _tear_down() -> None:
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


class WandbLogger:
    """A MetricLogger that writes one wandb run.

    Steps are logged as `train/loss`, evaluations as `SET/METRIC`, both over the column `step`. wandb's own step
    counter only increases, so a run resumed from an earlier checkpoint would lose its rows
    (https://github.com/wandb/wandb/issues/9871, 5979); it is not used. The summary holds the last value of each metric,
    and the best value of each set's main metric as `best/SET/METRIC` and `best/SET/step`.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        run_dir: Path,
        id: str | None,
        evaluations: Mapping[int, Mapping[str, Mapping[str, float]]],
    ) -> None:
        """Start the run, or continue the run `id`. Call it on rank 0, after the process group is initialized.

        wandb writes into the folder `wandb` of `run_dir`, or into WANDB_DIR if that is set. `evaluations` are earlier
        ones of the run, as step -> set -> metric -> value.
        """
        import wandb  # takes a second, and most runs do without

        options = recipe.tracking
        limit = _UPLOAD_TIMEOUT if options.wandb_artifacts else _FINISH_TIMEOUT
        settings: dict[str, Any] = {
            "quiet": True,
            "console": "off",  # it would record every frame of the live display
            "login_timeout": _KEY_TIMEOUT,
            "finish_timeout_raises": True,
        }
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = _INIT_TIMEOUT
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = limit
        self._run = wandb.init(
            **{"project": "embedtrain", "name": recipe.name or None, **(options.wandb_init or {})},
            config={**to_plain(recipe), "world_size": world_size},
            dir=os.environ.get("WANDB_DIR") or str(run_dir),
            id=id,
            resume="allow",
            allow_val_change=True,  # a resumed run may have other ranks, or more steps
            settings=wandb.Settings(**settings),
        )
        self.id = str(self._run.id)
        self._artifact = wandb.Artifact if options.wandb_artifacts else None
        self._name = recipe.name or "model"
        self._best: dict[str, float] = {}
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for step, results in evaluations.items():
            self._update_best(step, results)

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a training step."""
        metrics = {f"train/{key}": value for key, value in row.items() if key != "step"}
        self._run.log({"step": row["step"], **metrics})

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the results of an evaluation."""
        values = {f"{name}/{metric}": value for name, metrics in results.items() for metric, value in metrics.items()}
        self._run.log({"step": step, **values})
        self._update_best(step, results)

    def exported(self, directory: Path) -> None:
        """Upload the model if `tracking.wandb_artifacts` is set."""
        if self._artifact is not None:
            artifact = self._artifact(f"{self._name}-{self.id}", type="model")
            artifact.add_dir(str(directory))
            self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Send the remaining metrics and mark the run as finished or failed."""
        self._run.finish(exit_code=1 if failed else 0)

    def _update_best(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, metrics in results.items():
            metric, value = next(iter(metrics.items()), ("", None))  # the main metric comes first
            if isinstance(value, int | float) and value > self._best.get(name, float("-inf")):
                self._best[name] = value
                self._run.summary.update({f"best/{name}/{metric}": value, f"best/{name}/step": step})


class TensorBoardLogger:
    """A MetricLogger that writes `train/METRIC` for steps and `SET/METRIC` for evaluations.

    A resumed run writes a new file that makes TensorBoard drop later steps of earlier files (`purge_step`). A run that
    starts from scratch makes it drop all of them.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, resumed_step: int | None) -> None:
        """Open a file; without `resumed_step` the run starts from scratch. RuntimeError without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # takes a second, and most runs do without
        except ImportError as error:
            raise RuntimeError(
                f"the package tensorboard cannot be imported ({error}): {install_command('tensorboard')}"
            ) from None
        self._excepthook = threading.excepthook
        threading.excepthook = self._handle_thread_exception
        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(
            str(run_dir / TENSORBOARD_FOLDER), purge_step=purge_step, flush_secs=_TENSORBOARD_FLUSH_SECONDS
        )
        if resumed_step is None:
            text = yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True)
            verbatim = "\n".join(f"    {line}" for line in text.splitlines())  # a code block in Markdown
            self._writer.add_text("recipe", verbatim, 0)
        self._writer.flush()

    def step(self, row: Mapping[str, Any]) -> None:
        """Write the metrics of a training step."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, row["step"])

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Write the results of an evaluation."""
        for name, metrics in results.items():
            for metric, value in metrics.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{name}/{metric}", value, step)
        self._writer.flush()

    def exported(self, directory: Path) -> None:
        """Nothing to do: event files hold no models."""

    def close(self, failed: bool) -> None:
        """Close the file."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _handle_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        # TensorBoard's writer thread fails when the disk is full. The next call here raises the same error, so the
        # traceback of the thread would only repeat it.
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            self._excepthook(arguments)
