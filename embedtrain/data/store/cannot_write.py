"""The sentence about a cache that cannot be written: no room, no right, no locks, or something else in its place."""

import errno
import shutil
from pathlib import Path

from embedtrain.errors import DataError

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
