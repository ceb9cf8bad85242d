"""Files that are written completely or not at all, and never through a link to a file elsewhere.

A folder may come from someone else: an unpacked archive, a shared disk. So a link at the path of a file is replaced or
rejected, temporary files are created under random names, and deletion does not descend through links.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from embedtrain.errors import ConfigError, UnreadableError

_TEMPORARY = re.compile(r"\.embedtrain-[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary file beside `path` to write to; rename it to `path` when the block ends.

    A reader sees the old content or the new, never a part of it; a link at `path` is replaced and not followed. If the
    block fails, the temporary file is removed and `path` is unchanged; that of a killed process is removed by the next
    one that writes in this folder. A durable write is flushed to disk before the rename and survives a power failure.

    The block has to write into the temporary file itself. A library that replaces it (`safetensors.save_file`) removes
    the lock, which marks it as in use, and the mode that the umask gives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    temporary, descriptor = _create_temporary(path.parent)
    try:
        yield temporary
        if durable:
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of reading into UnreadableError, unless the file is missing.

    EIO and ESTALE of a network disk pass. A file that was taken for damaged would be deleted, or built again.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableError(
            f"{error.filename or path} cannot be read ({error.strerror or error}): it may be intact, so nothing is "
            "deleted or built again; repair the disk, and run the same command again"
        ) from error


def expand_user(path: str | Path) -> Path:
    """The path with the home directory for a leading `~`; unchanged where there is none, or no user of that name.

    A container or a job may run as a user without an entry in passwd and without HOME: `Path.expanduser` raises there.
    """
    return Path(os.path.expanduser(path))


def has_home() -> bool:
    """Whether HOME or passwd names a home directory of this process's user; a temporary one does not count."""
    home = os.path.expanduser("~")
    return os.path.isabs(home) and not home.startswith(str(_temporary_home()))


def temporary_home() -> Path:
    """The folder that takes the place of a home directory, below the folder for temporary files of this host.

    It belongs to this user alone and is the same for all processes of the host. A folder of that name which somebody
    else has made is not used.
    """
    import tempfile  # not at every start

    directory = _temporary_home()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return directory
    return Path(tempfile.mkdtemp(prefix=f"{directory.name}-"))


def _temporary_home() -> Path:
    import tempfile

    return Path(tempfile.gettempdir(), f"embedtrain-{os.getuid()}")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that people may read, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def open_append(path: Path) -> FileIO:
    """Open a file for appending, unbuffered: what was written is in the file.

    Raises ConfigError if it is a link or not a regular file, OSError if it cannot be written.
    """
    require_own_file(path)
    return FileIO(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))


def require_own_file(path: Path) -> None:
    """Raise ConfigError unless `path` is missing, or a regular file without another name.

    A file that is written in place would otherwise change elsewhere, or block (a named pipe).
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        link = stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1)
        kind = "a link to another file" if link else "not a regular file"
        raise ConfigError(f"{path} is {kind}, which is not written to: replace it by a copy, or delete it")


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they are missing; ConfigError if `path` itself is a link."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, through which nothing is written: delete it")
    path.mkdir(parents=True, exist_ok=True)


def require_no_links(folder: Path) -> None:
    """Raise ConfigError if the folder is a link or contains one."""
    paths = (Path(parent, name) for parent, *names in os.walk(folder) for name in itertools.chain(*names))
    for path in itertools.chain([folder], paths):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, through which nothing is written: delete it")


def remove_tree(path: Path) -> None:
    """Delete a folder with its content, a file, or a link but not what it points to. Errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def directory_size(path: Path) -> int:
    """Bytes of all files below a directory, without those that disappear meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create_temporary(folder: Path) -> tuple[Path, int]:
    """A new file and its descriptor, which holds the lock that marks the file as in use."""
    while True:
        path = folder / f".embedtrain-{os.urandom(8).hex()}.tmp"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _lock(descriptor)
        except OSError:  # the file system has no locks: nobody can remove leftovers there
            return path, descriptor
        # Otherwise a process took it for a leftover before it was locked.
        if is_locked and os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


@functools.cache
def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes, once per process and folder; the system released their locks."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                _remove_leftover(folder / name)


def _remove_leftover(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
