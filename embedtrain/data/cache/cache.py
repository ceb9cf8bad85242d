"""The directory of prepared data: its location, digests, and writing and mapping of arrays and metadata."""

import errno
import hashlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.verification import Verification
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.utils.files import expand_user, has_home, temporary_home

# A part of every key: raised whenever the format of cached files changes.
FORMAT = 6
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
