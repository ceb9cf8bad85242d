"""The directory of prepared data: its location, digests, arrays, metadata, and verification of large folders."""

import errno
import hashlib
import json
import os
import resource
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.utils.files import Block, Checksums, expand_user, has_home, temporary_home

COMPLETE = "complete.json"  # the checksums of all files of a folder, written when it is complete
# Bytes of a folder that every process verifies before it opens the folder: at most half a second.
VERIFIED_BYTES = 1 << 30


class Verification:
    """Verifies what `shared_build.is_complete` does not: the blocks of folders beyond VERIFIED_BYTES.

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
FORMAT = 8
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
