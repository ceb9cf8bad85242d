"""Files that are written completely or not at all, and never through a link to a file elsewhere; their checksums.

A folder may come from someone else: an unpacked archive, a shared disk. So a link at the path of a file is replaced or
rejected, temporary files are created under random names, and deletion does not descend through links.

Checksums are computed when files are written, and compared before they are used again. They detect damage, such as a
bit that a disk has flipped, but no change by somebody who writes the checksums as well.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from xxhash import xxh3_64, xxh3_64_hexdigest

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


# A large file has one checksum for each block, so that several processes can share its verification.
BLOCK_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20  # stays in the CPU's cache

Block = tuple[str, int]  # of a file: its name and the index of the block


@dataclass(frozen=True)
class Checksums:
    """Sizes and XXH3 checksums of files below a folder."""

    files: dict[str, tuple[int, list[str]]]  # by relative path: size in bytes, and the checksum of each block

    @classmethod
    def of(cls, path: Path) -> Self:
        """The checksums of all files below a folder, or of a single file, whose name is then `.`."""
        if not path.is_dir():
            return cls({".": _file_checksums(path)})
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return cls({file.relative_to(path).as_posix(): _file_checksums(file) for file in files})

    def below(self, name: str) -> dict[str, tuple[int, list[str]]]:
        """The files, by their path relative to the folder that contains the folder or file `name`."""
        return {(name if file == "." else f"{name}/{file}"): entry for file, entry in self.files.items()}

    def write(self, path: Path) -> None:
        """Write them as JSON, with a checksum of their own."""
        files = {name: [size, blocks] for name, (size, blocks) in self.files.items()}
        with atomic_write(path, durable=True) as temporary:
            temporary.write_text(json.dumps({"files": files, "checksum": checksum_of(files)}), encoding="ascii")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            ValueError: it is damaged or something else.
            OSError: it is missing.
            UnreadableError: it cannot be read.
        """
        try:
            with reading(path):
                content = json.loads(path.read_bytes())
            if content["checksum"] != checksum_of(content["files"]):
                raise ValueError("its checksum does not match")
            files = {str(name): (int(size), [*map(str, blocks)]) for name, (size, blocks) in content["files"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        for name, (size, blocks) in files.items():
            if name.startswith("/") or ".." in name.split("/") or len(blocks) != _num_blocks(size):
                raise ValueError(f"an invalid entry for {name!r}")
        return cls(files)

    def blocks(self) -> list[Block]:
        """All blocks, those of small files first."""
        names = sorted(self.files, key=lambda name: (self.files[name][0], name))
        return [(name, index) for name in names for index in range(len(self.files[name][1]))]

    def split(self, num_bytes: int) -> tuple[list[Block], list[Block]]:
        """The first blocks, of at most `num_bytes` bytes, and the remaining blocks."""
        blocks = self.blocks()
        for number, (name, index) in enumerate(blocks):
            num_bytes -= min(BLOCK_BYTES, self.files[name][0] - index * BLOCK_BYTES)
            if num_bytes < 0:
                return blocks[:number], blocks[number:]
        return blocks, []

    def missing(self, folder: Path) -> list[str]:
        """The files that are missing, or have another size."""
        return [name for name, (size, _) in self.files.items() if not _has_size(folder / name, size)]

    def damaged(self, folder: Path, blocks: Sequence[Block] | None = None) -> list[str]:
        """The files that are missing, or have another size or content in one of the blocks; default: in any block."""
        damaged = dict.fromkeys(self.missing(folder))
        for name, index in self.blocks() if blocks is None else blocks:
            if name not in damaged and not self.is_intact(folder, (name, index)):
                damaged[name] = None
        return list(damaged)

    def is_intact(self, folder: Path, block: Block) -> bool:
        """Whether a block exists and has its checksum. Raises UnreadableError if it cannot be read."""
        name, index = block
        try:
            with reading(folder / name), (folder / name).open("rb", buffering=0) as file:
                file.seek(index * BLOCK_BYTES)
                return _block_checksum(file) == self.files[name][1][index]
        except OSError:
            return False


CHECKSUMS = "checksums.json"  # of the other files in its folder


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` into a folder that holds nothing but what it describes."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    Checksums.of(folder).write(folder / CHECKSUMS)


def damaged_files(folder: Path, rank: int = 0, size: int = 1) -> list[str]:
    """The files of a folder that differ from its `checksums.json`, or that file itself if it is missing or damaged.

    With a `rank`, every `size`-th block of the files is compared.
    """
    try:
        checksums = Checksums.read(folder / CHECKSUMS)
    except (OSError, ValueError):
        return [CHECKSUMS]
    return checksums.damaged(folder, checksums.blocks()[rank::size])


def checksum(content: bytes) -> str:
    """The checksum of a few bytes: 16 hexadecimal digits."""
    return xxh3_64_hexdigest(content)


def file_checksum(path: Path) -> str:
    """The checksum of all bytes of a file."""
    state, buffer = xxh3_64(), memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()


def checksum_of(value: Any) -> str:
    """The checksum of a JSON value; the order of an object's keys does not matter."""
    return checksum(json.dumps(value, sort_keys=True).encode())


def _file_checksums(path: Path) -> tuple[int, list[str]]:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        return size, [_block_checksum(file) for _ in range(_num_blocks(size))]


def _block_checksum(file: Any) -> str:
    """The checksum of the next block of an unbuffered file."""
    state, remaining, buffer = xxh3_64(), BLOCK_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    while remaining and (count := file.readinto(buffer[:remaining])):
        state.update(buffer[:count])
        remaining -= count
    return state.hexdigest()


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _has_size(path: Path, size: int) -> bool:
    try:
        with reading(path):
            status = path.lstat()  # a link or a pipe is not what was written
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size
