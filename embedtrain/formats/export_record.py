"""The record of an export, `embedtrain.json`: the sizes and checksums of the files that it wrote.

They are compared when the directory is opened as a model, a tokenizer or an adapter. A directory without a record, such
as a model of another library or a repository of the Hub, is opened as it is.

A new export replaces an earlier one, and nothing else: a folder with other files than those in the record, or with
files of other sizes, is the user's and is never replaced. The new export is written beside the old one as
`NAME.RANDOM.tmp`.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from embedtrain.errors import ConfigError, ModelError
from embedtrain.utils.files import Block, Checksums, expand_user, remove_tree, require_own_file

RECORD = "embedtrain.json"
# Files of a directory that say how it was made; what the model computes does not depend on them.
DESCRIPTIONS = (RECORD, "lineage.json", "summary.json", "merge.json")
_WEIGHTS = ".safetensors"
# `README.md` is for readers; the folders are further formats of the same model.
_NOT_READ = ("README.md", "adapter/", "adapters/", "onnx/", "openvino/")
_SCRATCH, _REPLACED = ".tmp", ".replaced.tmp"
LOCK_TIMEOUT = 10.0  # seconds that an export waits for another one to the same directory


def write_record(directory: Path) -> None:
    """List the files of a complete export in it."""
    (directory / RECORD).unlink(missing_ok=True)
    Checksums.of(directory).write(directory / RECORD)


def verify_settings(directory: Path) -> None:
    """Compare the settings and the tokenizer of a model directory with its record, if an export has written it.

    Raises ModelError if a file is damaged, missing or changed, or the record is.
    """
    root, checksums = _open(directory)
    settings = Checksums({name: entry for name, entry in checksums.files.items() if not name.endswith(_WEIGHTS)})
    _verify(root, settings, settings.blocks())


def verify_weights(directory: Path, local_rank: int = 0, local_size: int = 1) -> None:
    """Compare the weights of a model directory and of its heads with its record, if an export has written it.

    This process takes every `local_size`-th block of 64 MiB. Raises ModelError as `verify_settings` does.
    """
    root, checksums = _open(directory)
    weights = Checksums({name: entry for name, entry in checksums.files.items() if name.endswith(_WEIGHTS)})
    _verify(root, weights, weights.blocks()[local_rank::local_size])


def _open(directory: Path) -> tuple[Path, Checksums]:
    """The directory of an export that contains `directory`, and its checksums of the files to verify."""
    for root in (directory, directory.parent, directory.parent.parent):
        if not (root / RECORD).is_file():
            continue
        try:
            files = Checksums.read(root / RECORD).files
        except (OSError, ValueError):
            raise ModelError(
                f"{root / RECORD}, which has the checksums of the model, is damaged or of another version: export the "
                "model again, or delete this file to open the model without verification"
            ) from None
        if root == directory:
            return root, Checksums({name: entry for name, entry in files.items() if not name.startswith(_NOT_READ)})
        prefix = f"{directory.relative_to(root).as_posix()}/"
        return root, Checksums({name: entry for name, entry in files.items() if name.startswith(prefix)})
    return directory, Checksums({})


def _verify(root: Path, checksums: Checksums, blocks: list[Block]) -> None:
    # A link was made by somebody who wanted another file there, or by the cache of the Hub.
    linked = {name for name in checksums.files if (root / name).is_symlink()}
    checksums = Checksums({name: entry for name, entry in checksums.files.items() if name not in linked})
    damaged = checksums.damaged(root, [block for block in blocks if block[0] not in linked])
    if damaged:
        name = damaged[0]
        state = "is not what was exported" if (root / name).exists() else "is missing"
        raise ModelError(
            f"{root / name} {state}: copy or export the model again; if the change is intended, delete "
            f"{root / RECORD}, and the model is opened without verification"
        )


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
