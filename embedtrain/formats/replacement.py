"""Replacing an earlier export by a new one, and nothing else: scratch folders, a lock.

A folder with other files than those in the record of an export, `embedtrain.json`, or with files of other sizes is the
user's and is never replaced. The new export is written beside the old one as `NAME.RANDOM.tmp`.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from embedtrain.errors import ConfigError
from embedtrain.models.export_record import RECORD
from embedtrain.utils.files import Checksums, expand_user, remove_tree, require_own_file

_SCRATCH, _REPLACED = ".tmp", ".old.tmp"
LOCK_TIMEOUT = 10.0  # seconds that an export waits for another one to the same directory


@contextmanager
def export_lock(output_dir: Path) -> Iterator[Path]:
    """Prevent concurrent exports to the same directory; yields the path of a scratch folder, which does not exist yet.

    Removes what killed exports have left behind. The operating system releases the lock if the export is killed.

    Raises ConfigError if another export to this directory is running.
    """
    path = output_dir.with_name(f".embedtrain-{output_dir.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    require_own_file(path)
    try:
        with FileLock(path, timeout=LOCK_TIMEOUT):
            try:
                _remove_leftovers(output_dir)
                yield output_dir.with_name(f"{output_dir.name}.{secrets.token_hex(8)}{_SCRATCH}")
            finally:
                path.unlink(missing_ok=True)  # a waiting export notices and creates a new file (filelock >= 4.2)
    except Timeout:
        raise ConfigError(
            f"another export to {output_dir} is running: wait for it, or choose another output_dir"
        ) from None


def require_replaceable(output_dir: Path, run_dir: Path) -> Path:
    """The directory to export to, if nothing except an earlier export would be replaced.

    A link is replaced without following it. Raises ConfigError if `output_dir` is a file, contains `run_dir`, or has
    files that no export has written.
    """
    output_dir = expand_user(output_dir)
    if not output_dir.name:  # "." has no name to which a suffix can be added
        output_dir = output_dir.resolve()
    if output_dir.exists() and not output_dir.is_dir() and not output_dir.is_symlink():
        raise ConfigError(f"output_dir={output_dir} is a file: name a folder, which is created")
    if not output_dir.is_symlink() and run_dir.resolve().is_relative_to(output_dir.resolve()):
        raise ConfigError(f"output_dir={output_dir} contains {run_dir}, which is read: name a separate folder")
    require_only_export(output_dir)
    return output_dir


def require_only_export(output_dir: Path) -> None:
    """Raise ConfigError if the directory, which is not a link, has files that no export has written."""
    foreign = None if output_dir.is_symlink() else _find_foreign(output_dir)
    if foreign is not None:
        raise ConfigError(
            f"output_dir={output_dir} contains {foreign}, which no export has written or which was changed since: "
            "move it away, or name a new folder"
        )


def replace_export(output_dir: Path, new: Path) -> None:
    """Rename `new` to `output_dir`; an earlier export is moved away before it is deleted.

    Raises ConfigError if the user has added files to it meanwhile.
    """
    require_only_export(output_dir)
    old = new.with_name(new.name.removesuffix(_SCRATCH) + _REPLACED)
    if os.path.lexists(output_dir):
        output_dir.rename(old)
    new.rename(output_dir)
    remove_tree(old)


def _remove_leftovers(output_dir: Path) -> None:
    """Remove scratch folders of killed exports; an export that was moved away and not replaced is moved back."""
    pattern = re.compile(
        re.escape(output_dir.name) + rf"\.[0-9a-f]{{16}}({re.escape(_REPLACED)}|{re.escape(_SCRATCH)})"
    )
    for path in sorted(output_dir.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is not None and match[1] == _REPLACED and not os.path.lexists(output_dir):
            path.rename(output_dir)
        elif match is not None:
            remove_tree(path)


def _find_foreign(directory: Path) -> str | None:
    """A file of the directory that is not in its record, or has another size; None if there is none."""
    try:
        files = Checksums.read(directory / RECORD).files
    except (OSError, ValueError):
        return next((path.name for path in sorted(directory.iterdir())), None) if directory.is_dir() else None
    for name in _list_files(directory):
        if name != RECORD and (name not in files or files[name][0] != os.lstat(directory / name).st_size):
            return name
    return None


def _list_files(directory: Path) -> list[str]:
    """Relative paths of all files and links below a directory; links are not followed."""
    names = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        names += [os.path.relpath(os.path.join(folder, name), directory) for name in (*files, *links)]
    return sorted(names)
