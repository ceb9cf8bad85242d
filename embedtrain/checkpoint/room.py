"""Whether a checkpoint has room on the disk, asked before a byte of it is written."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from embedtrain.checkpoint.folder import clear_unfinished, discard, size_of
from embedtrain.config.schema import CheckpointConfig, Contents
from embedtrain.errors import CheckpointError, ConfigError

GB = 10**9
# AdamW's two moments beside each trained weight.
_WITH_MOMENTS = 3


def expected_bytes(trained: nn.Module, contents: Contents) -> int:
    """What a checkpoint of a model will take: tensors alone, headers and manifest are small beside them."""
    total: int = sum(buffer.nbytes for buffer in trained.state_dict().values() if not buffer.is_floating_point())
    for parameter in trained.parameters():
        copies = _WITH_MOMENTS if contents is Contents.all and parameter.requires_grad else 1
        total += copies * parameter.numel() * parameter.element_size()
    return total


def require_limit_fits(config: CheckpointConfig, one: int) -> None:
    """Refuse a limit that the run is sure to meet: the checkpoint before stays until the new one is whole.

    Args:
        config: the recipe's options.
        one: bytes of a checkpoint.

    Raises:
        ConfigError: the limit is too low for two.
    """
    if config.max_disk_gb is not None and 2 * one > config.max_disk_gb * GB:
        raise ConfigError(
            f"checkpoint.max_disk_gb={config.max_disk_gb:g}: a checkpoint of this run takes {one / GB:.3g} GB, and the "
            f"one before stays until the new one is whole: allow {2 * one / GB:.3g} or more"
        )


def make_room(root: Path, needed: int, limit_gb: float | None, dispensable: Sequence[Path]) -> None:
    """See that a checkpoint can be written: below the limit, and on a disk that has room for it. On one rank.

    Args:
        root: the folder `checkpoints/`.
        needed: bytes of the new checkpoint.
        limit_gb: `checkpoint.max_disk_gb`.
        dispensable: steps that may go already now, the oldest last.

    Raises:
        CheckpointError: there is no room; nothing was written, and the newest checkpoint is where it was.
    """
    clear_unfinished(root)
    used, spare = size_of(root), list(dispensable)
    while spare and (_over(used + needed, limit_gb) or needed > shutil.disk_usage(root).free):
        discard(spare.pop())
        used = size_of(root)
    if limit_gb is not None and _over(used + needed, limit_gb):
        raise CheckpointError(
            f"no room for a checkpoint of {needed / GB:.3g} GB: {root} holds {used / GB:.3g} GB already, and "
            f"checkpoint.max_disk_gb={limit_gb:g}; raise it, or lower checkpoint.keep"
        )
    free = shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(
            f"no room for a checkpoint of {needed / GB:.3g} GB: the disk of {root} has {free / GB:.3g} GB left"
        )


def _over(size: int, limit_gb: float | None) -> bool:
    return limit_gb is not None and size > limit_gb * GB
