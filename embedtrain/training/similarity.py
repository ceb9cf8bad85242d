"""How a trained model compares vectors: as its losses do, which compare them as the model's directory does by default.

Of vectors that are normalised, the cosine, the inner product and the Euclidean distance give the same order: there the
model keeps the similarity that it has.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from embedtrain.config.loss_checks import check_loss
from embedtrain.config.loss_choices import Distance, Similarity, VectorSimilarity
from embedtrain.config.losses import AnglEConfig, CombinedConfig, CoSENTConfig, CosineMSEConfig, LossConfig
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError
from embedtrain.models.types import ModelSource

_CHOICES: dict[str, type[Similarity] | type[Distance]] = {"similarity": Similarity, "distance": Distance}
_COSINE = (CoSENTConfig, AnglEConfig, CosineMSEConfig)  # by definition


def with_similarity(
    model: ModelConfig, source: ModelSource, losses: Sequence[LossConfig]
) -> tuple[ModelSource, list[LossConfig]]:
    """The model with the similarity that it is trained for, and the losses of its sources, which all name theirs.

    A ConfigError for a loss that does not know the model's similarity.
    """
    if source.normalize or not source.kind.score(source).named_by_loss:
        return source, list(losses)
    resolved = [_resolved(loss, source.similarity) for loss in losses]
    named = {similarity for loss in resolved for similarity in _similarities(loss)}
    if model.similarity is None and len(named) == 1:
        source = replace(source, similarity=named.pop())
    return source, resolved


def _resolved(loss: LossConfig, similarity: VectorSimilarity) -> LossConfig:
    """The loss, whose similarity or distance is the model's unless it names one."""
    if isinstance(loss, CombinedConfig):
        return replace(loss, losses=[_resolved(part, similarity) for part in loss.losses])
    option = _option(loss)
    if option is None or getattr(loss, option) is not None:
        return loss
    allowed = [choice.value for choice in _CHOICES[option]]
    if similarity.value not in allowed:
        raise ConfigError(
            f"loss.{option}: the model compares vectors by {similarity.value}, and loss={loss.name} knows "
            f"{', '.join(allowed)}: write one of them, by which the trained model then compares, or another loss"
        )
    choice: Any = {option: _CHOICES[option](similarity.value)}
    loss = replace(loss, **choice)
    check_loss(replace(loss, weight=1.0))
    return loss


def _similarities(loss: LossConfig) -> list[VectorSimilarity]:
    """By what a loss compares the vectors of texts; none if it does not."""
    if isinstance(loss, CombinedConfig):
        return [similarity for part in loss.losses for similarity in _similarities(part)]
    option = _option(loss)
    if isinstance(loss, _COSINE) or (option and (loss.matryoshka_dims or loss.precisions)):  # on normalised vectors
        return [VectorSimilarity.cosine]
    return [] if option is None else [VectorSimilarity(getattr(loss, option).value)]


def _option(loss: LossConfig) -> str | None:
    """The option that chooses how the loss compares vectors of texts."""
    for field in fields(loss):
        if field.name in _CHOICES and isinstance(getattr(loss, field.name), Similarity | Distance | None):
            return field.name
    return None


def similarity_note(source: ModelSource, trained: ModelSource) -> list[str]:
    """What the user should know if training changes how the model compares."""
    if trained.similarity is source.similarity:
        return []
    return [
        f"the trained model compares vectors by {written(trained.similarity)}, as its loss does; "
        f"before, by {written(source.similarity)}: model.similarity chooses another one"
    ]
