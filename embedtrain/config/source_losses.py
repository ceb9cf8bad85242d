"""The loss of each training source: the recipe's, with what the source says otherwise."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from embedtrain.config.loss_checks import check_loss
from embedtrain.config.losses import CombinedConfig, LossConfig, SigLIPConfig
from embedtrain.config.recipe import BatchMode, TrainSource
from embedtrain.errors import ConfigError


def source_loss(source: TrainSource, loss: LossConfig) -> LossConfig:
    """What rows of `source` are trained with.

    Args:
        source: an element of `data.train`.
        loss: the recipe's.

    Raises:
        ConfigError: the source sets an option that its loss does not have, or that does not go with the others.
    """
    found = loss if source.loss is None else source.loss
    own = {"temperature": source.temperature, "in_batch_negatives": source.in_batch_negatives}
    for option, value in own.items():
        if value is not None:
            found = _with(found, option, value, source.path)
    if found is not loss:
        try:
            check_loss(found)
        except ConfigError as error:
            raise ConfigError(f"data.train, {source.path}: {error}") from None
    return found


def distinct_losses(losses: Sequence[LossConfig]) -> tuple[list[LossConfig], list[int]]:
    """Each different loss once, and which of them each of `losses` is."""
    found: list[LossConfig] = []
    which = []
    for loss in losses:
        if loss not in found:
            found.append(loss)
        which.append(found.index(loss))
    return found, which


def uses_batches_by_source(batches: BatchMode, losses: Sequence[LossConfig]) -> bool:
    """Whether a global batch holds rows of one source alone.

    Args:
        batches: `data.batches`.
        losses: of each source.

    Raises:
        ConfigError: batches are to be mixed of sources that have different losses.
    """
    several = len(distinct_losses(losses)[0]) > 1
    if several and batches is BatchMode.mixed:
        raise ConfigError(
            "data.batches=mixed: sources have a loss, temperature or in_batch_negatives of their own, and a batch "
            "has one loss; write data.batches=by_source"
        )
    return several or batches is BatchMode.by_source


def _with(loss: LossConfig, option: str, value: Any, path: str) -> LossConfig:
    if isinstance(loss, CombinedConfig) and any(_has(part, option) for part in loss.losses):
        parts = [replace(part, **{option: value}) if _has(part, option) else part for part in loss.losses]
        return replace(loss, losses=parts)
    if _has(loss, option):
        return replace(loss, **{option: value})
    if option == "in_batch_negatives" and value is False and not isinstance(loss, SigLIPConfig | CombinedConfig):
        return loss  # a loss of single rows has no in-batch negatives to begin with
    raise ConfigError(f"data.train, {path}: {option}={value}: loss={loss.name} has no such option")


def _has(loss: LossConfig, option: str) -> bool:
    return option in (field.name for field in fields(loss))
