"""Tracks a run: prints and records its metrics on the terminal, in metrics.jsonl, and in trackers."""

import contextlib
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from embedtrain.config.recipe import Recipe
from embedtrain.distributed.world import World
from embedtrain.tracking.clients import TrackedRun, start_clients
from embedtrain.tracking.console import Console
from embedtrain.tracking.loggers import AsyncLogger
from embedtrain.tracking.metrics import (
    METRICS_FILE,
    DatasetInfo,
    MetricsFile,
    QueryMetrics,
    evaluation_row,
    query_metrics_path,
    read_metrics,
    write_query_metrics,
)
from embedtrain.tracking.pages import Results


class Tracker:
    """Prints and records steps and evaluations. On all ranks but the first every method does nothing.

    No method is a collective, so rank 0 may be slow or fail here without affecting other ranks.
    """

    def __init__(
        self,
        world: World,
        console: Console,
        metrics: MetricsFile | None = None,
        loggers: Mapping[str, AsyncLogger] | None = None,
        ids: Mapping[str, str] | None = None,
    ) -> None:
        """Use `Tracker.open` instead."""
        self.console = console
        self._world = world
        self._metrics = metrics
        self._loggers = list((loggers or {}).values())
        started = {name: logger.logger.id for name, logger in (loggers or {}).items() if logger.logger is not None}
        self._ids = {**(ids or {}), **{name: id for name, id in started.items() if id is not None}}
        self._write_failed = False

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        world: World,
        run_dir: str | Path,
        *,
        resumed_step: int | None = None,
        evaluated: bool = True,
        ids: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> "Tracker":
        """Start tracking. Call it on every rank, after the process group is initialized.

        Args:
            resumed_step: the step that training resumes from; later rows of metrics.jsonl are dropped. None: training
                starts from scratch, and rows of an earlier run are moved to `metrics.previous.jsonl`.
            evaluated: whether the evaluation of that step is done; otherwise it writes its rows again.
            ids: `ids` from the checkpoint.

        Raises:
            DataError: metrics.jsonl exists but is invalid.
        """
        console = console or Console(enabled=world.is_main, verbose=recipe.tracking.verbose)
        if not world.is_main:
            return cls(world, console)
        run_dir = Path(run_dir)
        path = run_dir / METRICS_FILE
        if resumed_step is None and path.exists() and path.stat().st_size:
            path.replace(run_dir / "metrics.previous.jsonl")
            console.note(f"training starts from scratch: the rows of {path} are now in metrics.previous.jsonl")
        metrics = MetricsFile(path)
        if resumed_step is not None:
            metrics.truncate_after(resumed_step, evaluated=evaluated)
        evaluations: dict[int, dict[str, dict[str, float]]] = {}
        for row in read_metrics(path):
            if "set" in row:
                evaluations.setdefault(row["step"], {})[row["set"]] = _numbers(row)
        for step, results in evaluations.items():
            console.set_previous(step, results)
        run = TrackedRun(
            recipe=recipe, directory=run_dir, world_size=world.size, resumed_step=resumed_step, evaluations=evaluations
        )
        ids = {name: id for name, id in (ids or {}).items() if getattr(recipe.tracking, name, False)}
        return cls(world, console, metrics, start_clients(run, ids, console.warn), ids)

    @property
    def ids(self) -> dict[str, str]:
        """What continues the run in each tracker, by its option, for checkpoints. Empty on other ranks."""
        return self._ids

    def training(self, total_steps: int, start_step: int = 0) -> contextlib.AbstractContextManager[None]:
        """Show progress while the block trains from `start_step` (steps done before) to `total_steps`."""
        return self.console.training(total_steps, start_step)

    def phase(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show what the block does while it runs, and print how long it took."""
        return self.console.phase(text)

    def progress(self) -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
        """Show progress that the block reports as (activity, parts done, parts in total)."""
        return self.console.progress()

    def advance(self, step: int) -> None:
        """Move the bar to `step`, which is done but not logged."""
        self.console.advance(step)

    def step(self, row: Mapping[str, float]) -> None:
        """Print and record the metrics of a logged step; adds `memory_gib` and, where known, `gpu_utilization`.

        `padding`, `data_wait`, `mfu`, `matmul_fraction` and `communication` are fractions of 1.
        """
        if not self._world.is_main:
            return
        row = {"memory_gib": peak_memory_gib(self._world.device), **gpu_utilization(self._world.device), **row}
        row = {"step": row.pop("step"), **row}
        self._record(row)
        self.console.step(row)
        for logger in self._loggers:
            logger.step(row)

    def set_evaluated(self, step: int, name: str, metrics: Mapping[str, float], dataset: DatasetInfo) -> None:
        """Record the results of a set in the evaluation after `step`, before other sets are evaluated."""
        if self._world.is_main:
            self._record(evaluation_row(step, name, metrics, dataset))

    def queries_evaluated(self, step: int, name: str, measured: QueryMetrics) -> None:
        """Record the metrics of each query of a set in the evaluation after `step`, for the report."""
        if self._metrics is None:
            return
        path = query_metrics_path(self._metrics.path.parent, step, name)
        try:
            write_query_metrics(path, measured)
        except Exception as error:  # no record is worth losing the run
            self._warn_once(path, error)

    def evaluation(
        self, step: int, results: Results, datasets: Mapping[str, DatasetInfo] | None = None, *, footer: str = ""
    ) -> None:
        """Print and log the results of the evaluation after `step`, as `{set: {metric: value}}`.

        `footer` is a line below the printed tables.
        """
        if not self._world.is_main:
            return
        self.console.evaluation(step, results, datasets=datasets, footer=footer)
        for logger in self._loggers:
            logger.evaluation(step, results)

    def exported(self, directory: Path) -> None:
        """Report that the model has been exported to `directory`, for loggers that upload models."""
        for logger in self._loggers:
            logger.exported(directory)

    def note(self, text: str) -> None:
        """Print a message."""
        self.console.note(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.warn(text)

    def close(self, *, failed: bool = False) -> None:
        """End the display, close the file, and wait until the loggers have sent their metrics."""
        self.console.close()
        if self._metrics is not None:
            self._metrics.close()
        for logger in self._loggers:
            logger.close(failed)

    def __enter__(self) -> "Tracker":
        """Use it as `with Tracker.open(...) as tracker`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an exception marks the run as failed in trackers."""
        self.close(failed=kind is not None)

    def _record(self, row: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.append(row)
        except OSError as error:
            self._warn_once(self._metrics.path, error)

    def _warn_once(self, path: Path, error: Exception) -> None:
        if not self._write_failed:
            self.console.warn(f"{path} cannot be written, training continues without some rows: {error}")
        self._write_failed = True


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: on a GPU what torch allocated, on a CPU the resident size of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB on Linux


def describe_peak_memory(device: torch.device) -> str:
    """What `peak_memory_gib` measures, for the user: it is not the memory that was planned."""
    if device.type == "cuda":
        return "the most that torch has allocated on the GPU"
    return "the most that the process has used, with its libraries and data"


def gpu_utilization(device: torch.device) -> dict[str, float]:
    """`gpu_utilization`: the fraction of the last moments in which a kernel ran on the GPU, as `nvidia-smi` shows it.

    Empty on CPUs, and where the driver cannot be asked: torch needs the package nvidia-ml-py for it.
    """
    if device.type != "cuda":
        return {}
    with contextlib.suppress(Exception):  # torch raises various types if the package or the driver's library is missing
        return {"gpu_utilization": torch.cuda.utilization(device) / 100}
    return {}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in ("step", "set") and isinstance(value, int | float)}
