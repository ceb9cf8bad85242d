"""The record of an export, `embedtrain.json`: the sizes and checksums of the files that it wrote.

They are compared when the directory is opened as a model, a tokenizer or an adapter. A directory without a record, such
as a model of another library or a repository of the Hub, is opened as it is.
"""

from pathlib import Path

from embedtrain.errors import ModelError
from embedtrain.utils.files import Block, Checksums

RECORD = "embedtrain.json"
# Files of a directory that say how it was made; what the model computes does not depend on them.
DESCRIPTIONS = (RECORD, "lineage.json", "summary.json", "merge.json")
_WEIGHTS = ".safetensors"
# `README.md` is for readers; the folders are further formats of the same model.
_NOT_READ = ("README.md", "adapter/", "adapters/", "onnx/", "openvino/")


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
