"""The files of a folder, or those that match a pattern: here or under a URL, sorted, none left out in silence."""

import glob
import os
from pathlib import Path

from embedtrain.data.sources.kinds import suffix_of
from embedtrain.data.sources.remote import file_system, is_url, unreachable
from embedtrain.errors import DataError


def is_pattern(path: str) -> bool:
    """Whether a path means the files that match it; in https:// URLs `?` begins a query."""
    return glob.has_magic(path.replace("?", "") if path.lower().startswith("http") and is_url(path) else path)


def is_folder(path: str) -> bool:
    """Whether a path or URL is a folder.

    Raises:
        DataError: it is under a URL, and cannot be reached or is not there.
    """
    if not is_url(path):
        return Path(path).is_dir()
    system, inside = file_system(path)
    if path.lower().startswith("http"):  # which knows pages alone
        return path.endswith("/") or suffix_of(Path(inside)) is None
    try:
        return bool(system.info(inside)["type"] == "directory")
    except Exception as error:  # each file system raises its own
        raise unreachable(path, error) from error


def files_in(folder: str) -> list[str]:
    """All files below a folder, hidden ones and those in hidden folders left out. Links are followed.

    Raises:
        DataError: a folder cannot be read, or a data file is a link to nothing.
    """
    if is_url(folder):
        system, inside = file_system(folder)
        try:
            found = system.find(inside)
        except Exception as error:  # each file system raises its own
            raise unreachable(folder, error) from error
        root = inside.rstrip("/")
        names = [name for name in found if not _is_hidden(name.removeprefix(root))]
        return sorted(str(system.unstrip_protocol(name)) for name in names)
    return sorted(_walk(Path(folder)))


def files_matching(pattern: str) -> list[str]:
    """All files that match a pattern of shells, `**` for any depth.

    Raises:
        DataError: there is none, or one is a link to nothing.
    """
    if is_url(pattern):
        system, inside = file_system(pattern)
        try:
            found = [name for name, info in system.glob(inside, detail=True).items() if info["type"] != "directory"]
        except Exception as error:  # each file system raises its own
            raise unreachable(pattern, error) from error
        names = [str(system.unstrip_protocol(name)) for name in found]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
        for name in names:
            require_target(Path(name))
        names = list(dict.fromkeys(str(Path(name)) for name in names))
    if not names:
        raise DataError(f"{pattern}: no file matches this pattern")
    return sorted(names)


def require_target(path: Path) -> None:
    """Refuse a link to what is not there.

    Raises:
        DataError: with the link and what it should lead to.
    """
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: is a link to {os.readlink(path)}, which is not there")


def _walk(folder: Path) -> list[str]:
    found: list[str] = []
    seen: set[str] = set()  # links may lead in a circle

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            path = Path(place) / name
            if name.startswith("."):
                continue
            if suffix_of(path) is not None:
                require_target(path)
            if path.is_file():
                found.append(str(path))
    return found


def _is_hidden(relative: str) -> bool:
    return any(name.startswith(".") for name in relative.split("/"))
