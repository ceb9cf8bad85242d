"""Checksums of files: computed when files are written, compared before they are used again.

They detect damage, such as a bit that a disk has flipped, but no change by somebody who writes the checksums as well.
"""

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xxhash import xxh3_64, xxh3_64_hexdigest

from embedtrain.utils.files import atomic_write, reading

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
