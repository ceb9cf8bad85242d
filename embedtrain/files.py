"""Files that are written completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary file beside `path` to write to; rename it to `path` when the block ends.

    A reader sees the old content or the new, never a part of it. If the block fails, the temporary file is removed and
    `path` is unchanged.

    Args:
        durable: flush the content to disk before the rename, so that it survives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        if durable:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
