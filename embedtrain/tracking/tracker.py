"""What training holds to tell how it goes: the terminal, metrics.jsonl and other trackers behind one object."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from embedtrain.config.recipe import Recipe
from embedtrain.distributed.world import World
from embedtrain.tracking import tensorboard as event_files
from embedtrain.tracking import wandb as weights_and_biases
from embedtrain.tracking.async_logger import AsyncLogger
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import METRICS_FILE, MetricsFile, peak_memory_gib, read_metrics
from embedtrain.tracking.tensorboard import TensorBoardLogger
from embedtrain.tracking.wandb import WandbLogger


def recorders(
    recipe: Recipe,
    world_size: int,
    run_dir: Path,
    resumed_step: int | None,
    wandb_id: str | None,
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    warn: Callable[[str], None],
) -> list[AsyncLogger]:
    """Start them. On rank 0 alone.

    Args:
        recipe: its `tracking` says which.
        world_size: number of ranks.
        run_dir: where they write.
        resumed_step: the step training goes on from; None: it starts anew.
        wandb_id: what continues the wandb run.
        measured: evaluations before this start, as step -> set -> metric -> value.
        warn: says a sentence to the user.
    """
    started = []
    if recipe.tracking.wandb:
        started.append(
            AsyncLogger(
                "wandb",
                lambda: WandbLogger(recipe, world_size, run_dir, wandb_id, measured),
                warn,
                start=weights_and_biases.start_seconds(),
                finish=weights_and_biases.finish_seconds(recipe),
                abandon=weights_and_biases.abandon,
            )
        )
    if recipe.tracking.tensorboard:
        started.append(
            AsyncLogger(
                "TensorBoard",
                lambda: TensorBoardLogger(recipe, run_dir, resumed_step),
                warn,
                start=event_files.START,
                finish=event_files.FINISH,
            )
        )
    return started


class Tracker:
    """Tells and records steps and evaluations. On all ranks but the first every method does nothing.

    No method holds a collective, so that rank 0 may be slow or fail here without another rank's counterpart.
    """

    def __init__(
        self,
        world: World,
        console: Console,
        metrics: MetricsFile | None = None,
        others: Sequence[AsyncLogger] = (),
        wandb_id: str | None = None,
    ) -> None:
        """Bundle what `open` made."""
        self.console = console
        self._world = world
        self._metrics = metrics
        self._others = others
        runs = (other.logger for other in others)
        self._wandb_id = next((run.id for run in runs if isinstance(run, WandbLogger)), wandb_id)
        self._file_failed = False

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        world: World,
        run_dir: str | Path,
        *,
        resumed_step: int | None = None,
        evaluated: bool = True,
        wandb_id: str | None = None,
        console: Console | None = None,
    ) -> "Tracker":
        """Start recording into `run_dir`; call it once the process group is joined, on every rank.

        Args:
            recipe: its `tracking` says where figures go beside the terminal and metrics.jsonl.
            world: who speaks.
            run_dir: holds metrics.jsonl; made if it is not there.
            resumed_step: the step training goes on from; later rows of metrics.jsonl are dropped. None: training
                starts anew, and rows of an earlier run are put aside as `metrics.previous.jsonl`.
            evaluated: whether that step's evaluation is done; it writes its rows again otherwise.
            wandb_id: `wandb_id` as it was when the checkpoint was written.
            console: where to speak, if one is open already.

        Raises:
            DataError: metrics.jsonl is there but is not what it claims to be.
            OSError: `run_dir` cannot be written.
        """
        console = console or Console(enabled=world.is_main)
        if not world.is_main:
            return cls(world, console)
        run_dir = Path(run_dir)
        path = run_dir / METRICS_FILE
        if resumed_step is None and path.exists() and path.stat().st_size:
            path.replace(run_dir / "metrics.previous.jsonl")
            console.note(f"training starts anew: the rows of {path} are now in metrics.previous.jsonl")
        metrics = MetricsFile(path)
        if resumed_step is not None:
            metrics.truncate_after(resumed_step, evaluated=evaluated)
        measured: dict[int, dict[str, dict[str, float]]] = {}
        for row in read_metrics(path):
            if "set" in row:
                measured.setdefault(row["step"], {})[row["set"]] = _figures(row)
        for results in measured.values():
            console.set_previous(results)
        others = recorders(recipe, world.size, run_dir, resumed_step, wandb_id, measured, console.warn)
        return cls(world, console, metrics, others, wandb_id if recipe.tracking.wandb else None)

    @property
    def wandb_id(self) -> str | None:
        """What continues the wandb run: to be stored in checkpoints. None without wandb, and on other ranks."""
        return self._wandb_id

    def training(self, total_steps: int, start_step: int = 0) -> contextlib.AbstractContextManager[None]:
        """Show progress while the block trains from `start_step` (steps done before) to `total_steps`."""
        return self.console.training(total_steps, start_step)

    def phase(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show what is going on while the block runs, and say how long it took."""
        return self.console.phase(text)

    def progress(self) -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
        """Show how far work has come that tells (what, parts done, of how many)."""
        return self.console.progress()

    def advance(self, step: int) -> None:
        """Move the bar to `step`, which is done but not logged; costs nothing."""
        self.console.advance(step)

    def step(self, row: Mapping[str, float]) -> None:
        """Tell and record a logged step.

        Args:
            row: `step` and any figures of it; `console` tells those it knows, the others record all. `padding`,
                `data_wait`, `mfu` and `communication` are shares of 1. `memory_gib` is filled in if it is not there.
        """
        if not self._world.is_main:
            return
        row = {"memory_gib": peak_memory_gib(self._world.device), **row}
        row = {"step": row.pop("step"), **row}
        self._record(row)
        self.console.step(row)
        for other in self._others:
            other.step(row)

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Tell and record what was measured after `step`, as `{set: {metric: value}}`."""
        if not self._world.is_main:
            return
        for name, figures in results.items():
            self._record({"step": step, "set": name, **figures})
        self.console.evaluation(step, results)
        for other in self._others:
            other.evaluation(step, results)

    def exported(self, directory: Path) -> None:
        """The run's model lies in `directory`: for trackers that keep models."""
        for other in self._others:
            other.exported(directory)

    def note(self, text: str) -> None:
        """Say something in passing."""
        self.console.note(text)

    def warn(self, text: str) -> None:
        """Say something the user should look at."""
        self.console.warn(text)

    def close(self, *, failed: bool = False) -> None:
        """End the display, close the file, and have the trackers send what is not sent yet."""
        self.console.close()
        if self._metrics is not None:
            self._metrics.close()
        for other in self._others:
            other.close(failed)

    def __enter__(self) -> "Tracker":
        """Use it as `with Tracker.open(...) as tracker`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an exception marks the wandb run as failed."""
        self.close(failed=kind is not None)

    def _record(self, row: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.append(row)
        except OSError as error:
            if not self._file_failed:
                self.console.warn(
                    f"{self._metrics.path} cannot be written, training goes on without some rows: {error}"
                )
            self._file_failed = True


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in ("step", "set") and isinstance(value, int | float)}
