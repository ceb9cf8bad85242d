"""Shared build of folders: processes claim tasks with file locks, and rename complete results into place.

    build([Build(folder, lambda: {"rows-00000": write_first, "rows-00001": write_second}, join)])

Every process of every job that needs the folders calls `build`, on one node or on several that share a disk. A process
only waits for tasks that another process is running; if that process dies, its locks are released and a waiting process
runs its tasks. There are no collectives, so processes may start at any time.
"""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock, Timeout

from embedtrain.data.cache.cache import read_metadata, write_error, write_metadata
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.files import flush_to_disk

Task: TypeAlias = Callable[[Path], None]  # writes one file or folder at the path it is given

JOINED = "joined"  # what `join` writes
COMPLETE = "complete.json"
_LOCKS, _UNFINISHED, _FAILED = "locks", "unfinished", ".failed"
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 0.5  # seconds
_ATTEMPTS = 5


@dataclass(frozen=True)
class Build:
    """A folder and how it is built.

    Attributes:
        tasks: returns tasks by the name of the file or folder in `directory` that each writes, the same in all
            processes. Called only if the folder is not complete.
        join: writes the folder `joined` from the results of all tasks in `directory`.
    """

    directory: Path
    tasks: Callable[[], Mapping[str, Task]]
    join: Task
    keep: bool = True  # whether the results of the tasks are kept after `join`
    progress: Callable[[int, int], None] = lambda done, total: None  # tasks completed by all processes, and all tasks


def is_complete(directory: Path) -> bool:
    """Whether the folder has all files that were built, with their sizes."""
    try:
        sizes = read_metadata(directory / COMPLETE)["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def build(builds: Sequence[Build]) -> None:
    """Build folders, the same in all processes that call this, together with them; return when all are complete.

    Raises:
        DataError: the error of a task; if several fail, that of the first task, in every process. Or a folder cannot be
            written: no space, no permission, or a file of the same name.
    """
    pending = [_Builder(build_spec) for build_spec in builds]
    failure: EmbedtrainError | None = None
    wait = _SHORTEST_WAIT
    while pending:
        worked = False
        for index, builder in enumerate(pending):
            try:
                while (state := builder.step()) == _State.worked:
                    worked = True
            except EmbedtrainError as error:
                # Only builds before this one can have an earlier failure.
                failure, pending, worked = error, pending[:index], True
                break
            builder.done = state == _State.done
        pending = [builder for builder in pending if not builder.done]
        # The remaining tasks are being run by other processes.
        wait = _SHORTEST_WAIT if worked else min(2 * wait, _LONGEST_WAIT)
        if pending and not worked:
            time.sleep(wait)
    if failure:
        raise failure


class _State(Enum):
    """Result of a step: the folder is complete, a task was run, or other processes run all remaining tasks."""

    done = 0
    worked = 1
    blocked = 2


class _Builder:
    """Runs tasks of one build in this process."""

    def __init__(self, build_spec: Build) -> None:
        self.done = False
        self._build, self._directory = build_spec, build_spec.directory
        self._unfinished = self._directory / _UNFINISHED / f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._tasks: Mapping[str, Task] | None = None
        self._failure: tuple[int, EmbedtrainError] | None = None
        self._last = ""  # the last task that was claimed
        self._num_reported = -1
        self._attempts = _ATTEMPTS

    def step(self) -> _State:
        """Run one task that is not claimed by another process."""
        try:
            return self._step()
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(self._directory):
                raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise write_error(self._directory, error) from error
            self._count_attempt()  # the folder, or a part of it, was deleted during the build
            return _State.worked

    def _step(self) -> _State:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if Path(error.filename) in self._directory.parents:
                raise write_error(Path(error.filename), error, is_parent=True) from error
            raise
        if (self._directory / COMPLETE).exists():
            return self._finish()
        if self._tasks is None:
            self._tasks = self._build.tasks()
        present = set(os.listdir(self._directory))
        names = list(self._tasks)
        missing = [(i, name) for i, name in enumerate(names) if name not in present]
        self._report_progress(len(names) - len(missing), len(names))
        if self._failure:
            missing = [(i, name) for i, name in missing if i < self._failure[0]]
            if not missing:
                raise self._failure[1]
        if missing:
            return self._claim_any(missing, present)
        if JOINED not in present:
            worked = self._claim(JOINED, self._build.join)
        else:
            worked = self._claim(COMPLETE, lambda path: self._write_complete([*names, JOINED], path))
        return _State.worked if worked else _State.blocked

    def _claim_any(self, missing: list[tuple[int, str]], present: set[str]) -> _State:
        # First tasks that failed in other processes, so that all processes soon report the same error; then in turn,
        # so that tasks claimed by others are not tried again and again.
        missing.sort(key=lambda task: (task[1] + _FAILED not in present, task[1] <= self._last, task[0]))
        assert self._tasks is not None
        for i, name in missing:
            try:
                claimed = self._claim(name, self._tasks[name])
            except EmbedtrainError as error:
                self._failure, claimed = (i, error), True
            if claimed:
                self._last = name
                return _State.worked
        return _State.blocked

    def _claim(self, name: str, task: Task) -> bool:
        """Run a task if its lock is free; False if it is not."""
        result, mark = self._directory / name, self._directory / (name + _FAILED)
        try:
            with self._lock(name).acquire(blocking=False):
                if result.exists() or (self._directory / COMPLETE).exists():
                    return True
                try:
                    self._write(task, result)
                except EmbedtrainError:
                    with suppress(OSError):
                        mark.touch()
                    raise
                mark.unlink(missing_ok=True)
                return True
        except Timeout:
            return False

    def _lock(self, name: str) -> FileLock:
        folder = self._directory / _LOCKS
        folder.mkdir(exist_ok=True)
        # A soft lock would remain after its process is killed.
        return FileLock(folder / f"{name}.lock", fallback_to_soft=False)

    def _write(self, task: Task, result: Path) -> None:
        """Write the result under another name, flush it to disk, and rename it."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        path = self._unfinished / result.name
        try:
            task(path)
            _sync(path)
            try:
                path.rename(result)
            except OSError as error:
                # On a disk whose locks do not reach all nodes another node may have written the same result first.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            flush_to_disk(self._directory)
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _write_complete(self, names: list[str], path: Path) -> None:
        folders = names if self._build.keep else [JOINED]
        files = [file for name in folders for file in _files(self._directory / name)]
        write_metadata(path, {"files": {str(file.relative_to(self._directory)): file.stat().st_size for file in files}})

    def _finish(self) -> _State:
        if not is_complete(self._directory):
            self._remove_damaged()
            return _State.worked
        if self._num_reported >= 0:
            self._report_progress(len(self._tasks or ()), len(self._tasks or ()))
        # After taking a lock a process checks for `complete.json`, so the locks are no longer needed.
        leftovers = [_UNFINISHED, _LOCKS] + ([] if self._build.keep else list(self._tasks or ()))
        for name in leftovers:
            shutil.rmtree(self._directory / name, ignore_errors=True)
        return _State.done

    def _remove_damaged(self) -> None:
        """Remove everything from a complete folder with missing or truncated files: others may be damaged too."""
        self._count_attempt()
        with self._lock(COMPLETE):
            if is_complete(self._directory):
                return
            (self._directory / COMPLETE).unlink(missing_ok=True)
            for path in self._directory.iterdir():
                if path.name == _LOCKS:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _count_attempt(self) -> None:
        self._attempts -= 1
        if not self._attempts:
            raise DataError(
                f"{self._directory}: files disappear from this cache while it is being built: do not clean it up "
                "meanwhile, or set data.cache_dir or $EMBEDTRAIN_CACHE to another folder"
            )

    def _report_progress(self, done: int, total: int) -> None:
        if done != self._num_reported:
            self._num_reported = done
            self._build.progress(done, total)


def _files(path: Path) -> list[Path]:
    """The file itself, which must exist, or all files of a folder."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    path.stat()
    return [path]


def _sync(path: Path) -> None:
    """Flush a file or folder to disk before it gets the name that marks it as complete."""
    for file in _files(path):
        flush_to_disk(file)
    if path.is_dir():
        flush_to_disk(path)
