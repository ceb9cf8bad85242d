"""The directory of prepared data: its location, digests, and writing and mapping of arrays and metadata."""

import errno
import hashlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.distributed.world import World
from embedtrain.errors import DataError

# A part of every key: raised whenever files of the cache change their meaning.
FORMAT = 3
# Smaller arrays are read, not mapped: a thousand small sources would need as many maps and open files.
MIN_MAPPED_BYTES = 1 << 14


def silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody wants to hear of."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where prepared data is kept.

    Attributes:
        directory: one folder in it for each thing that is kept, named after a digest of what it was made from.
        progress: called with a phase ("reading train-en"), how many of its parts are done, and of how many.
    """

    directory: Path
    progress: Callable[[str, int, int], None] = silent


def cache_directory(option: str | None) -> Path:
    """Where prepared data is kept: `option` (data.cache_dir), else what the environment says, else below ~/.cache."""
    if option:
        return Path(option).expanduser()
    if named := os.environ.get("EMBEDTRAIN_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "embedtrain"


def json_digest(value: Any) -> str:
    """A digest of anything that JSON can say, 32 hexadecimal digits; the order of an object's keys does not matter."""
    told = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def write_metadata(path: Path, facts: Any) -> None:
    """Write small facts as JSON."""
    path.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")


def read_metadata(path: Path) -> Any:
    """What `write_metadata` wrote."""
    return json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))


def write_array(path: Path, values: NDArray[Any]) -> None:
    """Write the numbers of an array and nothing else; `mapped` opens them."""
    # Not ndarray.tofile: its error on a full disk does not say that the disk is full.
    with path.open("wb") as file:
        file.write(np.ascontiguousarray(values).data.cast("B") if values.size else b"")


def mapped(path: Path, dtype: Any) -> NDArray[Any]:
    """The numbers of a file, one dimension, read-only: mapped into memory, or read where they are few.

    A map stays valid when its file is deleted.
    """
    kind = np.dtype(dtype)
    if path.stat().st_size >= MIN_MAPPED_BYTES:
        # As a plain array: indexing a memmap makes a memmap, which is slower.
        return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)
    return np.frombuffer(path.read_bytes(), dtype=kind)  # read-only, since bytes are


def allow_open_files(more: int) -> None:
    """Raise the number of files that this process may hold open, where the system lets it: every map is one.

    The usual limit of 1024 is meant for programs that wait with `select`; the system's own is far higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + more + 512 if Path("/proc/self/fd").is_dir() else soft + more
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


_ELSEWHERE = "set data.cache_dir or $EMBEDTRAIN_CACHE to a folder"


def cannot_write(folder: Path, error: OSError, *, above: bool = False) -> DataError:
    """What the system says of a folder, as an error for the user.

    Args:
        folder: which cannot be written.
        error: what the system says.
        above: the folder is not of the cache, but would hold it, and could not be made.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(one for one in (folder, *folder.parents) if one.exists())
        free = shutil.disk_usage(there).free / 1e6
        return DataError(
            f"{folder}: no room left to cache the training data, {free:,.1f} MB free: free some, or {_ELSEWHERE} "
            "with more room"
        )
    if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP) and not above:
        return DataError(f"{folder}: files cannot be locked in this cache: {_ELSEWHERE} on another disk")
    here = "the training data cannot be cached here"
    what = "this folder cannot be made to cache the training data in" if above else here
    return DataError(f"{folder}: {what} ({error.strerror or error}): {_ELSEWHERE} that can be written")


_TRIED = 1 << 20  # bytes: a full disk may still take an empty file


def cache_place(option: str | None, instead: Path, world: World, say: Callable[[str], None]) -> Path:
    """The folder for prepared data, by the same rule on every rank. A collective.

    A home directory that is full or read-only is no reason not to train: unless a folder was asked for, by `option` or
    $EMBEDTRAIN_CACHE, data is prepared in `instead` when some rank cannot write there.

    Args:
        option: `data.cache_dir` and its like.
        instead: a folder that all ranks see.
        world: the ranks.
        say: called where it is not the usual folder.
    """
    place = cache_directory(option)
    asked = bool(option or os.environ.get("EMBEDTRAIN_CACHE"))
    reasons = world.gather(None if asked else _cannot_write(place))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None:
        return place
    say(f"{place} cannot be written ({reason}): data is prepared in {instead}; data.cache_dir names another")
    return instead


def _cannot_write(folder: Path) -> str | None:
    """Why nothing can be written there; None: it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            written = file.write(bytes(_TRIED))
            os.fsync(file.fileno())
        return None if written == _TRIED else os.strerror(errno.ENOSPC)
    except OSError as error:
        return error.strerror or str(error)
