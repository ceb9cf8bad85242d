"""Reads a run from its directory: the recipe, logged and evaluated metrics, sessions, and the encoded sample."""

import contextlib
import fcntl
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from embedtrain.config.compose import YAML_ERRORS
from embedtrain.config.hydra_files import load_yaml
from embedtrain.config.saved_recipe import current_recipe
from embedtrain.errors import DataError
from embedtrain.report.sample import AFTER, BEFORE, EncodedSample, read_texts, read_thumbnails, read_vectors
from embedtrain.tracking.metrics import METRICS_FILE, DatasetInfo, parse_row, split_lines
from embedtrain.tracking.sessions import SESSIONS_FILE, Session, read_sessions, total_seconds
from embedtrain.utils.records import is_number

_LABEL_LENGTH = 80  # characters
_SMOOTHED_FROM = 24  # points; a plot of fewer shows every one of them
_MAX_VALUE = 1e100
_NOT_METRICS = {"step", "set", "model"}
MEAN = "mean"  # the name of the means over sets


class Status(str, Enum):
    """The state of a run. The page colours it by its first word."""

    finished = "finished"
    running = "still running"
    stopped = "stopped by a signal"
    failed = "failed"
    ended = "ended unexpectedly"  # killed, most likely


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over increasing steps. NaN where the metric was not a finite number."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        """The finite values."""
        return self.values[np.isfinite(self.values)]

    def smoothed(self) -> "Series | None":
        """The moving average over a fiftieth of the series; None for a series that is too short to need it.

        Points without a value stay without one, and do not count in any average.
        """
        count = len(self.values)
        if count < _SMOOTHED_FROM:
            return None
        width = max(5, count // 50) | 1
        finite = np.isfinite(self.values)
        kernel = np.ones(width)
        sums = np.convolve(np.where(finite, self.values, 0.0), kernel, mode="same")
        counts = np.convolve(finite.astype(float), kernel, mode="same")
        return Series(self.steps, np.where(finite, sums / np.maximum(counts, 1.0), np.nan))

    def thinned(self, max_points: int) -> "Series":
        """About `max_points` points: the lowest and the highest of each interval, so that no spike is lost.

        The first and the last point stay, and an interval with points without a value keeps one of them.
        """
        count = len(self.steps)
        if count <= max_points:
            return self
        selected: set[int] = {0, count - 1}
        for interval in np.array_split(np.arange(count), max(1, max_points // 2)):
            values = self.values[interval]
            finite = np.isfinite(values)
            if not finite.all():
                selected.add(int(interval[int(np.argmin(finite))]))
            if finite.any():
                selected.add(int(interval[int(np.argmin(np.where(finite, values, np.inf)))]))
                selected.add(int(interval[int(np.argmax(np.where(finite, values, -np.inf)))]))
        indices: NDArray[np.int64] = np.array(sorted(selected), dtype=np.int64)
        return Series(self.steps[indices], self.values[indices])


@dataclass(frozen=True, slots=True)
class History:
    """The sessions of a run, its status, and the seconds that it was in progress, if known."""

    sessions: Sequence[Session]
    status: Status
    seconds: float | None

    @property
    def exported_step(self) -> int | None:
        """The step whose weights were exported, if known."""
        return self.sessions[-1].end.exported if self.sessions else None

    @property
    def export_check(self) -> str | None:
        """How the comparison of the exported model has ended, if known."""
        return self.sessions[-1].end.check if self.sessions else None


@dataclass(frozen=True)
class RunRecords:
    """What the directory of a run holds about it."""

    directory: Path
    label: str  # unique within the report
    recipe: Mapping[str, Any]  # as resolved; empty if it cannot be read
    versions: Mapping[str, Any]  # of the libraries, by name
    logged: Mapping[str, Series]  # by training metric
    evaluations: Mapping[str, Mapping[str, Series]]  # set -> metric -> series; the main metric of a set first
    datasets: Mapping[str, DatasetInfo]  # what each set measured last, if known
    history: History
    sample: EncodedSample | None
    notes: Sequence[str]  # what could not be read

    @property
    def exported(self) -> Path | None:
        """The directory of the exported model; None if there is none."""
        model = self.directory / "model"
        return model if (model / "modules.json").is_file() else None

    @property
    def last_step(self) -> int:
        """The last step that any file mentions."""
        every = [*self.logged.values(), *(series for of in self.evaluations.values() for series in of.values())]
        steps = [int(series.steps[-1]) for series in every if len(series.steps)]
        steps += [session.end.last_step for session in self.history.sessions if session.end.last_step is not None]
        return max(steps, default=0)

    @property
    def total_steps(self) -> int | None:
        """The last step that it is to reach, if known."""
        if self.history.sessions:
            return self.history.sessions[-1].total_steps
        steps = self.option("train", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps of an epoch, if known."""
        if self.history.sessions and self.history.sessions[-1].steps_per_epoch:
            return self.history.sessions[-1].steps_per_epoch
        epochs, total = self.option("train", "epochs"), self.total_steps
        return total / epochs if total and is_number(epochs) and epochs > 0 else None

    def option(self, *names: str) -> Any:
        """An option of the recipe, such as `option("model", "path")`; None if it is not there."""
        value: Any = self.recipe
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def common_steps_per_epoch(runs: Sequence[RunRecords]) -> float | None:
    """Optimizer steps of an epoch, if known and the same for all runs."""
    (steps, *others) = {run.steps_per_epoch for run in runs}
    return None if others else steps


def read_runs(directories: Sequence[Path]) -> list[RunRecords]:
    """Runs with unique labels; DataError if a folder is not a run, or occurs twice."""
    runs: list[RunRecords] = []
    recipes = [_read_recipe(directory) for directory in directories]
    names = [str(recipe.get("name") or path.name) for (recipe, _), path in zip(recipes, directories, strict=True)]
    for directory, name, (recipe, notes) in zip(directories, names, recipes, strict=True):
        if any(directory.resolve() == run.directory.resolve() for run in runs):
            raise DataError(f"{directory} occurs twice: name each run once")
        label = name if names.count(name) == 1 else str(directory)
        short_label = label if len(label) <= _LABEL_LENGTH else f"{label[:_LABEL_LENGTH]} …"
        runs.append(_read(directory, short_label, recipe, notes))
    return runs


def _read(directory: Path, label: str, recipe: dict[str, Any], notes: list[str]) -> RunRecords:
    versions = recipe.pop("versions", {})
    rows, last_written, row_notes = _read_rows(directory / METRICS_FILE)
    sessions = read_sessions(directory / SESSIONS_FILE)
    sample, sample_notes = read_sample(directory / "sample")
    return RunRecords(
        directory,
        label,
        recipe,
        versions if isinstance(versions, Mapping) else {},
        _logged(rows),
        _evaluations(rows),
        {row["set"]: info for row in rows if "set" in row and (info := DatasetInfo.of_row(row)) is not None},
        History(sessions, _status(directory, sessions), total_seconds(sessions, last_written)),
        sample,
        [*notes, *sample_notes, *row_notes],
    )


def _read_recipe(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The recipe of a run, with the options of this version, and notes on what could not be read."""
    path = directory / "recipe.yaml"
    if not directory.is_dir():
        raise DataError(f"{directory} is not a folder: name the output_dir of a run, such as runs/quickstart")
    if not path.is_file():
        reason = "the output_dir of a run holds a recipe.yaml, and this folder does not"
        raise DataError(f"{directory} is not a run: {reason}")
    try:
        recipe = load_yaml(path, yaml.SafeLoader)
        if not isinstance(recipe, dict):
            return {}, [f"{path} cannot be read: it is not a mapping"]
        return current_recipe(recipe), []
    except YAML_ERRORS as error:
        return {}, [f"{path} cannot be read: {' '.join(str(error).split())}"]


def read_sample(directory: Path) -> tuple[EncodedSample | None, list[str]]:
    """The sample, and what could not be read; vectors before a file that cannot be read are kept."""
    encoded: EncodedSample | None = None
    try:
        sample = read_texts(directory)
        if sample is not None:
            encoded = EncodedSample(sample)
            encoded = EncodedSample(sample, read_vectors(directory, BEFORE, sample))
            encoded = EncodedSample(sample, encoded.before, read_vectors(directory, AFTER, sample))
            encoded = replace(encoded, thumbnails=read_thumbnails(directory))
    except DataError as error:
        return encoded, [str(error)]
    return encoded, []


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], float | None, list[str]]:
    """Rows ordered by step, when the last one was written, and what could not be read.

    A run may be writing its last line, and a disk may have been full before: every readable row counts.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = split_lines(path.read_bytes())
        last_written = min(path.stat().st_mtime, time.time())  # a clock that was set back leaves times in the future
    except FileNotFoundError:
        return [], None, []
    except OSError as error:
        return [], None, [f"{path} cannot be read: {error}"]
    invalid = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None and row.get("step") is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            invalid.append(number)
    notes = []
    if invalid:
        which = (
            f"line {invalid[0]}" if len(invalid) == 1 else f"{len(invalid)} lines, the first of them line {invalid[0]},"
        )
        notes.append(f"{path}: {which} cannot be read as metrics and is left out")
    rows.sort(key=lambda row: row["step"])
    return rows, last_written, notes


def _logged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    return _series(row for row in rows if "set" not in row)


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Series]]:
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "set" in row:
            by_set.setdefault(str(row["set"]), []).append(row)
    return {name: _series(of_set) for name, of_set in by_set.items()}


def _series(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Each metric of any row; of two rows with the same step the later counts."""
    by_name: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name in _NOT_METRICS or isinstance(value, bool) or not (value is None or isinstance(value, int | float)):
                continue
            by_name.setdefault(name, {})[row["step"]] = _plottable(value)
    return {
        name: Series(np.fromiter(values, dtype=np.int64), np.fromiter(values.values(), dtype=np.float64))
        for name, values in by_name.items()
    }


def _plottable(value: object) -> float:
    """A number whose differences to others can be drawn, which are finite and no denormal; NaN for anything else."""
    if not is_number(value) or abs(value) > _MAX_VALUE:
        return math.nan
    return float(value) if abs(value) > 1 / _MAX_VALUE else 0.0


def _status(directory: Path, sessions: Sequence[Session]) -> Status:
    if sessions and sessions[-1].end.how in ("finished", "stopped", "failed"):
        return Status[sessions[-1].end.how]
    if _is_locked(directory / "run.lock"):
        return Status.running
    if (directory / "stopped.json").is_file():
        return Status.stopped
    if not sessions and (directory / "model" / "modules.json").is_file():
        return Status.finished
    return Status.ended


def _is_locked(path: Path) -> bool:
    """Whether a run holds its lock. Reads only: acquiring the lock with filelock would empty the file."""
    with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
