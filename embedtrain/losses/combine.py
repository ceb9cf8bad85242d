"""Losses made of other losses: a weighted sum, one per source, of truncated or quantised vectors, of several layers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum, unique
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.losses import PrecisionSides, Similarity
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.quantisation import Quantiser, SmoothedRanges, straight_through
from embedtrain.losses.similarity import at_least_float32
from embedtrain.losses.types import BatchInfo, EncodedLoss, Guide, Loss, LossOutput, Prepared

_LOSS_AT = "loss@"  # begins the names of metrics of truncated and quantised vectors
# The key of `BatchInfo.guides` for the vectors of the last layer.
LAST_LAYER = "the last layer"


@unique
class Drawn(IntEnum):
    """What `draw` draws for a batch: draws of one value would be the same."""

    dims = 0
    layers = 1
    precisions = 2


class CombinedLoss(EncodedLoss):
    """A weighted sum of losses on the same rows, such as distillation beside a contrastive loss.

    Every part is a mean over the global rows, so their ratio is the same on any number of ranks. Parts run collectives,
    so their order has to be the same on every rank. Logs the value of each part under its name, without its weight.
    """

    def __init__(self, parts: Mapping[str, Loss], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.weights = dict(weights)

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the parts need."""
        return prepare_losses([(part, dimension) for part in self.parts.values()], batch_info)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        values = queries.parts[0].values
        local_loss, metrics = values.new_zeros(()), dict[str, Tensor]()
        row_losses: Tensor | None = values.detach().new_zeros(batch_info.num_queries)
        for name, part in self.parts.items():
            output = part(queries, documents, batch_info)
            local_loss = local_loss + self.weights[name] * output.local_loss
            row_losses = add_row_losses(row_losses, self.weights[name], output.row_losses)
            metrics[name] = output.local_loss.detach()
            for key, value in output.metrics.items():
                metrics[key if key not in metrics else f"{name}/{key}"] = value
        return LossOutput(local_loss, metrics, row_losses)


class LossPerSource(EncodedLoss):
    """Applies the loss of the batch's training source: `indices` has the index of each source's loss.

    All rows of a batch are of one source.
    """

    def __init__(self, losses: Sequence[Loss], indices: Sequence[int]) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)
        self.indices = list(indices)

    def for_source(self, source: int) -> Loss:
        """The loss of this training source's rows."""
        loss = self.losses[self.indices[source]]
        assert isinstance(loss, Loss)
        return loss

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the loss of the batch's source needs."""
        return self.for_source(batch_info.origin.source).prepare(batch_info, dimension)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        output: LossOutput = self.for_source(batch_info.origin.source)(queries, documents, batch_info)
        return output


class Quantised(EncodedLoss):
    """The weighted sum of a loss on vectors of several precisions, with straight-through gradients.

    Quantised vectors are those that an evaluation compares: unit vectors, rounded to codes, as float numbers. Int8 has
    ranges of the vectors that are quantised, of queries and documents of all ranks together. With `per_step`, so many
    precisions: the first, and others that are drawn for each batch, with their weights. Logs the metrics of the first
    precision, and the value of each.

    Args:
        weights: of each precision, the most precise first.
        ranges: smoothed ranges, which several losses may share.
        sides: which vectors are quantised.
        warmup: global batches over which the weights of quantised losses rise linearly from 0.
    """

    def __init__(
        self,
        inner: Loss,
        weights: Mapping[VectorPrecision, float],
        ranges: SmoothedRanges,
        sides: PrecisionSides = PrecisionSides.both,
        warmup: float = 0.0,
        *,
        per_step: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inner, self.weights, self.sides, self.warmup = inner, dict(weights), sides, warmup
        self.per_step, self.seed = per_step or len(weights), seed
        self.ranges = ranges if VectorPrecision.int8 in weights else None

    def _drawn(self, batch_info: BatchInfo) -> list[tuple[VectorPrecision, float]]:
        """The precisions of this batch and their weights, the most precise first."""
        first, *others = self.weights.items()
        drawn = draw(len(others), self.per_step - 1, self.seed, batch_info.origin.batch, Drawn.precisions)
        return [first, *(others[index] for index in drawn)]

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the loss needs."""
        return self.inner.prepare(batch_info, dimension)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """Vectors [B, D] and [M, D] to this rank's loss."""
        texts = [at_least_float32(encoded.vectors) for encoded in (queries, documents)]
        unit = [F.normalize(vectors, dim=1) for vectors in texts]
        quantised = [self.sides is PrecisionSides.both, True]
        ranges = None
        if self.ranges is not None:
            chosen_vectors = [vectors for vectors, chosen in zip(unit, quantised, strict=True) if chosen]
            ranges = self.ranges.update(chosen_vectors, batch_info.origin.layer)
        growth = min(1.0, batch_info.origin.batch / self.warmup) if self.warmup > 0 else 1.0
        local_loss, metrics = texts[0].new_zeros(()), dict[str, Tensor]()
        row_losses: Tensor | None = texts[0].detach().new_zeros(batch_info.num_queries)
        for precision, weight in self._drawn(batch_info):
            pair, factor = texts, weight
            if precision is not VectorPrecision.float:
                quantiser, factor = Quantiser(precision, ranges), growth * weight
                pair = [
                    straight_through(vectors, quantiser) if chosen else vectors
                    for vectors, chosen in zip(unit, quantised, strict=True)
                ]
            output = self.inner(pair[0], pair[1], batch_info)
            local_loss = local_loss + factor * output.local_loss
            row_losses = add_row_losses(row_losses, factor, output.row_losses)
            metrics = metrics or dict(output.metrics)
            metrics[f"{_LOSS_AT}{precision.value}"] = output.local_loss.detach()
        return LossOutput(local_loss, metrics, row_losses)


class Matryoshka(EncodedLoss):
    """Kusupati et al., "Matryoshka Representation Learning" (2022).

    The weighted sum of a loss on the first n dimensions of the vectors, normalised again, for each n: of one vector per
    text, or of one per token. With `per_step`, for so many n: the largest, and others that are drawn for each batch,
    with their weights. Logs the metrics of the largest n, which is the first of `dims`, and the value for each n.
    """

    def __init__(
        self, inner: Loss, dims: Sequence[int], weights: Sequence[float], *, per_step: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.inner, self.dims, self.weights = inner, list(dims), list(weights)
        self.per_step, self.seed = per_step or len(self.dims), seed

    def _drawn(self, batch_info: BatchInfo) -> list[int]:
        """Indices of the dimensions of this batch, the largest first."""
        drawn = draw(len(self.dims) - 1, self.per_step - 1, self.seed, batch_info.origin.batch, Drawn.dims)
        return [0, *(1 + index for index in drawn)]

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the loss needs for each n of the batch."""
        return prepare_losses([(self.inner, self.dims[index]) for index in self._drawn(batch_info)], batch_info)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        values = at_least_float32(queries.parts[0].values)
        local_loss, metrics = values.new_zeros(()), dict[str, Tensor]()
        row_losses: Tensor | None = values.detach().new_zeros(batch_info.num_queries)
        for index in self._drawn(batch_info):
            dim, weight = self.dims[index], self.weights[index]
            truncated = [_truncated(encoded, dim) for encoded in (queries, documents)]
            output = self.inner(truncated[0], truncated[1], batch_info)
            local_loss = local_loss + weight * output.local_loss
            row_losses = add_row_losses(row_losses, weight, output.row_losses)
            of_precisions = {name: value for name, value in output.metrics.items() if name.startswith(_LOSS_AT)}
            metrics = metrics or {name: value for name, value in output.metrics.items() if name not in of_precisions}
            metrics[f"{_LOSS_AT}{dim}"] = output.local_loss.detach()
            for name, value in of_precisions.items():
                metrics[f"{_LOSS_AT}{dim}-{name.removeprefix(_LOSS_AT)}"] = value
        return LossOutput(local_loss, metrics, row_losses)


class Exit(NamedTuple):
    """The vectors after the first layers of the encoder."""

    layer: int  # the number of layers
    part: int  # of `Encoded.parts`, whose first part is of the last layer
    weight: float


class LayerLoss(EncodedLoss):
    """Li et al., "2D Matryoshka Sentence Embeddings" (2024); Zhang et al., "ML-Embed" (2025).

    The loss of the last layer, plus the mean over the exits of weight * loss. With `divergence`, each term of the mean
    has the divergence of its similarities from those of the last layer as well, times `divergence_weight`; the last
    layer gets no gradient from it. With `per_step` the mean is over so many exits, which are drawn for each batch: its
    expectation is that over all. Without exits, the loss of the last layer. Logs the metrics of the last layer, and the
    values of each.
    """

    def __init__(
        self,
        inner: Loss,
        exits: Sequence[Exit],
        *,
        per_step: int | None = None,
        divergence: Loss | None = None,
        divergence_weight: float = 0.0,
        similarity: Similarity = Similarity.cosine,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inner, self.exits, self.divergence = inner, list(exits), divergence
        self.similarity = similarity  # by which `divergence` compares
        self.per_step, self.divergence_weight, self.seed = per_step or len(self.exits), divergence_weight, seed

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the losses need, which is the same for every layer."""
        losses = [self.inner] if self.divergence is None else [self.inner, self.divergence]
        return prepare_losses([(loss, dimension) for loss in losses], _of_one_part(batch_info))

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        batch_info = _of_one_part(batch_info)
        output: LossOutput = self.inner(*_of_part(queries, documents, 0), batch_info)
        if not self.exits:
            return output
        local_loss, row_losses = output.local_loss, output.row_losses
        metrics = {**output.metrics, "loss@last": local_loss.detach()}
        of_queries, of_documents = (encoded.parts[0].values.detach() for encoded in (queries, documents))
        teacher = Guide(of_queries, of_documents, self.similarity)
        guided = replace(batch_info, guides={**batch_info.guides, LAST_LAYER: teacher})
        drawn = draw(len(self.exits), self.per_step, self.seed, batch_info.origin.batch, Drawn.layers)
        for layer, part, weight in (self.exits[index] for index in drawn):
            losses = [("loss", self.inner, weight)]
            if self.divergence is not None:
                losses.append(("kl", self.divergence, self.divergence_weight))
            for name, loss, factor in losses:
                of_layer = loss(
                    *_of_part(queries, documents, part), replace(guided, origin=guided.origin._replace(layer=layer))
                )
                local_loss = local_loss + factor / len(drawn) * of_layer.local_loss
                row_losses = add_row_losses(row_losses, factor / len(drawn), of_layer.row_losses)
                metrics[f"{name}@layer{layer}"] = of_layer.local_loss.detach()
        return LossOutput(local_loss, metrics, row_losses)


def draw(num_items: int, count: int, seed: int, batch: int, what: Drawn) -> list[int]:
    """`count` of the numbers below `num_items`, ascending: a function of the run's seed and the number of the batch.

    Every rank draws the same, and a resumed run what the whole run draws. Draws of different things are independent.
    """
    if count >= num_items:
        return list(range(num_items))
    return sorted(np.random.default_rng([seed, batch, what]).permutation(num_items)[:count].tolist())


def _truncated(encoded: Encoded, dim: int) -> Encoded:
    """The first dimensions of the vectors, normalised again."""
    return Encoded(
        tuple(part.with_values(F.normalize(at_least_float32(part.values)[:, :dim], dim=1)) for part in encoded.parts)
    )


def add_row_losses(sums: Tensor | None, weight: float, row_losses: Tensor | None) -> Tensor | None:
    """None if any loss is no sum over rows."""
    return None if sums is None or row_losses is None else sums + weight * row_losses


def prepare_losses(losses: Sequence[tuple[nn.Module, int]], batch_info: BatchInfo) -> dict[Hashable, Prepared]:
    """What losses of vectors of these dimensions need; what several need is computed once."""
    prepared = dict[Hashable, Prepared]()
    for loss, dimension in losses:
        assert isinstance(loss, Loss)
        known = replace(batch_info, prepared={**batch_info.prepared, **prepared})
        prepared |= loss.prepare(known, dimension)
    return prepared


def _of_one_part(batch_info: BatchInfo) -> BatchInfo:
    """The same for the vectors of one layer: every part has one row per text."""
    rows = batch_info.rows
    return replace(batch_info, global_rows=replace(rows, sizes=rows.sizes[:1]))


def _of_part(queries: Encoded, documents: Encoded, part: int) -> tuple[Encoded, Encoded]:
    return Encoded((queries.parts[part],)), Encoded((documents.parts[part],))
