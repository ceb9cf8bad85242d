"""Builds the loss that the recipe describes."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from embedtrain.config.losses import (
    LOSSES,
    AnglEConfig,
    BatchTripletConfig,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    InfoNCEConfig,
    LossConfig,
    MarginMSEConfig,
    OnlineContrastiveConfig,
    OrthogonalConfig,
    SentenceTransformersConfig,
    SigLIPConfig,
    TripletConfig,
)
from embedtrain.config.row_requirements import ScoreRequirement, row_requirements
from embedtrain.config.source_losses import distinct_losses
from embedtrain.errors import ConfigError
from embedtrain.losses.batch_statistics import RowSpec
from embedtrain.losses.combine import CombinedLoss, LossPerSource, Matryoshka
from embedtrain.losses.distillation import DistillEmbeddings, DistillScores, MarginMSE
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.orthogonal import Orthogonal
from embedtrain.losses.pairs import AnglE, Contrastive, CoSENT, CosineMSE, OnlineContrastive
from embedtrain.losses.sigmoid import SigLIP
from embedtrain.losses.triplets import BatchTriplet, Triplet
from embedtrain.losses.types import FROM_ROWS, Loss


def build_loss(
    config: LossConfig, *, dimension: int, guide_dimensions: Mapping[str, int] | None = None, seed: int
) -> Loss:
    """Build the loss that `config` describes.

    Args:
        config: the recipe's `loss`.
        dimension: of the model's vectors.
        guide_dimensions: of the vectors of each guide or teacher, by the keys of `BatchInfo.guides`.
        seed: the loss's own parameters are a function of it, so they are the same on every rank.

    Raises:
        ConfigError: options do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(config, dimension, guide_dimensions or {})


def build_losses(
    configs: Sequence[LossConfig], *, dimension: int, guide_dimensions: Sequence[Mapping[str, int]], seed: int
) -> Loss:
    """Build the loss of all sources, or a `LossPerSource` if they differ.

    Args:
        configs: of each source.
        dimension: of the model's vectors.
        guide_dimensions: of each source, as for `build_loss`.
        seed: as for `build_loss`.

    Raises:
        ConfigError: options do not fit the model, or teachers' vectors of one loss differ in dimension.
    """
    unique, indices = distinct_losses(configs)
    losses = []
    for number, config in enumerate(unique):
        widths = [guide_dimensions[source] for source, index in enumerate(indices) if index == number]
        if any(width != widths[0] for width in widths):
            raise ConfigError(
                f"loss={config.name}: the teacher's vectors of its sources have different dimensions "
                f"({', '.join(sorted({str(width.get(FROM_ROWS)) for width in widths}))}); use vectors of one teacher"
            )
        losses.append(build_loss(config, dimension=dimension, guide_dimensions=widths[0], seed=seed))
    return losses[0] if len(losses) == 1 else LossPerSource(losses, indices)


def _build(config: LossConfig, dimension: int, guide_dimensions: Mapping[str, int]) -> Loss:
    loss = _build_full(config, dimension, guide_dimensions)
    if config.matryoshka_dims is None:
        return loss
    if max(config.matryoshka_dims) > dimension:
        raise ConfigError(
            f"loss.matryoshka_dims={config.matryoshka_dims}: the model's vectors have only {dimension} dimensions"
        )
    weights = config.matryoshka_weights or [1.0] * len(config.matryoshka_dims)
    largest_first = sorted(zip(config.matryoshka_dims, weights, strict=True), reverse=True)
    return Matryoshka(loss, [dim for dim, _ in largest_first], [weight for _, weight in largest_first])


def _build_full(config: LossConfig, dimension: int, guide_dimensions: Mapping[str, int]) -> Loss:
    match config:
        case InfoNCEConfig():
            return InfoNCE(config)
        case SigLIPConfig():
            return SigLIP(config)
        case CoSENTConfig():
            return CoSENT(config)
        case AnglEConfig():
            return AnglE(config)
        case CosineMSEConfig():
            return CosineMSE(config)
        case ContrastiveConfig():
            return Contrastive(config)
        case OnlineContrastiveConfig():
            return OnlineContrastive(config)
        case TripletConfig():
            return Triplet(config)
        case BatchTripletConfig():
            return BatchTriplet(config)
        case DistillScoresConfig():
            return DistillScores(config)
        case MarginMSEConfig():
            return MarginMSE(config)
        case DistillEmbeddingsConfig():
            return DistillEmbeddings(config, dimension, guide_dimensions)
        case OrthogonalConfig():
            return Orthogonal(config)
        case SentenceTransformersConfig():
            # Importing sentence-transformers takes seconds.
            from embedtrain.losses.sentence_transformers import SentenceTransformersLoss

            return SentenceTransformersLoss(config, dimension=dimension, guide_dimensions=guide_dimensions)
        case CombinedConfig():
            names = _part_names(config)
            parts = [_build(part, dimension, guide_dimensions) for part in config.losses]
            weights = [part.weight for part in config.losses]
            return CombinedLoss(dict(zip(names, parts, strict=True)), dict(zip(names, weights, strict=True)))
        case _:
            raise ConfigError(f"loss.name={config.name} is not a loss; there are {', '.join(LOSSES)}")


def row_spec_of(config: LossConfig) -> RowSpec:
    """What the documents of a row are to the loss, for `batch_statistics`."""
    needs = row_requirements(config)
    graded = needs.scores is ScoreRequirement.pairs or (
        needs.scores is ScoreRequirement.teacher and needs.range.integers
    )
    parts = config.losses if isinstance(config, CombinedConfig) else [config]
    return RowSpec(
        has_positive=not graded and not needs.label,
        in_batch_negatives=not any(isinstance(part, InfoNCEConfig) and not part.in_batch_negatives for part in parts),
    )


def loss_notes(configs: Sequence[LossConfig], names: Sequence[str], loss: Loss, dimension: int) -> list[str]:
    """Lines for the terminal about the losses of the sources of these names."""
    unique, indices = distinct_losses(configs)
    notes = []
    if len(unique) > 1:
        descriptions = []
        for number, config in enumerate(unique):
            sources = ", ".join(name for name, index in zip(names, indices, strict=True) if index == number)
            descriptions.append(f"{_describe(config, unique)} for {sources}")
        notes.append(f"{len(unique)} losses, one per batch: {'; '.join(descriptions)}")
    parameters = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in loss.named_parameters())
    if parameters:
        notes.append(f"the loss has trained parameters: {parameters}")
    notes += [
        f"loss.matryoshka_dims={config.matryoshka_dims} leaves out the model's full {dimension} dimensions: "
        f"the loss is not computed on full vectors"
        for config in unique
        if config.matryoshka_dims is not None and dimension not in config.matryoshka_dims
    ]
    return notes


def _describe(config: LossConfig, others: Sequence[LossConfig]) -> str:
    """The name of a loss, with the options that differ from others of its kind."""
    same_kind = [other for other in others if type(other) is type(config)]
    options = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if any(getattr(other, field.name) != getattr(config, field.name) for other in same_kind)
    ]
    return config.name + (f" ({', '.join(options)})" if options else "")


def _part_names(config: CombinedConfig) -> list[str]:
    """The names of the parts; a loss that occurs several times is numbered."""
    names = [part.name for part in config.losses]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names, 1)]
