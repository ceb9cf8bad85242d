"""Whether a checkpoint has room on the disk, asked before a byte of it is written."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from embedtrain.checkpoint.snapshot import checkpointed_weights
from embedtrain.checkpoint.step_directory import clear_unfinished, delete_checkpoint, directory_size
from embedtrain.config.recipe import CheckpointConfig, CheckpointContents
from embedtrain.errors import CheckpointError, ConfigError

GB = 10**9
# AdamW's two moments beside each trained weight.
_MOMENTS = 2


def checkpoint_bytes(trained: nn.Module, contents: CheckpointContents) -> int:
    """What a checkpoint of a model will take: tensors alone, headers and manifest are small beside them."""
    total: int = sum(_bytes_of(tensor) for tensor in checkpointed_weights(trained).values())
    if contents is CheckpointContents.all:
        total += sum(_MOMENTS * _bytes_of(parameter) for parameter in trained.parameters() if parameter.requires_grad)
    return total


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a DTensor the whole one's


def require_disk_limit(config: CheckpointConfig, one: int, total_steps: int) -> None:
    """Refuse a limit that the run would meet, before it has begun.

    Args:
        config: the recipe's options.
        one: bytes of a checkpoint.
        total_steps: of the run.

    Raises:
        ConfigError: what is to be kept does not fit.
    """
    if config.max_disk_gb is None:
        return
    most = max_checkpoints_on_disk(config, total_steps)
    if most * one > config.max_disk_gb * GB:
        raise ConfigError(
            f"checkpoint.max_disk_gb={config.max_disk_gb:g}: up to {most} checkpoints of {one / GB:.3g} GB lie there "
            f"at a time (keep={config.keep}, keep_every={config.keep_every}, best={config.best_metric or 'null'}, and "
            f"the one before stays until the new one is whole): allow {most * one / GB:.3g} or more, or keep fewer"
        )


def max_checkpoints_on_disk(config: CheckpointConfig, total_steps: int) -> int:
    """How many checkpoints lie on the disk when the last is written: those to be kept beside it, and itself."""
    saved = list(range(config.every, total_steps, config.every)) if config.every else []
    kept = set(saved[-max(1, config.keep - 1) :])
    kept |= {step for step in saved if config.keep_every and step % config.keep_every == 0}
    # A run that is stopped and goes on has one before even where it saves at its end alone.
    return max(2, len(kept) + 1 + (config.best_metric is not None))


def free_disk_space(root: Path, needed: int, limit_gb: float | None, prunable: Sequence[Path]) -> None:
    """See that a checkpoint can be written: below the limit, and on a disk that has room for it. On one rank.

    Args:
        root: the folder `checkpoints/`.
        needed: bytes of the new checkpoint.
        limit_gb: `checkpoint.max_disk_gb`.
        prunable: steps that may go already now, the oldest last.

    Raises:
        CheckpointError: there is no room; nothing was written, and the newest checkpoint is where it was.
    """
    clear_unfinished(root)
    used, spare = directory_size(root), list(prunable)
    while spare and (_over(used + needed, limit_gb) or needed > shutil.disk_usage(root).free):
        delete_checkpoint(spare.pop())
        used = directory_size(root)
    if limit_gb is not None and _over(used + needed, limit_gb):
        raise CheckpointError(
            f"no room for a checkpoint of {needed / GB:.3g} GB: {root} holds {used / GB:.3g} GB already, and "
            f"checkpoint.max_disk_gb={limit_gb:g}; raise it, or keep fewer"
        )
    free = shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(
            f"no room for a checkpoint of {needed / GB:.3g} GB: the disk of {root} has {free / GB:.3g} GB left"
        )


def _over(size: int, limit_gb: float | None) -> bool:
    return limit_gb is not None and size > limit_gb * GB
