"""Prepared data on disk: its directory, arrays, verification, and folders that processes build together."""

import errno
import hashlib
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from embedtrain.distributed.world import World
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.utils.files import Block, Checksums, expand_user, flush_to_disk, has_home, remove_tree, temporary_home

COMPLETE = "complete.json"  # the checksums of all files of a folder, written when it is complete
# Bytes of a folder that every process verifies before it opens the folder: at most half a second.
VERIFIED_BYTES = 1 << 30


class Verification:
    """Verifies what `is_complete` does not: the blocks of folders beyond VERIFIED_BYTES.

    This process verifies every `local_size`-th of them.
    """

    def __init__(self, local_rank: int = 0, local_size: int = 1) -> None:
        self._local_rank, self._local_size = local_rank, local_size
        self._pending: deque[tuple[Path, Checksums, Block]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # None: nothing is pending
        self._error: Exception | None = None

    def add(self, directory: Path) -> None:
        """Verify the rest of a complete folder."""
        try:
            checksums = Checksums.read(directory / COMPLETE)
        except (OSError, ValueError):  # opening the folder reports it
            return
        blocks = checksums.split(VERIFIED_BYTES)[1][self._local_rank :: self._local_size]
        with self._lock:  # a thread that is past its last block takes no more
            self._pending.extend((directory, checksums, block) for block in blocks)
            if self._pending and self._thread is None:
                # A daemon, so that a run which fails ends without waiting for it.
                self._thread = threading.Thread(target=self._verify, name="verification", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise DataError if a damaged file was detected, or why none is; callable from any thread."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all files are verified; raises as `check`."""
        thread = self._thread
        if thread is not None:
            thread.join()
        self.check()

    def _verify(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._verify_block(*block)
        except Exception as error:  # nothing would be verified any more
            self._error = error

    def _next(self) -> tuple[Path, Checksums, Block] | None:
        with self._lock:
            if not self._pending:
                self._thread = None
                return None
            return self._pending.popleft()

    @staticmethod
    def _verify_block(directory: Path, checksums: Checksums, block: Block) -> None:
        if not checksums.is_intact(directory, block):
            with suppress(OSError):  # makes the next start verify every result, and build damaged ones again
                (directory / COMPLETE).unlink()
            raise DataError(
                f"{directory / block[0]} is damaged in the cache: start the same command again, and it is built again"
            )


# A part of every key: raised whenever the format of cached files changes.
FORMAT = 9
# Smaller arrays are read, not mapped: a thousand small sources would need as many maps and open files.
MIN_MAPPED_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The directory of prepared data."""

    directory: Path  # its folders are named after digests of their inputs
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None  # "reading train-en", 3, 7
    verification: Verification = field(default_factory=Verification)  # of large folders that were complete

    @classmethod
    def of_world(cls, directory: Path, world: World, **options: Any) -> Self:
        """A cache whose verification the ranks of each host share."""
        return cls(directory=directory, verification=Verification(world.local_rank, world.local_size), **options)


def cache_directory(option: str | None) -> Path:
    """The directory of prepared data: `option` (data.cache_dir), else $EMBEDTRAIN_CACHE, else below ~/.cache."""
    if path := option or os.environ.get("EMBEDTRAIN_CACHE"):
        return expand_user(path)
    home = os.environ.get("XDG_CACHE_HOME")
    if not home and not has_home():
        return temporary_home() / "cache"
    return (Path(home) if home else expand_user("~/.cache")) / "embedtrain"


def json_digest(value: Any) -> str:
    """A digest of a JSON value, 32 hexadecimal digits; the order of an object's keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_metadata(path: Path, metadata: Any) -> None:
    """Write a small value as JSON."""
    path.write_text(json.dumps(metadata, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")


def read_metadata(path: Path) -> Any:
    """The value that `write_metadata` wrote."""
    return json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))


def write_array(path: Path, values: NDArray[Any]) -> None:
    """Write the numbers of an array without a header; `map_array` opens them."""
    # Not ndarray.tofile: its error on a full disk does not say that the disk is full.
    with path.open("wb") as file:
        file.write(np.ascontiguousarray(values).data.cast("B") if values.size else b"")


def concatenate_files(paths: Iterable[Path], to: Path) -> None:
    """Write the contents of several files one after the other."""
    with to.open("wb") as joined:
        for path in paths:
            with path.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)


def map_array(path: Path, dtype: Any) -> NDArray[Any]:
    """The numbers of a file, one-dimensional and read-only: memory-mapped, or read if they are few.

    A map stays valid when its file is deleted.
    """
    kind = np.dtype(dtype)
    if path.stat().st_size >= MIN_MAPPED_BYTES:
        # As a plain array: indexing a memmap returns a memmap, which is slower.
        return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)
    return np.frombuffer(path.read_bytes(), dtype=kind)  # read-only, since bytes are


def allow_open_files(more: int) -> None:
    """Raise this process's limit of open files if the system permits it: every map is an open file.

    The usual limit of 1024 is meant for programs that wait with `select`; the system's own is far higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = len(os.listdir("/proc/self/fd")) + more + 512 if Path("/proc/self/fd").is_dir() else soft + more
    if soft != resource.RLIM_INFINITY and soft < required:
        limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


_ELSEWHERE = "set data.cache_dir or $EMBEDTRAIN_CACHE to a folder"


def write_error(folder: Path, error: OSError, *, is_parent: bool = False) -> DataError:
    """The error for the user when a folder cannot be written; `is_parent`: or created, as a parent of the cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 1e6
        return DataError(
            f"{folder}: no room left to cache the training data, {free:,.1f} MB free: free some, or {_ELSEWHERE} "
            "with more room"
        )
    if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP) and not is_parent:
        return DataError(f"{folder}: files cannot be locked in this cache: {_ELSEWHERE} on another disk")
    problem = (
        "this folder cannot be made to cache the training data in"
        if is_parent
        else "the training data cannot be cached here"
    )
    return DataError(f"{folder}: {problem} ({error.strerror or error}): {_ELSEWHERE} that can be written")


_TRIAL_BYTES = 1 << 20  # a full disk may still accept an empty file


def writable_cache_directory(option: str | None, fallback: Path, world: World, report: Callable[[str], None]) -> Path:
    """The directory of prepared data, the same on every rank. A collective.

    A home directory that is missing, full or read-only does not prevent training: unless `option` or
    $EMBEDTRAIN_CACHE names a directory, data is prepared in `fallback`, which all ranks see, if a rank cannot write;
    `report` gets a note then.
    """
    directory = cache_directory(option)
    is_explicit = bool(option or os.environ.get("EMBEDTRAIN_CACHE"))
    reasons = world.gather(None if is_explicit else _why_not_writable(directory))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None:
        return directory
    report(f"{directory} cannot be written ({reason}): data is prepared in {fallback}; data.cache_dir names another")
    return fallback


def _why_not_writable(folder: Path) -> str | None:
    if not os.environ.get("XDG_CACHE_HOME") and not has_home():
        return "there is no home directory"  # other hosts do not see the folder in its place
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            written = file.write(bytes(_TRIAL_BYTES))
            os.fsync(file.fileno())
        return None if written == _TRIAL_BYTES else os.strerror(errno.ENOSPC)
    except OSError as error:
        return error.strerror or str(error)


Task: TypeAlias = Callable[[Path], None]  # writes one file or folder at the path it is given

JOINED = "joined"  # what `join` writes
_LOCKS, _UNFINISHED, _CHECKSUMS, _FAILED = "locks", "unfinished", "checksums", ".failed"
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 0.5  # seconds
_ATTEMPTS = 5


def print_note(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Build:
    """A folder and how it is built.

        build([Build(folder, lambda: {"rows-00000": write_first, "rows-00001": write_second}, join)])

    Every process of every job that needs the folders calls `build`, on one node or on several that share a disk. A
    process only waits for tasks that another process is running; if that process dies, its locks are released and a
    waiting process runs its tasks. There are no collectives, so processes may start at any time.

    Every result has checksums, computed when it is written. Results of earlier sessions are compared with theirs
    before they are used, and damaged ones are built again.

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
    report: Callable[[str], None] = print_note  # called by the process that removes a damaged result


def is_complete(directory: Path) -> bool:
    """Whether the folder has all files that were built: their sizes, and their content up to VERIFIED_BYTES."""
    try:
        checksums = Checksums.read(directory / COMPLETE)
    except (OSError, ValueError):
        return False
    return not checksums.damaged(directory, checksums.split(VERIFIED_BYTES)[0])


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
        self._unverified: set[str] | None = None  # results of earlier sessions
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
        if self._unverified is None:
            self._unverified = present & {*names, JOINED}
        # If the results of tasks are not kept, what was joined from them does without.
        required = names if self._build.keep or JOINED not in present else []
        missing = [(i, name) for i, name in enumerate(required) if name not in present]
        self._report_progress(len(names) - len(missing), len(names))
        if self._failure:
            missing = [(i, name) for i, name in missing if i < self._failure[0]]
            if not missing:
                raise self._failure[1]
        if missing:
            return self._claim_any(missing, present)
        if JOINED not in present:
            worked = self._claim(JOINED, self._build.join, reads=names)
        else:
            kept = [*names, JOINED] if self._build.keep else [JOINED]
            worked = self._claim(COMPLETE, lambda path: self._write_complete(kept, path), reads=kept)
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

    def _claim(self, name: str, task: Task, reads: Sequence[str] = ()) -> bool:
        """Run a task if its lock is free, or remove damaged results that it reads; False if the lock is held."""
        result, mark = self._directory / name, self._directory / (name + _FAILED)
        try:
            with self._lock(name).acquire(blocking=False):
                if result.exists() or (self._directory / COMPLETE).exists():
                    return True
                if self._remove_damaged(reads):
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
            if result.name != COMPLETE:
                # Before the result, so that no result is without checksums.
                checksums = self._unfinished / f"{_CHECKSUMS}.json"
                Checksums.of(path).write(checksums)
                self._checksums_file(result.name).parent.mkdir(exist_ok=True)
                checksums.replace(self._checksums_file(result.name))
            try:
                path.rename(result)
            except OSError as error:
                # On a disk whose locks do not reach all nodes another node may have written the same result first.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            flush_to_disk(self._directory)
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _write_complete(self, kept: Sequence[str], path: Path) -> None:
        for name in kept:
            (self._directory / name).stat()  # another process may have removed it as damaged
        results = {name: Checksums.read(self._checksums_file(name)) for name in kept}
        Checksums({file: entry for name, sums in results.items() for file, entry in sums.below(name).items()}).write(
            path
        )

    def _checksums_file(self, name: str) -> Path:
        return self._directory / _CHECKSUMS / f"{name}.json"

    def _remove_damaged(self, names: Sequence[str]) -> bool:
        """Remove those results of earlier sessions that are damaged; returns whether there are any."""
        assert self._unverified is not None
        removed: list[str] = []
        for name in sorted(self._unverified & set(names)):
            self._unverified.remove(name)
            try:
                files = Checksums.read(self._checksums_file(name)).damaged(self._directory / name)
            except (OSError, ValueError):
                files = ["."]  # nothing shows that the result is intact
            if files:
                removed += [str(self._directory / name / file) for file in files]
                remove_tree(self._directory / name)
        if removed:
            remove_tree(self._directory / JOINED)
            more = f" and {len(removed) - 1:,} more" if len(removed) > 1 else ""
            self._build.report(f"{removed[0]}{more}: damaged in the cache, and built again")
        return bool(removed)

    def _finish(self) -> _State:
        if not is_complete(self._directory):
            self._reopen()
            return _State.worked
        if self._num_reported >= 0:
            self._report_progress(len(self._tasks or ()), len(self._tasks or ()))
        # After taking a lock a process checks for `complete.json`, so the locks are no longer needed.
        leftovers = [_UNFINISHED, _LOCKS]
        for name in () if self._build.keep else self._tasks or ():
            leftovers += [name, f"{_CHECKSUMS}/{name}.json"]
        for name in leftovers:
            remove_tree(self._directory / name)
        return _State.done

    def _reopen(self) -> None:
        """Treat a complete folder with damaged files as an interrupted build, whose results are verified one by one."""
        self._count_attempt()
        with self._lock(COMPLETE):
            if not is_complete(self._directory):
                (self._directory / COMPLETE).unlink(missing_ok=True)
        self._unverified = None

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
