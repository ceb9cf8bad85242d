"""The trackers that metrics are logged to besides metrics.jsonl, and the only table of them."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe
from embedtrain.tracking.loggers import AsyncLogger, MetricLogger
from embedtrain.utils.formatting import install_command


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told when it starts, on rank 0, after the process group is initialized.

    Attributes:
        recipe: the resolved recipe.
        directory: of the run.
        world_size: number of ranks.
        resumed_step: the step that training resumes from; None: it starts from scratch.
        id: of the same run in this tracker before; None: it was not tracked there.
        evaluations: earlier ones of the run, as step -> set -> metric -> value.
    """

    recipe: Recipe
    directory: Path
    world_size: int = 1
    resumed_step: int | None = None
    id: str | None = None
    evaluations: Mapping[int, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)


_INIT_TIMEOUT = 30.0  # seconds; the other ranks wait in their first collective meanwhile
_KEY_TIMEOUT = 60.0  # seconds that a person at a terminal has to type the key
_FINISH_TIMEOUT = 60.0  # seconds that the end of a run may wait until all metrics are sent
_UPLOAD_TIMEOUT = 4 * 3600.0  # the same with a model to upload: 16 GB at 1.1 MB/s
_TEARDOWN_TIMEOUT = 5.0  # seconds to shut down a wandb that hangs
WANDB_MARGIN = 15.0  # seconds beyond wandb's own limits after which it counts as hanging
TENSORBOARD_FOLDER = "tensorboard"
_START_TIMEOUT = 60.0  # seconds, of trackers without limits of their own
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

    def __init__(self, run: TrackedRun) -> None:
        """Start the run, or continue the run `run.id`. wandb writes into `run.directory/wandb`, or into WANDB_DIR."""
        import wandb  # takes a second, and most runs do without

        recipe, options = run.recipe, run.recipe.tracking
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
            config={**to_plain(recipe), "world_size": run.world_size},
            dir=os.environ.get("WANDB_DIR") or str(run.directory),
            id=run.id,
            resume="allow",
            allow_val_change=True,  # a resumed run may have other ranks, or more steps
            settings=wandb.Settings(**settings),
        )
        self.id: str | None = str(self._run.id)
        self._artifact = wandb.Artifact if options.wandb_artifacts else None
        self._name = recipe.name or "model"
        self._best: dict[str, float] = {}
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for step, results in run.evaluations.items():
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

    id: str | None = None  # its files are in the directory of the run

    def __init__(self, run: TrackedRun) -> None:
        """Open a file. RuntimeError without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # takes a second, and most runs do without
        except ImportError as error:
            raise _imported("tensorboard", error) from None
        self._excepthook = threading.excepthook
        threading.excepthook = self._handle_thread_exception
        purge_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(
            str(run.directory / TENSORBOARD_FOLDER), purge_step=purge_step, flush_secs=_TENSORBOARD_FLUSH_SECONDS
        )
        if run.resumed_step is None:
            text = yaml.safe_dump(to_plain(run.recipe), sort_keys=False, allow_unicode=True)
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


def _imported(package: str, error: ImportError) -> RuntimeError:
    """The exception for a package that cannot be imported: its text ends the warning."""
    return RuntimeError(f"the package {package} cannot be imported ({error}): {install_command(package)}")


def _numbers(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`SET/METRIC` of an evaluation, without what is no number."""
    return {
        f"{name}/{metric}": value
        for name, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float)
    }


# MLflow allows no other characters in the names of metrics and parameters, and so much in one request.
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
_MAX_PARAMETERS, _MAX_PARAMETER_LENGTH = 100, 6000


class MlflowLogger:
    """A MetricLogger that writes one run of MLflow, on the server that MLFLOW_TRACKING_URI names.

    Steps are logged as `train/loss`, evaluations as `SET/METRIC`, with `_at_` for `@`, which MLflow does not allow. A
    run that resumes from an earlier checkpoint logs the steps after it once more.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Start the run, or continue the run `run.id`. RuntimeError without MLflow."""
        try:
            from mlflow import MlflowClient  # takes seconds, and most runs do without
            from mlflow.entities import Metric, Param, RunTag
        except ImportError as error:
            raise _imported("mlflow", error) from None
        given = {
            "experiment": "embedtrain",
            "run_name": run.recipe.name or None,
            **(run.recipe.tracking.mlflow_init or {}),
        }
        self._client, self._metric = MlflowClient(), Metric
        if run.id is None:
            experiment = self._client.get_experiment_by_name(given["experiment"])
            found = experiment.experiment_id if experiment else self._client.create_experiment(given["experiment"])
            tags = {**given.get("tags", {}), "embedtrain.output_dir": str(run.directory.absolute())}
            created = self._client.create_run(found, run_name=given["run_name"], tags=tags)
            self.id: str | None = str(created.info.run_id)
            options = list(_flat({**to_plain(run.recipe), "world_size": run.world_size}))
            for start in range(0, len(options), _MAX_PARAMETERS):
                part = options[start : start + _MAX_PARAMETERS]
                self._client.log_batch(
                    self.id, params=[Param(_mlflow_name(name), value[:_MAX_PARAMETER_LENGTH]) for name, value in part]
                )
        else:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            self._client.log_batch(self.id, tags=[RunTag("embedtrain.resumed_step", str(run.resumed_step))])

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a training step."""
        self._log(row["step"], {f"train/{name}": value for name, value in row.items() if name != "step"})

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the results of an evaluation."""
        self._log(step, _numbers(results))

    def exported(self, directory: Path) -> None:
        """Nothing to do: the run has the directory as a tag."""

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.id,
            metrics=[self._metric(_mlflow_name(name), float(value), now, step) for name, value in values.items()],
        )


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_"))


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every option by its full name, as text; those that are null are left out."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class TrackioLogger:
    """A MetricLogger that writes one run of trackio: into its folder on this machine, or into a Space of the Hub.

    Steps are logged as `train/loss`, evaluations as `SET/METRIC`. A run that resumes from an earlier checkpoint logs
    the steps after it once more.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Start the run, or continue the one named `run.id`. RuntimeError without trackio."""
        try:
            import trackio  # takes seconds, and most runs do without
        except ImportError as error:
            raise _imported("trackio", error) from None
        given = {"project": "embedtrain", **(run.recipe.tracking.trackio_init or {})}
        started = trackio.init(
            **{**given, "name": run.id or given.get("name") or run.recipe.name or None},
            config={**to_plain(run.recipe), "world_size": run.world_size},
            resume="never" if run.id is None else "allow",
            embed=False,
        )
        self._run = started
        self.id: str | None = str(started.name)

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a training step."""
        self._run.log({f"train/{name}": value for name, value in row.items() if name != "step"}, step=row["step"])

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the results of an evaluation."""
        self._run.log(_numbers(results), step=step)

    def exported(self, directory: Path) -> None:
        """Nothing to do: trackio holds no models."""

    def close(self, failed: bool) -> None:
        """Send what is left."""
        self._run.finish()


@dataclass(frozen=True)
class Client:
    """A tracker: `tracking.OPTION=true` starts it.

    Attributes:
        name: in warnings.
        option: of `tracking`.
        create: starts its logger, in a thread.
        start_timeout: seconds that starting may take.
        finish_timeout: seconds that closing may take.
        abandon: releases whatever would keep this process alive when it hangs.
    """

    name: str
    option: str
    create: Callable[[TrackedRun], MetricLogger]
    start_timeout: Callable[[], float] = lambda: _START_TIMEOUT
    finish_timeout: Callable[[Recipe], float] = lambda recipe: _FINISH_TIMEOUT
    abandon: Callable[[], None] = lambda: None


CLIENTS = (
    Client("wandb", "wandb", WandbLogger, wandb_start_timeout, wandb_finish_timeout, abandon_wandb),
    Client("TensorBoard", "tensorboard", TensorBoardLogger),
    Client("MLflow", "mlflow", MlflowLogger),
    Client("trackio", "trackio", TrackioLogger),
)


def start_clients(run: TrackedRun, ids: Mapping[str, str], warn: Callable[[str], None]) -> dict[str, AsyncLogger]:
    """Start the trackers that `recipe.tracking` asks for, by their options. `ids` are those of `Tracker.ids`."""
    started = {}
    for client in CLIENTS:
        if getattr(run.recipe.tracking, client.option):
            tracked = replace(run, id=ids.get(client.option))
            started[client.option] = AsyncLogger(
                client.name,
                partial(client.create, tracked),
                warn,
                start_timeout=client.start_timeout(),
                finish_timeout=client.finish_timeout(run.recipe),
                abandon=client.abandon,
            )
    return started
