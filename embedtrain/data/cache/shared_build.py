"""Building folders side by side: processes claim their parts with file locks; what is whole is renamed into place.

    build([Build(folder, lambda: {"rows-00000": write_first, "rows-00001": write_second}, join)])

Every process of every job that wants the folders calls `build` alike, on one node or on several that share a disk.
Nobody waits for anybody but for parts that another is building, and when that one dies its locks free themselves and
its parts are built by those who wait. There are no collectives, so it does not matter who comes, and when.
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

from embedtrain.data.cache.cache import cannot_write, read_metadata, write_metadata
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
    """A folder that is wanted, and how it is made.

    Attributes:
        directory: the folder; what is in it is trusted only if it is whole.
        tasks: the tasks by the name of the file or folder in `directory` that each writes, alike in all processes.
            Called only where the folder is not complete.
        join: writes the folder `joined` from what the tasks wrote, which lies in `directory` by then.
        keep: whether what the tasks wrote stays once it is joined.
        progress: how many tasks are done, by whomever, and of how many.
    """

    directory: Path
    tasks: Callable[[], Mapping[str, Task]]
    join: Task
    keep: bool = True
    progress: Callable[[int, int], None] = lambda done, total: None


def is_complete(directory: Path) -> bool:
    """Whether the folder holds all that was built, each file as long as it was written."""
    try:
        sizes = read_metadata(directory / COMPLETE)["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def build(builds: Sequence[Build]) -> None:
    """Build folders together with all other processes that call this for them; return when all are complete.

    Args:
        builds: alike, and in the same order, in all processes of a job.

    Raises:
        DataError: what a task raised. Where several fail it is the first of them, in every process alike. Or a
            folder cannot be written: no room, no right, or something else in its place.
    """
    pending = [_Builder(one) for one in builds]
    failure: EmbedtrainError | None = None
    wait = _SHORTEST_WAIT
    while pending:
        worked = False
        for place, builder in enumerate(pending):
            try:
                while (state := builder.step()) == _State.worked:
                    worked = True
            except EmbedtrainError as error:
                # Only those before it can still hold an earlier failure.
                failure, pending, worked = error, pending[:place], True
                break
            builder.done = state == _State.done
        pending = [builder for builder in pending if not builder.done]
        # What is left is being built by others.
        wait = _SHORTEST_WAIT if worked else min(2 * wait, _LONGEST_WAIT)
        if pending and not worked:
            time.sleep(wait)
    if failure:
        raise failure


class _State(Enum):
    """How a step went: the folder is complete, something was done, or others hold all that is left."""

    done = 0
    worked = 1
    blocked = 2


class _Builder:
    """One process's share in building a folder."""

    def __init__(self, wanted: Build) -> None:
        self.done = False
        self._wanted, self._directory = wanted, wanted.directory
        self._unfinished = self._directory / _UNFINISHED / f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        self._tasks: Mapping[str, Task] | None = None
        self._failure: tuple[int, EmbedtrainError] | None = None
        self._last = ""  # what was tried last
        self._told = -1
        self._attempts = _ATTEMPTS

    def step(self) -> _State:
        """Do one task of those that are next."""
        try:
            return self._step()
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(self._directory):
                raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise cannot_write(self._directory, error) from error
            self._count_attempt()  # somebody deleted the folder, or a part of it, while it was being built
            return _State.worked

    def _step(self) -> _State:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if Path(error.filename) in self._directory.parents:
                raise cannot_write(Path(error.filename), error, above=True) from error
            raise
        if (self._directory / COMPLETE).exists():
            return self._finish()
        if self._tasks is None:
            self._tasks = self._wanted.tasks()
        present = set(os.listdir(self._directory))
        names = list(self._tasks)
        missing = [(i, name) for i, name in enumerate(names) if name not in present]
        self._tell(len(names) - len(missing), len(names))
        if self._failure:
            missing = [each for each in missing if each[0] < self._failure[0]]
            if not missing:
                raise self._failure[1]
        if missing:
            return self._claim_any(missing, present)
        if JOINED not in present:
            worked = self._claim(JOINED, self._wanted.join)
        else:
            worked = self._claim(COMPLETE, lambda path: self._write_complete([*names, JOINED], path))
        return _State.worked if worked else _State.blocked

    def _claim_any(self, missing: list[tuple[int, str]], present: set[str]) -> _State:
        # First what has failed elsewhere, so that all processes soon say the same; then in a circle, so that
        # what others hold is not asked for again and again.
        missing.sort(key=lambda each: (each[1] + _FAILED not in present, each[1] <= self._last, each[0]))
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
        """Run a task if its lock can be had at once; False if it cannot."""
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
        # A soft lock would outlive a process that is killed.
        return FileLock(folder / f"{name}.lock", fallback_to_soft=False)

    def _write(self, task: Task, result: Path) -> None:
        """Have the result written under another name, and put it in its place when it is on the disk."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        path = self._unfinished / result.name
        try:
            task(path)
            _sync(path)
            try:
                path.rename(result)
            except OSError as error:
                # On a disk whose locks do not reach all nodes another one may have been faster, and wrote the same.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            flush_to_disk(self._directory)
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _write_complete(self, names: list[str], path: Path) -> None:
        kept = names if self._wanted.keep else [JOINED]
        files = [file for name in kept for file in _files(self._directory / name)]
        write_metadata(path, {"files": {str(file.relative_to(self._directory)): file.stat().st_size for file in files}})

    def _finish(self) -> _State:
        if not is_complete(self._directory):
            self._remove_damaged()
            return _State.worked
        if self._told >= 0:
            self._tell(len(self._tasks or ()), len(self._tasks or ()))
        # Who gets a lock looks for `complete.json` next, which is there: no lock guards anything any more.
        left = [_UNFINISHED, _LOCKS] + ([] if self._wanted.keep else list(self._tasks or ()))
        for name in left:
            shutil.rmtree(self._directory / name, ignore_errors=True)
        return _State.done

    def _remove_damaged(self) -> None:
        """Remove everything where a complete folder is no longer whole: what else is damaged nobody knows."""
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
                f"{self._directory}: files vanish from this cache while it is being built: let nothing clean it up "
                "meanwhile, or set data.cache_dir or $EMBEDTRAIN_CACHE to another folder"
            )

    def _tell(self, done: int, total: int) -> None:
        if done != self._told:
            self._told = done
            self._wanted.progress(done, total)


def _files(path: Path) -> list[Path]:
    """A file itself, or all files of a folder.

    Raises:
        FileNotFoundError: there is neither.
    """
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    path.stat()
    return [path]


def _sync(path: Path) -> None:
    """Have a file, or a folder with all in it, on the disk before it gets the name that says it is whole."""
    for file in _files(path):
        flush_to_disk(file)
    if path.is_dir():
        flush_to_disk(path)
