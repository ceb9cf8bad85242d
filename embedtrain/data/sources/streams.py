"""Files as bytes and lines: here or under a URL, plain or packed with gzip or zstd, whole or a stretch of one."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from embedtrain.data.sources.remote import info_of, is_url, open_url, unreachable
from embedtrain.errors import DataError

BLOCK = 1 << 20  # bytes read at a time
_UNPACKED_AT_ONCE = 1 << 13


class Packing(Enum):
    """How a file is compressed; the value is the word for it."""

    plain = ""
    gzip = "gzip"
    zstd = "zstd"


_MAGIC = {b"\x1f\x8b": Packing.gzip, b"\x28\xb5\x2f\xfd": Packing.zstd}
_ENDINGS = {".gz": Packing.gzip, ".zst": Packing.zstd}


def packing_of(name: str) -> Packing:
    """How a file is compressed: what its first bytes say counts, not what it is called.

    Raises:
        DataError: it cannot be opened, or is named .gz or .zst and is neither.
    """
    with open_plain(name) as file:
        start = file.read(4)
    for magic, packing in _MAGIC.items():
        if start.startswith(magic):
            return packing
    # A frame to be passed over, with which files begin that were packed in parallel (pzstd).
    if start[1:] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50:
        return Packing.zstd
    for ending, packing in _ENDINGS.items():
        if name.lower().endswith(ending) and start:
            raise DataError(f"{name}: is named {ending} but is no {packing.value} file: rename it, or copy it again")
    return Packing.plain


def open_plain(name: str) -> Any:
    """A file's bytes as they are stored, as a binary file object.

    Raises:
        DataError: it is missing or cannot be opened.
    """
    if is_url(name):
        return open_url(name)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise _unreadable(name, error) from error


def size_of(name: str) -> int | None:
    """A file's bytes as it is stored; None where nobody says.

    Raises:
        DataError: it is missing or cannot be reached.
    """
    if is_url(name):
        size = info_of(name).get("size")
        return None if size is None else int(size)
    try:
        return os.stat(name).st_size
    except OSError as error:
        raise _unreadable(name, error) from error


def size_to_cut(name: str) -> int | None:
    """A file's bytes, where its lines can be read from any of them: plain files that can seek; else None.

    Raises:
        DataError: it is missing or cannot be opened.
    """
    if packing_of(name) is not Packing.plain:
        return None
    if not is_url(name):
        return size_of(name)
    with open_plain(name) as file:
        return size_of(name) if file.seekable() else None


def file_version(name: str) -> object:
    """What changes when a file here is written again: equal versions are the same file; None where nobody says."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def lines_of(path: Path | str) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a plain or packed file with their numbers from 1, cut at `\n`, a byte order mark left out.

    Raises:
        DataError: the file is missing, unreadable, not packed as its name says, damaged, cut short, or UTF-16.
    """
    return lines_between(str(path))


def lines_between(name: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
    r"""The lines that begin in a stretch of a file, with their numbers from 1 within the stretch.

    Stretches that cover a file cover its lines, each once. A byte order mark of the file is left out.

    Args:
        name: path or URL.
        start: first byte. Other than 0 only in a file that is not packed.
        stop: the byte after the last, or None for the file's end.

    Raises:
        DataError: as `lines_of`.
    """
    packing, number = packing_of(name), 0
    try:
        with _unpacked(name, packing) as file:
            place = start
            if start:
                # From one byte before: a line that begins at `start` itself is not thrown away.
                file.seek(start - 1)
                place += len(file.readline()) - 1
            for line in file:
                if stop is not None and place >= stop:
                    return
                number += 1
                if place == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(f"{name}: this file is UTF-16: save it as UTF-8")
                yield number, line.removeprefix(b"\xef\xbb\xbf") if place == 0 else line
                place += len(line)
    except DataError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(name, packing, number, error) from error
    except (pa.ArrowException, OSError) as error:
        if packing is Packing.zstd and getattr(error, "errno", None) is None:
            raise _damaged(name, packing, number, error) from error
        raise _unreadable(name, error) from error
    except Exception as error:
        if not is_url(name):
            raise
        raise unreachable(name, error) from error


def file_changed_error(name: str) -> DataError:
    """The sentence about a file that is not what it was when its rows were found."""
    return DataError(f"{name}: was changed after its rows were read: start again, and leave it as it is meanwhile")


def lines_before(name: str, start: int) -> int:
    """How many lines of a plain file begin before byte `start`.

    Raises:
        DataError: it cannot be read.
    """
    if start == 0:
        return 0
    count, left = 1, start - 1
    try:
        with open_plain(name) as file:
            while left > 0 and (block := file.read(min(BLOCK, left))):
                count += block.count(b"\n")
                left -= len(block)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(name, error) from error
    return count


def _unpacked(name: str, packing: Packing) -> IO[bytes]:
    file = open_plain(name)
    match packing:
        case Packing.gzip:
            unpacked: IO[bytes] = _Gzip(file)  # type: ignore[assignment]
            return unpacked
        case Packing.zstd:
            # What is read at once is lost where the file turns out damaged, and with it the line's number.
            return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), _UNPACKED_AT_ONCE)
        case Packing.plain:
            plain: IO[bytes] = file
            return plain


class _Gzip(gzip.GzipFile):
    """A gzip file that closes what it reads from."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def _damaged(name: str, packing: Packing, lines: int, error: Exception) -> DataError:
    return DataError(
        f"{name}:{lines + 1}: the {packing.value} file is damaged or cut short ({error}): copy or download it again"
    )


def _unreadable(name: str, error: Exception) -> DataError:
    if is_url(name):
        return unreachable(name, error)
    return DataError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")
