"""A run as its directory tells of it: the recipe, what was logged and measured, and how far it has come."""

import contextlib
import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from embedtrain.errors import DataError
from embedtrain.tracking.metrics import METRICS_FILE
from embedtrain.tracking.report.sample import AFTER, BEFORE, Sample, Vectors, read_texts, read_vectors
from embedtrain.tracking.sessions import SESSIONS_FILE, Session, read_sessions, total_seconds

_LABEL = 80  # characters
_NO_FIGURES = {"step", "set", "model"}


class Status(str, Enum):
    """How a run stands."""

    finished = "finished"
    going = "still going"
    stopped = "stopped by a signal"
    failed = "failed"
    ended = "ended without a word"  # killed, most likely


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over steps; steps rise. NaN where the figure was no finite number."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        directory: where it lies.
        label: what it is called, no other run of the report likewise.
        recipe: as it was resolved; empty where it cannot be read.
        versions: of the libraries, by name.
        logged: each figure of training.
        evaluations: evaluation set -> metric -> its course; the main metric of a set first.
        sessions: when it was under way.
        status: how it stands.
        seconds: how long it was under way in all, if that is known.
        exported: the directory of the exported model, if there is one.
        sample: texts that were looked at before and after, if there are any.
        before: their vectors before training.
        after: and those of the exported weights.
        notes: what could not be read.
    """

    directory: Path
    label: str
    recipe: Mapping[str, Any]
    versions: Mapping[str, Any]
    logged: Mapping[str, Series]
    evaluations: Mapping[str, Mapping[str, Series]]
    sessions: Sequence[Session]
    status: Status
    seconds: float | None
    exported: Path | None
    sample: Sample | None
    before: Vectors | None
    after: Vectors | None
    notes: Sequence[str]

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        every = [*self.logged.values(), *(one for of in self.evaluations.values() for one in of.values())]
        steps = [int(one.steps[-1]) for one in every if len(one.steps)]
        steps += [session.last_step for session in self.sessions if session.last_step is not None]
        return max(steps, default=0)

    @property
    def total_steps(self) -> int | None:
        """How far it was to go, if that is known."""
        if self.sessions:
            return self.sessions[-1].total_steps
        train = self.recipe.get("train")
        steps = train.get("steps") if isinstance(train, Mapping) else None
        return steps if isinstance(steps, int) else None

    def option(self, *names: str) -> Any:
        """An option of the recipe, such as `option("model", "path")`; None where it is not there."""
        at: Any = self.recipe
        for name in names:
            at = at.get(name) if isinstance(at, Mapping) else None
        return at


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Runs with labels that tell them apart.

    Raises:
        DataError: a folder is no run, or is named twice.
    """
    runs: list[Run] = []
    recipes = [_recipe(directory) for directory in directories]
    names = [str(recipe.get("name") or place.name) for (recipe, _), place in zip(recipes, directories, strict=True)]
    for directory, recipe, name in zip(directories, recipes, names, strict=True):
        if any(directory.resolve() == run.directory.resolve() for run in runs):
            raise DataError(f"{directory} is named twice: name each run once")
        label = name if names.count(name) == 1 else str(directory)
        runs.append(_read(directory, label if len(label) <= _LABEL else f"{label[:_LABEL]} …", *recipe))
    return runs


def _read(directory: Path, label: str, recipe: dict[str, Any], notes: list[str]) -> Run:
    versions = recipe.pop("versions", {})
    rows, seen, more = _rows(directory / METRICS_FILE)
    sessions = read_sessions(directory / SESSIONS_FILE)
    sample: Sample | None = None
    before = after = None
    try:
        sample = read_texts(directory / "sample")
        if sample is not None:
            before = read_vectors(directory / "sample", BEFORE, sample)
            after = read_vectors(directory / "sample", AFTER, sample)
    except DataError as error:
        notes.append(str(error))
    exported = directory / "model"
    return Run(
        directory,
        label,
        recipe,
        versions if isinstance(versions, Mapping) else {},
        _logged(rows),
        _evaluations(rows),
        sessions,
        _status(directory, sessions),
        total_seconds(sessions, seen),
        exported if (exported / "modules.json").is_file() else None,
        sample,
        before,
        after,
        notes + more,
    )


def _recipe(directory: Path) -> tuple[dict[str, Any], list[str]]:
    path = directory / "recipe.yaml"
    if not directory.is_dir():
        raise DataError(f"{directory} is no folder: name the output_dir of a run, such as runs/quickstart")
    if not path.is_file():
        raise DataError(f"{directory} is no run: a run's output_dir holds a recipe.yaml, and this folder has none")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        return {}, [f"{path} cannot be read: {' '.join(str(error).split())}"]
    return (recipe, []) if isinstance(recipe, dict) else ({}, [f"{path} cannot be read: it is not a mapping"])


def _rows(path: Path) -> tuple[list[dict[str, Any]], float | None, list[str]]:
    """Rows in the order of their steps, when the last was written, and what could not be read.

    A run may be writing its last line just now, and a disk may have been full before: what can be read is shown.
    """
    rows: list[dict[str, Any]] = []
    try:
        # Not splitlines(): a text may hold U+2028, which is a line's end to Python but not to JSON.
        lines = path.read_bytes().decode("utf-8", errors="replace").removesuffix("\n").split("\n")
        seen = path.stat().st_mtime
    except FileNotFoundError:
        return [], None, []
    except OSError as error:
        return [], None, [f"{path} cannot be read: {error}"]
    bad = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif line.strip() and number < len(lines):
            bad.append(number)
    notes = []
    if bad:
        which = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad)} lines, the first of them line {bad[0]},"
        notes.append(f"{path}: {which} cannot be read as a row of figures and is left out")
    rows.sort(key=lambda row: row["step"])
    return rows, seen, notes


def _logged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    return _courses(row for row in rows if "set" not in row)


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Series]]:
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "set" in row:
            by_set.setdefault(str(row["set"]), []).append(row)
    return {name: _courses(of) for name, of in by_set.items()}


def _courses(rows: Any) -> dict[str, Series]:
    """Each figure that some row has; of two rows of one step the later counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name in _NO_FIGURES or isinstance(value, bool) or not (value is None or isinstance(value, int | float)):
                continue
            number = math.nan if value is None or not math.isfinite(value) else float(value)
            found.setdefault(str(name), {})[row["step"]] = number
    return {
        name: Series(np.fromiter(course, dtype=np.int64), np.fromiter(course.values(), dtype=np.float64))
        for name, course in found.items()
    }


def _status(directory: Path, sessions: Sequence[Session]) -> Status:
    if sessions and sessions[-1].how in ("finished", "stopped", "failed"):
        return Status[sessions[-1].how]
    if _held(directory / "run.lock"):
        return Status.going
    if (directory / "stopped.json").is_file():
        return Status.stopped
    if not sessions and (directory / "model" / "modules.json").is_file():
        return Status.finished
    return Status.ended


def _held(path: Path) -> bool:
    """Whether a run holds its lock. A look that changes nothing: a lock of the library would empty the file."""
    with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
