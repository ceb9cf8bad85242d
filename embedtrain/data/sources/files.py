"""Files as bytes and lines: local or under a URL, plain or compressed with gzip or zstd, whole or a range of bytes.

URLs are opened with fsspec; a local path is a URL without a protocol. Every function that opens a file raises DataError
where it is missing or cannot be read.
"""

import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractFileSystem

from embedtrain.data.sources.values import describe_error
from embedtrain.errors import DataError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import format_bytes


def is_url(path: str) -> bool:
    """Whether a path names a protocol. `local_path` turns `file://` into a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def local_path(path: str) -> str:
    """A path with `file://` removed and `~` expanded; other URLs are unchanged."""
    if path.lower().startswith("file://"):
        return unquote(urlsplit(path).path)
    return path if is_url(path) else str(expand_user(path))


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path in it. Raises DataError if it is unknown, not installed or unreachable."""
    protocol = url.split("://", maxsplit=1)[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url}: {protocol}:// needs a package that is not installed: pip install {_missing_package(error)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{url}: no file system is known for {protocol}:// ({describe_error(error)})") from error
    except Exception as error:  # each file system raises its own types: credentials, host names
        raise unreachable_error(url, error) from error
    return system, str(path)


def open_url(url: str) -> Any:
    """A binary file object; most can seek."""
    system, path = file_system(url)
    try:
        return system.open(path, "rb")
    except Exception as error:
        raise unreachable_error(url, error) from error


def url_info(url: str) -> dict[str, Any]:
    """What the file system reports about a file: its size, and usually a checksum or a date."""
    system, path = file_system(url)
    try:
        return dict(system.info(path))
    except Exception as error:
        raise unreachable_error(url, error) from error


def unreachable_error(url: str, error: Exception) -> DataError:
    """The error about a file that cannot be opened or read to its end."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and getattr(cause, "status", 404) != 404:
        error = cause
    elif isinstance(error, FileNotFoundError) and isinstance(cause, OSError) and cause.errno is not None:
        error = cause  # fsspec reports a server that does not answer as a missing file
    if isinstance(error, FileNotFoundError):
        return DataError(f"{url}: no such file or folder")
    return DataError(f"{url}: cannot be read ({describe_error(error)})")


def _missing_package(error: BaseException | None) -> str:
    name = ""
    while error is not None:
        name = getattr(error, "name", None) or name
        error = error.__cause__
    return name.split(".")[0] or "the package that it names"


BLOCK_BYTES = 1 << 20
MAX_FULL_DIGEST_BYTES = 64 * BLOCK_BYTES  # of larger files only samples are hashed
NUM_SAMPLES = 16  # blocks hashed between the first and the last of a larger file
# Of a row, which is held in memory: a small compressed file may hold one endless line.
MAX_LINE_BYTES = 64 * BLOCK_BYTES
_DECOMPRESSED_BYTES = 1 << 13
_TEXT_BLOCK_BYTES = 1 << 16
_MAX_EXPANSION = 1000  # of a compressed file, about that of gzip; zstd could expand some bytes to terabytes
_MAX_BLANK_LINES = 1_000_000  # one after another
# Keys under which fsspec's file systems report a file's version.
_VERSION_KEYS = (
    *("ETag", "etag", "Content-MD5", "md5Hash", "content_md5", "checksum", "sha256", "oid", "blob_id", "version_id"),
    *("VersionId", "generation", "last_commit", "LastModified", "last_modified", "Last-Modified", "updated", "mtime"),
    *("modified", "created"),
)


# Bytes.


class Compression(Enum):
    """How a file is compressed."""

    none = ""
    gzip = "gzip"
    zstd = "zstd"


_MAGIC = {b"\x1f\x8b": Compression.gzip, b"\x28\xb5\x2f\xfd": Compression.zstd}
# Content of files that are named as text, and what to do.
_OTHER_CONTENT = {
    b"PAR1": ("Parquet", "rename it to .parquet"),
    b"ARROW1": ("an Arrow table", "rename it to .arrow"),
    b"PK\x03\x04": ("an Excel workbook or another ZIP archive", "export it as CSV in UTF-8, or unpack it"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "export it as CSV in UTF-8"),
    b"BZh": ("bzip2", "unpack it, or compress it with gzip or zstd"),
    b"\xfd7zXZ": ("xz", "unpack it, or compress it with gzip or zstd"),
}
_SUFFIXES = {".gz": Compression.gzip, ".zst": Compression.zstd}


def compression_of(name: str) -> Compression:
    """How a file is compressed according to its first bytes. One named .gz or .zst that is neither is rejected."""
    with open_binary(name) as file:
        start = file.read(4)
    for magic, compression in _MAGIC.items():
        if start.startswith(magic):
            return compression
    # A skippable frame: files that pzstd compressed in parallel begin with one.
    if start[1:] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50:
        return Compression.zstd
    for suffix, compression in _SUFFIXES.items():
        if name.lower().endswith(suffix) and start:
            raise DataError(
                f"{name}: is named {suffix} but is not a {compression.value} file: rename it, or copy it again"
            )
    return Compression.none


def open_binary(name: str) -> Any:
    """A file as it is stored, as a binary file object."""
    if is_url(name):
        return open_url(name)
    require_regular_file(name)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise _unreadable_error(name, error) from error


def require_regular_file(name: str) -> None:
    """Reject local pipes, sockets and devices: opening one may wait for ever, and /dev/zero never ends."""
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError) as error:  # a ValueError for a name with a NUL character
        raise _unreadable_error(name, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise DataError(f"{name}: cannot be read: it is {kind}, not a file")


def file_size(name: str) -> int | None:
    """The bytes of a file as it is stored; None where the file system does not report them."""
    if is_url(name):
        size = url_info(name).get("size")
        return None if size is None else int(size)
    try:
        return os.stat(name).st_size
    except OSError as error:
        raise _unreadable_error(name, error) from error


def splittable_size(name: str) -> int | None:
    """The bytes of a file whose lines can be read from any offset: not compressed, and able to seek; else None."""
    if compression_of(name) is not Compression.none:
        return None
    if not is_url(name):
        return file_size(name)
    with open_binary(name) as file:
        return file_size(name) if file.seekable() else None


def file_version(name: str) -> object:
    """Size and modification time of a local file; None for any other."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def file_changed_error(name: str) -> DataError:
    """The error about a file that changed since its rows were found."""
    return DataError(f"{name}: was changed after its rows were read: start again, and do not change it meanwhile")


def file_digest(name: str) -> str:
    """A hexadecimal digest of a file's content, which does not depend on its path.

    Files of up to 64 MiB are read whole (BLAKE2b). For larger ones size, modification time and 18 blocks of 1 MiB are
    hashed; for URLs what the file system reports: size, checksum, date.
    """
    if is_url(name):
        info = url_info(name)
        version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
        # Without a version, a file that is replaced by one of the same size would count as unchanged.
        facts = {"size": info.get("size"), **version} if version else {key: str(info[key]) for key in sorted(info)}
        return hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
    digest = hashlib.blake2b(digest_size=16)
    with open_binary(name) as file:
        try:
            status = os.fstat(file.fileno())
            if status.st_size <= MAX_FULL_DIGEST_BYTES:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                return digest.hexdigest()
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            last = status.st_size - BLOCK_BYTES
            for i in range(NUM_SAMPLES + 2):
                file.seek(last * i // (NUM_SAMPLES + 1))
                digest.update(file.read(BLOCK_BYTES))
            return digest.hexdigest()
        except OSError as error:
            raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error


# Lines.


def read_lines(path: Path | str, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file with their numbers from 1, split at `\n`, without a byte order mark.

    Raises DataError if the file is missing, unreadable, damaged, truncated, UTF-16, or not compressed as its name says,
    or if a line is longer than `max_bytes`.
    """
    return read_lines_between(str(path), max_bytes=max_bytes)


def read_blocks(name: str) -> Iterator[bytes]:
    """The content of a file without a byte order mark, in blocks. Raises DataError as `read_lines` does."""
    return (block for _, block in read_lines_between(name, max_bytes=None))


def read_lines_between(
    name: str, start: int = 0, stop: int | None = None, max_bytes: int | None = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a byte range of a file, with their numbers from 1 within the range.

    Consecutive ranges give every line of the file once. `start` must be 0 in a compressed file; `stop` is exclusive.
    Without `max_bytes`, these are blocks of the file, and a number is that of the lines that end before a block does.
    """
    compression, number, num_blank = compression_of(name), 0, 0
    max_expanded = _max_expanded_bytes(name, compression)
    try:
        with _open_decompressed(name, compression) as file:
            offset = start
            if start:
                # From the byte before, so that a line that begins at `start` is kept.
                file.seek(start - 1)
                offset += len(_read_line(file, name, number, max_bytes)) - 1
            while line := _read_line(file, name, number, max_bytes):
                if stop is not None and offset >= stop:
                    return
                number += 1 if max_bytes is not None else line.count(b"\n")
                num_blank = num_blank + 1 if len(line) <= 2 and line.isspace() else 0
                if num_blank > _MAX_BLANK_LINES:
                    raise DataError(f"{name}:{number}: more than {_MAX_BLANK_LINES:,} blank lines: remove them")
                if offset == 0:
                    _require_text(name, line)
                yield number, line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line
                offset += len(line)
                if offset > max_expanded:
                    raise DataError(
                        f"{name}: the {compression.value} file expands to more than {format_bytes(offset)}, "
                        f"{_MAX_EXPANSION:,} times its size: decompress it if these are your data"
                    )
    except DataError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged_error(name, compression, number, error) from error
    except (pa.ArrowException, OSError) as error:
        if compression is Compression.zstd and getattr(error, "errno", None) is None:
            raise _damaged_error(name, compression, number, error) from error
        raise _unreadable_error(name, error) from error
    except Exception as error:
        if not is_url(name):
            raise
        raise unreachable_error(name, error) from error


def _require_text(name: str, first_line: bytes) -> None:
    """Reject a file that is named as text and holds something else, according to its first line."""
    if first_line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name}: this file is UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 FILE > OTHER)")
    if first_line.count(b"\0") > len(first_line) // 4:
        raise DataError(f"{name}: every other byte is 0, as in UTF-16 without a byte order mark: save it as UTF-8")
    for magic, (content, advice) in _OTHER_CONTENT.items():
        if first_line.startswith(magic):
            raise DataError(f"{name}: is named as a file of text and holds {content}: {advice}")


def _max_expanded_bytes(name: str, compression: Compression) -> float:
    size = None if compression is Compression.none else file_size(name)
    return float("inf") if size is None else max(MAX_LINE_BYTES, _MAX_EXPANSION * size)


def _read_line(file: IO[bytes], name: str, number: int, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return file.read(_TEXT_BLOCK_BYTES)
    line = file.readline(max_bytes + 1)
    if len(line) > max_bytes:
        raise DataError(f"{name}:{number + 1}: a line of more than {format_bytes(max_bytes)} is not read")
    return line


def count_lines_before(name: str, start: int) -> int:
    """How many lines of an uncompressed file begin before byte `start`."""
    if start == 0:
        return 0
    count, remaining = 1, start - 1
    try:
        with open_binary(name) as file:
            while remaining > 0 and (block := file.read(min(BLOCK_BYTES, remaining))):
                count += block.count(b"\n")
                remaining -= len(block)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable_error(name, error) from error
    return count


def _open_decompressed(name: str, compression: Compression) -> IO[bytes]:
    file = open_binary(name)
    match compression:
        case Compression.gzip:
            decompressed: IO[bytes] = _Gzip(file)  # type: ignore[assignment]
            return decompressed
        case Compression.zstd:
            # Where the file is damaged, the whole buffer is lost and with it the number of the damaged line.
            stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
            return io.BufferedReader(stream, _DECOMPRESSED_BYTES)
        case Compression.none:
            # The files of fsspec read lines without a limit.
            plain: IO[bytes] = io.BufferedReader(file, BLOCK_BYTES) if is_url(name) else file
            return plain


class _Gzip(gzip.GzipFile):
    """A gzip file that closes the file it reads from."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def _damaged_error(name: str, compression: Compression, num_lines: int, error: Exception) -> DataError:
    return DataError(
        f"{name}:{num_lines + 1}: the {compression.value} file is damaged or truncated ({error}): copy or download it "
        "again"
    )


def _unreadable_error(name: str, error: Exception) -> DataError:
    if is_url(name):
        return unreachable_error(name, error)
    return DataError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")
