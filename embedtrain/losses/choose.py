"""From the recipe's loss options to the loss."""

from collections.abc import Mapping

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
from embedtrain.errors import ConfigError
from embedtrain.losses.combined import Combined
from embedtrain.losses.distill import DistillEmbeddings, DistillScores, MarginMSE
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.matryoshka import Matryoshka
from embedtrain.losses.orthogonal import Orthogonal
from embedtrain.losses.pairs import AnglE, Contrastive, CoSENT, CosineMSE, OnlineContrastive
from embedtrain.losses.sigmoid import SigLIP
from embedtrain.losses.triplets import BatchTriplet, Triplet
from embedtrain.losses.types import Loss


def choose_loss(
    config: LossConfig, *, dimension: int, guide_dimensions: Mapping[str, int] | None = None, seed: int
) -> Loss:
    """The loss that `config` describes.

    Args:
        config: the recipe's `loss`.
        dimension: of the model's vectors.
        guide_dimensions: of the vectors of each guide or teacher, by its path; see `LossInput.guides`.
        seed: parameters of the loss's own are a function of it, so they are the same on every rank.

    Raises:
        ConfigError: options that do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _choose(config, dimension, guide_dimensions or {})


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
            return Combined(dict(zip(names, parts, strict=True)), dict(zip(names, weights, strict=True)))
        case _:
            raise ConfigError(f"loss.name={config.name} is not a loss; there are {', '.join(LOSSES)}")


def notes_on(config: LossConfig, loss: Loss, dimension: int) -> list[str]:
    """What a user should know of the loss: lines for the terminal."""
    notes = []
    own = {name: tuple(p.shape) for name, p in loss.named_parameters()}
    if own:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in own.items())
        notes.append(f"the loss trains parameters of its own: {told}")
    if config.matryoshka_dims is not None and dimension not in config.matryoshka_dims:
        notes.append(
            f"loss.matryoshka_dims={config.matryoshka_dims} leaves out the model's own {dimension} dimensions: "
            f"whole vectors are not trained as such"
        )
    return notes


def part_names(config: CombinedConfig) -> list[str]:
    """The names of a combination's parts; a loss that comes twice is numbered."""
    names = [part.name for part in config.losses]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names, 1)]
