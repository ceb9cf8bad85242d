"""Where ranks keep prepared data: where they were told to, else in the home directory, else in the run's own folder."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from embedtrain.data.cache.cache import cache_directory
from embedtrain.distributed.world import World

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
