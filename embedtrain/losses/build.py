"""Builds the loss that the recipe describes."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from embedtrain.config.code import load_code
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.kinds import loss_of_kind
from embedtrain.config.loss_checks import dim_weights, layer_weights, matryoshka_layers_of
from embedtrain.config.losses import (
    LOSSES,
    CombinedConfig,
    CustomConfig,
    DistillEmbeddingsConfig,
    DistillSimilaritiesConfig,
    InfoNCEConfig,
    LossConfig,
    M3LossConfig,
    MatryoshkaConfig,
    SentenceTransformersConfig,
    Similarity,
)
from embedtrain.config.row_requirements import ScoreRequirement
from embedtrain.config.source_losses import distinct_losses
from embedtrain.errors import ConfigError
from embedtrain.losses.batch_statistics import RowSpec
from embedtrain.losses.combine import (
    LAST_LAYER,
    CombinedLoss,
    Exit,
    LayerLoss,
    LossPerSource,
    Matryoshka,
    Quantised,
)
from embedtrain.losses.distill_similarities import DistillSimilarities, SimilarityMSE
from embedtrain.losses.distillation import DistillEmbeddings, DistillScores, MarginMSE
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.listwise import ADRMSE, BCE, MSE, LambdaLoss, ListNet, PListMLE, RankNet, Softmax
from embedtrain.losses.orthogonal import Orthogonal
from embedtrain.losses.pairs import (
    AnglE,
    BatchTriplet,
    Contrastive,
    CoSENT,
    CosineMSE,
    OnlineContrastive,
    Triplet,
)
from embedtrain.losses.quantisation import SmoothedRanges
from embedtrain.losses.score import Score
from embedtrain.losses.sigmoid import SigLIP
from embedtrain.losses.types import FROM_ROWS, EncodedLoss, Loss

# The losses that need only their options, by `loss.name`.
_BY_NAME: dict[str, Callable[[Any], Loss]] = {
    "siglip": SigLIP,
    "cosent": CoSENT,
    "angle": AnglE,
    "cosine_mse": CosineMSE,
    "contrastive": Contrastive,
    "online_contrastive": OnlineContrastive,
    "triplet": Triplet,
    "batch_triplet": BatchTriplet,
    "orthogonal": Orthogonal,
    "similarity_mse": SimilarityMSE,
}
# The losses that are functions of scores, of any kind of model.
_OF_SCORES: dict[str, Callable[[Any, Any], Loss]] = {
    "infonce": InfoNCE,
    "distill_scores": DistillScores,
    "margin_mse": MarginMSE,
    "bce": BCE,
    "softmax": Softmax,
    "listnet": ListNet,
    "ranknet": RankNet,
    "lambdaloss": LambdaLoss,
    "plistmle": PListMLE,
    "adr_mse": ADRMSE,
    "mse": MSE,
}


def build_loss(
    config: LossConfig,
    *,
    dimension: int,
    guide_dimensions: Mapping[str, int] | None = None,
    seed: int,
    score: Score | None = None,
    num_batches: int = 0,
    ranges: SmoothedRanges | None = None,
    layers: Sequence[int] | None = None,
) -> Loss:
    """Build the loss that `config` describes for vectors of `dimension`.

    `score` is how the model compares texts; default: the similarity of vectors that the loss names. `guide_dimensions`
    has the dimension of each guide's or teacher's vectors, by the keys of `BatchInfo.guides`. The loss's own parameters
    are a function of `seed`, so they are the same on every rank. `num_batches` are the global batches of the run, for
    warm-ups. Losses that share `ranges` quantise with the same ones. `layers` are the early exits of the encoder in
    ascending order, by default those that `config` names. Options that do not fit the model raise a ConfigError.
    """
    exits = sorted(matryoshka_layers_of(config)) if layers is None else layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        builder = _Builder(
            dimension, guide_dimensions or {}, seed, score, num_batches, ranges or SmoothedRanges(), exits
        )
        return builder.build(config, exits)


def build_losses(
    configs: Sequence[LossConfig],
    *,
    dimension: int,
    guide_dimensions: Sequence[Mapping[str, int]],
    seed: int,
    score: Score | None = None,
    num_batches: int = 0,
) -> Loss:
    """Build the loss of all sources, or a `LossPerSource` if they differ.

    `configs` and `guide_dimensions` are those of each source, as for `build_loss`. Teachers' vectors of one loss that
    differ in dimension raise a ConfigError.
    """
    unique, indices = distinct_losses(configs)
    losses, ranges = [], SmoothedRanges()
    layers = exit_layers(configs)
    for number, config in enumerate(unique):
        widths = [guide_dimensions[source] for source, index in enumerate(indices) if index == number]
        if any(width != widths[0] for width in widths):
            raise ConfigError(
                f"loss={config.name}: the teacher's vectors of its sources have different dimensions "
                f"({', '.join(sorted({str(width.get(FROM_ROWS)) for width in widths}))}); use vectors of one teacher"
            )
        losses.append(
            build_loss(
                config,
                dimension=dimension,
                guide_dimensions=widths[0],
                seed=seed,
                score=score,
                num_batches=num_batches,
                ranges=ranges,
                layers=layers,
            )
        )
    return losses[0] if len(losses) == 1 else LossPerSource(losses, indices)


def exit_layers(configs: Sequence[LossConfig]) -> list[int]:
    """The layers whose vectors an encoder returns for these losses, ascending, besides those of the last."""
    return sorted(set[int]().union(*map(matryoshka_layers_of, configs)))


def require_dimensions(config: LossConfig, dimension: int) -> None:
    """Raise ConfigError if a loss, or a part of it, trains on more dimensions than the model's vectors have."""
    parts = config.losses if isinstance(config, CombinedConfig) else []
    for part in (config, *parts):
        dims = part.matryoshka.dims
        if dims is not None and max(dims) > dimension:
            raise ConfigError(f"loss.matryoshka.dims={dims}: the model's vectors have only {dimension} dimensions")


@dataclass(frozen=True)
class _Builder:
    """What every loss is built for."""

    dimension: int
    guide_dimensions: Mapping[str, int]
    seed: int
    score: Score | None
    num_batches: int
    ranges: SmoothedRanges
    layers: Sequence[int]  # early exits of the encoder

    def build(self, config: LossConfig, exits: Sequence[int]) -> Loss:
        """The loss of an encoder with these early exits, of which a part after the last layer's is of each text."""
        # The parts of a combination choose their layers, unless the combination does.
        wrapper = config.matryoshka
        in_parts = isinstance(config, CombinedConfig) and wrapper.layers is None
        loss = self._of_dimensions(config, exits if in_parts else ())
        if not exits or in_parts:
            return loss
        weights = zip(wrapper.layers or (), layer_weights(wrapper), strict=True)
        used = [Exit(layer, 1 + exits.index(layer), weight) for layer, weight in sorted(weights)]
        temperature = getattr(config, "temperature", None)
        similarity = Similarity(getattr(config, "similarity", None) or Similarity.cosine)
        kl = None
        if wrapper.layer_kl:
            kl = DistillSimilaritiesConfig(teacher=LAST_LAYER, temperature=temperature, similarity=similarity)
        return LayerLoss(
            loss,
            used,
            per_step=wrapper.layers_per_step,
            divergence=None if kl is None else DistillSimilarities(kl, {LAST_LAYER: self.dimension}),
            divergence_weight=wrapper.layer_kl,
            similarity=similarity,
            seed=self.seed,
        )

    def _of_dimensions(self, config: LossConfig, exits: Sequence[int]) -> Loss:
        loss, wrapper = self._whole(config, exits), config.matryoshka
        if wrapper.precisions is not None:
            loss = self._quantised(loss, wrapper, wrapper.precisions)
        if wrapper.dims is None:
            return loss
        require_dimensions(config, self.dimension)
        largest_first = sorted(zip(wrapper.dims, dim_weights(wrapper), strict=True), reverse=True)
        dims, weights = zip(*largest_first, strict=True)
        return Matryoshka(loss, dims, weights, per_step=wrapper.dims_per_step, seed=self.seed)

    def _quantised(self, loss: Loss, wrapper: MatryoshkaConfig, precisions: Sequence[VectorPrecision]) -> Quantised:
        weights = dict(zip(precisions, wrapper.precision_weights or [1.0] * len(precisions), strict=True))
        if VectorPrecision.int8 in weights:
            for dim, layer in itertools.product(wrapper.dims or [self.dimension], (None, *self.layers)):
                self.ranges.add(dim, layer)
        most_precise_first = {precision: weights[precision] for precision in VectorPrecision if precision in weights}
        warmup = wrapper.precision_warmup * self.num_batches
        return Quantised(
            loss,
            most_precise_first,
            self.ranges,
            wrapper.precision_sides,
            warmup,
            per_step=wrapper.precisions_per_step,
            seed=self.seed,
        )

    def _whole(self, config: LossConfig, exits: Sequence[int]) -> Loss:
        """The loss of all dimensions."""
        match config:
            case DistillEmbeddingsConfig():
                return DistillEmbeddings(config, self.dimension, self.guide_dimensions)
            case DistillSimilaritiesConfig():
                return DistillSimilarities(config, self.guide_dimensions)
            case SentenceTransformersConfig():
                # Importing sentence-transformers takes seconds.
                from embedtrain.losses.sentence_transformers import SentenceTransformersLoss

                return SentenceTransformersLoss(
                    config, dimension=self.dimension, guide_dimensions=self.guide_dimensions
                )
            case CustomConfig():
                return build_custom(config, self.dimension, self.score)
            case CombinedConfig():
                names = [part.name for part in config.losses]  # numbered if a loss occurs several times
                names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names, 1)]
                parts = [self.build(part, exits) for part in config.losses]
                weights = [part.weight for part in config.losses]
                return CombinedLoss(dict(zip(names, parts, strict=True)), dict(zip(names, weights, strict=True)))
            case _ if (own := loss_of_kind(config.name)) is not None:
                loss: Loss = own(config, self.score)
                return loss
            case _ if config.name in _OF_SCORES:
                return _OF_SCORES[config.name](config, self.score)
            case _ if config.name in _BY_NAME:
                return _BY_NAME[config.name](config)
            case _:
                raise ConfigError(f"loss.name={config.name} is not a loss; there are {', '.join(LOSSES)}")


def row_spec_of(config: LossConfig) -> RowSpec:
    """What the documents of a row are to the loss, for `batch_statistics`."""
    needs = config.row_requirements
    graded = needs.scores is ScoreRequirement.pairs or (
        needs.scores is ScoreRequirement.teacher and needs.range.integers
    )
    parts = config.losses if isinstance(config, CombinedConfig) else [config]
    return RowSpec(
        has_positive=not graded and not needs.label,
        in_batch_negatives=all(
            part.in_batch_negatives for part in parts if isinstance(part, InfoNCEConfig | M3LossConfig)
        ),
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
        f"loss.matryoshka.dims={config.matryoshka.dims} leaves out the model's full {dimension} dimensions: "
        f"the loss is not computed on full vectors"
        for config in unique
        if config.matryoshka.dims is not None and dimension not in config.matryoshka.dims
    ]
    return notes


def _describe(config: LossConfig, configs: Sequence[LossConfig]) -> str:
    """The name of a loss, with the options in which losses of its kind differ."""
    same_kind = [other for other in configs if type(other) is type(config)]
    options = []
    for prefix, sections in (
        ("", [config, *same_kind]),
        ("matryoshka.", [loss.matryoshka for loss in (config, *same_kind)]),
    ):
        for field in fields(sections[0]):
            value, *others = [getattr(section, field.name) for section in sections]
            if field.name != "matryoshka" and any(other != value for other in others):
                options.append(f"{prefix}{field.name}={value}")
    return config.name + (f" ({', '.join(options)})" if options else "")


def load_loss_class(path: str, option: str = "loss.path") -> type[Loss]:
    """Import a class; a ConfigError if it is no subclass of Loss."""
    kind = load_code(path, option)
    if not (isinstance(kind, type) and issubclass(kind, Loss)):
        raise ConfigError(f"{option}={path}: must be a subclass of embedtrain.losses.types.Loss, not {kind!r}")
    return kind


def build_custom(config: CustomConfig, dimension: int, score: Score | None = None) -> Loss:
    """An instance of the class. A constructor that takes `dimension` or `score` gets that of the model.

    A class that takes one vector of each text raises a ConfigError for a score of texts with several.
    """
    kind = load_loss_class(config.path)
    if score is not None and not score.one_vector and not issubclass(kind, EncodedLoss):
        raise ConfigError(
            f"loss.path={config.path}: takes one vector of each text, and model.kind={score.kind} has several; derive "
            "the class from embedtrain.losses.types.EncodedLoss"
        )
    kwargs = dict(config.kwargs)
    for name, value in (("dimension", dimension), ("score", score)):
        if value is not None and name in inspect.signature(kind).parameters:
            kwargs.setdefault(name, value)
    try:
        return kind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"loss.kwargs={config.kwargs}: {config.path}: {error}") from error
