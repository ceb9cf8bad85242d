"""Paths under a URL (s3://, hf://, https://, ...): which file system answers, what lies there, opening a file."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

from embedtrain.data.sources.problems import describe_error
from embedtrain.errors import DataError


def is_url(path: str) -> bool:
    """Whether a path is not of this machine's folders. `file://` is, and `local_path` writes it so."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def local_path(path: str) -> str:
    """`file://` written as a path of this machine, `~` as the home; any other URL as it is."""
    if path.lower().startswith("file://"):
        return unquote(urlsplit(path).path)
    return path if is_url(path) else str(Path(path).expanduser())


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system that a URL names, and the path in it.

    Raises:
        DataError: there is no such protocol, or its package is not installed, or it cannot be reached.
    """
    protocol = url.split("://", maxsplit=1)[0]
    try:
        found, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url}: {protocol}:// needs a package that is not installed: pip install {_package(error)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{url}: no file system is known for {protocol}:// ({describe_error(error)})") from error
    except Exception as error:  # each file system raises its own: credentials, names of hosts
        raise unreachable(url, error) from error
    return found, str(path)


def open_url(url: str) -> Any:
    """The file's bytes, a binary file object; most can seek.

    Raises:
        DataError: it is missing or cannot be reached.
    """
    found, path = file_system(url)
    try:
        return found.open(path, "rb")
    except Exception as error:  # as above
        raise unreachable(url, error) from error


def info_of(url: str) -> dict[str, Any]:
    """What the file system says of a file: its size, and as a rule a checksum or a date.

    Raises:
        DataError: it is missing or cannot be reached.
    """
    found, path = file_system(url)
    try:
        return dict(found.info(path))
    except Exception as error:  # as above
        raise unreachable(url, error) from error


def unreachable(url: str, error: Exception) -> DataError:
    """The sentence about a file that could not be opened or read to its end."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and getattr(cause, "status", 404) != 404:
        error = cause
    elif isinstance(error, FileNotFoundError) and isinstance(cause, OSError) and cause.errno is not None:
        error = cause  # fsspec says of a server that does not answer that the file is not there
    if isinstance(error, FileNotFoundError):
        return DataError(f"{url}: no such file or folder")
    return DataError(f"{url}: cannot be read ({describe_error(error)})")


def _package(error: BaseException | None) -> str:
    """What must be installed, by the module that could not be imported."""
    name = ""
    while error is not None:
        name = getattr(error, "name", None) or name
        error = error.__cause__
    return name.split(".")[0] or "the package that it names"
