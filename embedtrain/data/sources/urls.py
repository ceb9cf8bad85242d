"""URLs of files, opened with fsspec; a local path is a URL without a protocol."""

import re
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

from embedtrain.data.sources.values import describe_error
from embedtrain.errors import DataError
from embedtrain.utils.files import expand_user


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
