"""From the recipe's loss options to the loss."""

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
from embedtrain.losses.by_source import LossPerSource
from embedtrain.losses.combined import CombinedLoss
from embedtrain.losses.distillation import DistillEmbeddings, DistillScores, MarginMSE
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.matryoshka import Matryoshka
from embedtrain.losses.orthogonal import Orthogonal
from embedtrain.losses.pairs import AnglE, Contrastive, CoSENT, CosineMSE, OnlineContrastive
from embedtrain.losses.sigmoid import SigLIP
from embedtrain.losses.triplets import BatchTriplet, Triplet
from embedtrain.losses.types import FROM_ROWS, Loss


def build_loss(
    config: LossConfig, *, dimension: int, guide_dimensions: Mapping[str, int] | None = None, seed: int
) -> Loss:
    """The loss that `config` describes.

    Args:
        config: the recipe's `loss`.
        dimension: of the model's vectors.
        guide_dimensions: of the vectors of each guide or teacher, by its path; see `BatchInfo.guides`.
        seed: parameters of the loss's own are a function of it, so they are the same on every rank.

    Raises:
        ConfigError: options that do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _choose(config, dimension, guide_dimensions or {})


def build_losses(
    configs: Sequence[LossConfig], *, dimension: int, guide_dimensions: Sequence[Mapping[str, int]], seed: int
) -> Loss:
    """The loss of all sources, or one that has each source's.

    Args:
        configs: the loss of each source.
        dimension: of the model's vectors.
        guide_dimensions: for each source; see `build_loss`.
        seed: see there.

    Raises:
        ConfigError: options that do not fit the model, or a teacher's vectors of several widths for one loss.
    """
    different, which = distinct_losses(configs)
    losses = []
    for number, config in enumerate(different):
        widths = [guide_dimensions[source] for source, of in enumerate(which) if of == number]
        if any(width != widths[0] for width in widths):
            raise ConfigError(
                f"the teacher's vectors of sources that share loss={config.name} have different widths "
                f"({', '.join(sorted({str(width.get(FROM_ROWS)) for width in widths}))}): train on one teacher's"
            )
        losses.append(build_loss(config, dimension=dimension, guide_dimensions=widths[0], seed=seed))
    return losses[0] if len(losses) == 1 else LossPerSource(losses, which)


def _choose(config: LossConfig, dimension: int, guide_dimensions: Mapping[str, int]) -> Loss:
    loss = _whole(config, dimension, guide_dimensions)
    if config.matryoshka_dims is None:
        return loss
    if max(config.matryoshka_dims) > dimension:
        raise ConfigError(
            f"loss.matryoshka_dims={config.matryoshka_dims}: the model's vectors have {dimension} dimensions"
        )
    weights = config.matryoshka_weights or [1.0] * len(config.matryoshka_dims)
    longest_first = sorted(zip(config.matryoshka_dims, weights, strict=True), reverse=True)
    return Matryoshka(loss, [dim for dim, _ in longest_first], [weight for _, weight in longest_first])


def _whole(config: LossConfig, dimension: int, guide_dimensions: Mapping[str, int]) -> Loss:
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
            names = part_names(config)
            parts = [_choose(part, dimension, guide_dimensions) for part in config.losses]
            weights = [part.weight for part in config.losses]
            return CombinedLoss(dict(zip(names, parts, strict=True)), dict(zip(names, weights, strict=True)))
        case _:
            raise ConfigError(f"loss.name={config.name} is not a loss; there are {', '.join(LOSSES)}")


def row_spec_of(config: LossConfig) -> RowSpec:
    """What rows mean to the loss, for what is measured beside it."""
    needs = row_requirements(config)
    graded = needs.scores is ScoreRequirement.pairs or (needs.scores is ScoreRequirement.teacher and needs.range.whole)
    parts = config.losses if isinstance(config, CombinedConfig) else [config]
    return RowSpec(
        positives=not graded and not needs.label,
        in_batch=not any(isinstance(part, InfoNCEConfig) and not part.in_batch_negatives for part in parts),
    )


def loss_notes(configs: Sequence[LossConfig], names: Sequence[str], loss: Loss, dimension: int) -> list[str]:
    """What a user should know of the losses of sources of these names: lines for the terminal."""
    different, which = distinct_losses(configs)
    notes = []
    if len(different) > 1:
        sources = [", ".join(n for n, of in zip(names, which, strict=True) if of == i) for i in range(len(different))]
        of_each = (f"{_set_apart(config, different)} for {sources[i]}" for i, config in enumerate(different))
        notes.append(f"{len(different)} losses, one a batch: {'; '.join(of_each)}")
    own = {name: tuple(p.shape) for name, p in loss.named_parameters()}
    if own:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in own.items())
        notes.append(f"the loss trains parameters of its own: {told}")
    notes += [
        f"loss.matryoshka_dims={config.matryoshka_dims} leaves out the model's own {dimension} dimensions: "
        f"whole vectors are not trained as such"
        for config in different
        if config.matryoshka_dims is not None and dimension not in config.matryoshka_dims
    ]
    return notes


def _set_apart(config: LossConfig, others: Sequence[LossConfig]) -> str:
    """A loss, with those of its options that others of its kind have otherwise."""
    alike = [other for other in others if type(other) is type(config)]
    apart = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if any(getattr(other, field.name) != getattr(config, field.name) for other in alike)
    ]
    return config.name + (f" ({', '.join(apart)})" if apart else "")


def part_names(config: CombinedConfig) -> list[str]:
    """The names of a combination's parts; a loss that comes twice is numbered."""
    names = [part.name for part in config.losses]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names, 1)]
