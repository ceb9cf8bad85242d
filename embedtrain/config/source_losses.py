"""The loss of each training source: the recipe's loss with the options of the source."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import check_loss
from embedtrain.config.losses import CombinedConfig, DistillSimilaritiesConfig, LossConfig, SigLIPConfig, XTRConfig
from embedtrain.config.recipe import BatchMode, DataConfig, Recipe, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement, with_batch_negatives
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError


def source_loss(source: TrainSource, loss: LossConfig) -> LossConfig:
    """The loss for rows of `source`, an element of `data.train`; `loss` is that of the recipe.

    A ConfigError if the source sets an option that its loss does not have, or that conflicts with others.
    """
    config = loss if source.loss is None else source.loss
    if source.in_batch_negatives is not None:
        config = _with_in_batch_negatives(config, source.in_batch_negatives, source.path)
    if config is not loss:
        try:
            check_loss(config)
        except ConfigError as error:
            raise ConfigError(f"data.train, {source.path}: {error}") from None
    return config


def source_requirements(source: TrainSource, loss: LossConfig, recipe: Recipe) -> RowRequirements:
    """What `loss`, that of `source`, requires of its rows.

    Documents of other rows are no negatives with `in_batch_negatives=false`. A ConfigError if the loss has no label for
    them.
    """
    needs, count = loss.row_requirements, recipe.data.batch_negatives
    if source.text_as_positive and not needs.documents:
        raise ConfigError(
            f"data.train, {source.path}: text_as_positive=true: loss={needs.loss} takes texts without positives; leave "
            "it out"
        )
    if not load_kind(recipe.model.kind).scores_pairs or source.in_batch_negatives is False:
        return needs
    if count == 0 and needs.scores is not ScoreRequirement.teacher:
        return replace(
            needs, without_negatives="mine negatives, or draw documents of other rows: data.batch_negatives=4"
        )
    return with_batch_negatives(needs, count) if count else needs


def distinct_losses(losses: Sequence[LossConfig]) -> tuple[list[LossConfig], list[int]]:
    """The distinct losses, and for each of `losses` its index among them."""
    unique: list[LossConfig] = []
    for loss in losses:
        if loss not in unique:
            unique.append(loss)
    return unique, [unique.index(loss) for loss in losses]


def uses_batches_by_source(data: DataConfig, losses: Sequence[LossConfig]) -> bool:
    """Whether all rows of a global batch are of one source, but for those of `data.mixed_share`.

    `losses` has the loss of each source. Mixed batches of sources with different losses raise a ConfigError.
    """
    differ = len(distinct_losses(losses)[0]) > 1
    check = OptionChecks(data, "data.")
    check.require(0 <= data.mixed_share < 1, "mixed_share", "must be at least 0 and below 1")
    check.require(
        not data.mixed_share or data.batches is BatchMode.by_source,
        "mixed_share",
        f"is a part of batches by source; write data.batches=by_source instead of {data.batches.value}",
    )
    check.require(
        not data.mixed_share or not differ,
        "mixed_share",
        "sources set their own loss or in_batch_negatives, but a batch has only one loss; leave it out",
    )
    if differ and data.batches is BatchMode.mixed:
        raise ConfigError(
            "data.batches=mixed: sources set their own loss or in_batch_negatives, but a batch has "
            "only one loss; write data.batches=by_source"
        )
    return differ or data.batches is BatchMode.by_source


def _with_in_batch_negatives(loss: LossConfig, value: bool, path: str) -> LossConfig:
    option: dict[str, Any] = {"in_batch_negatives": value}
    if isinstance(loss, CombinedConfig) and any(map(_has_in_batch_negatives, loss.losses)):
        parts = [replace(part, **option) if _has_in_batch_negatives(part) else part for part in loss.losses]
        return replace(loss, losses=parts)
    if _has_in_batch_negatives(loss):
        return replace(loss, **option)
    if not value and not isinstance(loss, SigLIPConfig | XTRConfig | DistillSimilaritiesConfig | CombinedConfig):
        return loss  # losses of single rows have no in-batch negatives anyway
    raise ConfigError(f"data.train, {path}: in_batch_negatives={value}: loss={loss.name} has no such option")


def _has_in_batch_negatives(loss: LossConfig) -> bool:
    return "in_batch_negatives" in (field.name for field in fields(loss))
