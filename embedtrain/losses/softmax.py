"""The softmax of InfoNCE over all candidates: all scores at once, or a few rows at a time.

For row i with positive score z_ip and negatives z_ij = scale * s(a_i, c_j), in each partition of its directions:

    gap_i = logsumexp_j z_ij - z_ip        loss_i = softplus(gap_i)        sigma_i = sigmoid(gap_i)
    dloss_i/dz_ij = exp(z_ij - z_ip - loss_i) = sigma_i * softmax_j(z_ij)        dloss_i/dz_ip = -sigma_i

This is -log softmax in its softplus form, in which nothing cancels when losses are small. `plain_softmax` holds all
scores and leaves the gradient to autograd. `tiled_softmax` computes the gradient in the forward pass, a few rows of
scores at a time: a row's logsumexp is final at once, so its scores become its gradient in place and nothing is computed
twice; the backward pass only scales the result. The gradient of the scale needs no scores: z is homogeneous of degree 1
in the rows of the anchors, so it is sum_i <a_i, da_i> / scale (Euler). `ring` does the same with the candidates of one
rank at a time. `focal_weights` multiplies loss_i and sigma_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.loss_choices import LossDirection
from embedtrain.losses.excluded import QUERY_ANCHORS, QUERY_CANDIDATES
from embedtrain.losses.scores import Candidates, Rows, ScoringRules

# Scores of one tile: 64 MiB of fp32. Lower tiles would read and write the gradient of the candidates more often.
TILE_CELLS = 1 << 24
MIN_TILE_ROWS = 64

# Directions that share a softmax.
Partitions = Sequence[Sequence[LossDirection]]


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over this rank's rows: the differentiable loss, and the rows whose positive beats every negative."""

    loss: Tensor
    num_correct: Tensor
    row_losses: Tensor  # [B], detached: the terms of `loss`
    row_weights: Tensor | None = None  # [B], detached: factors of the rows in the last partition

    def plus(self, losses: Tensor | None) -> "SoftmaxSums":
        """The sums with a further loss of each row, [B], which has the weight of the row; for one partition."""
        if losses is None:
            return self
        assert self.row_weights is not None
        terms = losses * self.row_weights
        return replace(self, loss=self.loss + terms.sum(), row_losses=self.row_losses + terms.detach())


def plain_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, positive: Tensor, partitions: Partitions
) -> SoftmaxSums:
    """This rank's rows against the candidates of all ranks; the scores are held until the backward pass.

    `scale` [1] is one over the temperature, and `positive` [B] the positives' scores, scaled, with the margin.
    """
    loss, num_correct = positive.new_zeros(()), torch.zeros((), dtype=torch.int64, device=positive.device)
    row_losses = weights = torch.zeros_like(positive)
    for directions in partitions:
        blocks = []
        for direction in directions:
            tile = rules.tile(direction, rows, candidates)
            blocks.append(rules.scores(tile, direction, rows, candidates, scale))
        maxima = [row_max(block.detach()) for block in blocks]
        num_correct = add_correct(num_correct, directions, maxima, rows)
        scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        # A row without negatives has loss 0; finite scores make its gradient 0 instead of NaN.
        no_negatives = torch.stack(maxima).amax(dim=0) == -torch.inf
        scores = scores.masked_fill_(no_negatives.unsqueeze(1), 0.0)
        lse = torch.logsumexp(scores, dim=1) if scores.shape[1] else torch.zeros_like(positive)
        gap = (lse - positive).masked_fill(no_negatives, -torch.inf)
        weights = focal_weights(gap, rules.focal, rows.mixed_losses)
        terms = F.softplus(gap) * weights
        loss = loss + terms.sum() / len(partitions)
        row_losses = row_losses + terms.detach() / len(partitions)
    return SoftmaxSums(loss, num_correct, row_losses, weights)


def tiled_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, positive: Tensor, partitions: Partitions
) -> SoftmaxSums:
    """As `plain_softmax`, with a few rows of scores in memory at a time and the gradient computed at once."""
    sums = _Tiled.apply(  # type: ignore[no-untyped-call]
        *differentiable(rows, candidates, scale, positive), (rows, candidates, rules, partitions)
    )
    return SoftmaxSums(*sums)


def differentiable(rows: Rows, candidates: Candidates, scale: Tensor, positive: Tensor) -> tuple[Tensor | None, ...]:
    """The inputs of `GradientInForward` that have a gradient."""
    return (
        rows.queries.values,
        None if rows.positives is None else rows.positives.values,
        candidates.documents.values,
        None if candidates.queries is None else candidates.queries.values,
        scale,
        positive,
    )


def focal_weights(gap: Tensor, exponent: float, further: Tensor | None = None) -> Tensor:
    """(1 - p)^exponent of each row, where p = sigmoid(-gap) is its positive's probability; without gradient.

    With a further loss of each row, detached, p is exp(-(loss + further)).
    """
    gap = gap.detach()
    missing = torch.sigmoid(gap) if further is None else -torch.expm1(-(F.softplus(gap) + further))
    return missing**exponent


def row_max(scores: Tensor) -> Tensor:
    """The largest score of each row; -inf without candidates."""
    if scores.shape[1] == 0:  # torch has no maximum of an empty dimension
        return scores.new_full((len(scores),), -torch.inf)
    return scores.amax(dim=1)


def add_correct(
    num_correct: Tensor, directions: Sequence[LossDirection], maxima: Sequence[Tensor], rows: Rows
) -> Tensor:
    """Add the rows whose positive beats all documents, in the partition that has that direction."""
    if LossDirection.query_document not in directions:
        return num_correct
    maximum = maxima[list(directions).index(LossDirection.query_document)]
    return num_correct + (maximum < rows.accuracy_thresholds).sum()


class GradientInForward(torch.autograd.Function):
    """Inputs: those of `differentiable`, and a tuple of everything else."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed."""
        computed, ctx.computed = ctx.computed, None
        assert computed is not None, "this loss has no second backward pass: its gradient is scaled in place"
        return *(None if grad is None else grad.mul_(grads[0]) for grad in computed), None


@dataclass(slots=True)
class Gradients:
    """The gradient of the sum of the rows' losses, accumulated tile by tile."""

    queries: Tensor
    positives: Tensor | None
    documents: Tensor
    candidate_queries: Tensor | None

    @classmethod
    def zeros(cls, rows: Rows, candidates: Candidates) -> "Gradients":
        """Before the first tile."""
        return cls(
            torch.zeros_like(rows.queries.values),
            None if rows.positives is None else torch.zeros_like(rows.positives.values),
            torch.zeros_like(candidates.documents.values),
            None if candidates.queries is None else torch.zeros_like(candidates.queries.values),
        )

    def anchors(self, direction: LossDirection) -> Tensor:
        """The gradient that the anchors of a direction contribute to."""
        grads = self.queries if direction in QUERY_ANCHORS else self.positives
        assert grads is not None
        return grads

    def candidates(self, direction: LossDirection) -> Tensor:
        """The gradient that the candidates of a direction contribute to."""
        grads = self.candidate_queries if direction in QUERY_CANDIDATES else self.documents
        assert grads is not None
        return grads

    def finish(self, rows: Rows, sigma: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Of all inputs of `differentiable`; `sigma` [B] is minus the derivative at the positive's score."""
        scale_grad = (rows.queries.values * self.queries).sum()
        if rows.positives is not None and self.positives is not None:
            scale_grad = scale_grad + (rows.positives.values * self.positives).sum()
        scale_grads = (scale_grad / scale).expand_as(scale).clone()
        return self.queries, self.positives, self.documents, self.candidate_queries, scale_grads, sigma.neg()


class TileBuffer:
    """Memory for tiles, reused: two tiles at a time would double it, and fresh pages cost time."""

    def __init__(self, rows: Rows, width: int) -> None:
        # A tile of texts with several rows has to remember which of them match: it is lower by their number.
        size = rows.queries.max_size
        height = max(MIN_TILE_ROWS // size, TILE_CELLS // max(1, width * size), 1)
        self.row_slices = [(start, min(start + height, len(rows))) for start in range(0, len(rows), height)]
        highest = max((end - start for start, end in self.row_slices), default=0)
        self._cells = rows.queries.values.new_empty(highest * width)

    def tiles(self, height: int, widths: Sequence[int]) -> list[Tensor]:
        """Adjacent tiles of these widths; their previous content is lost."""
        sizes = [height * width for width in widths]
        parts = self._cells[: sum(sizes)].split(sizes)
        return [part.view(height, width) for part, width in zip(parts, widths, strict=True)]


class _Tiled(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor | None,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        positive: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, Partitions],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, candidates, rules, partitions = rest
        grads = Gradients.zeros(rows, candidates)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        row_weights = torch.zeros_like(positive)
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        widths = [sum(len(candidates.of(direction)) for direction in directions) for directions in partitions]
        buffer = TileBuffer(rows, max(widths))
        for start, end in buffer.row_slices:
            tile_rows, tile_positive = rows.slice(start, end), positive[start:end]
            for directions in partitions:
                tiles = [rules.tile(direction, tile_rows, candidates) for direction in directions]
                cells = buffer.tiles(end - start, [len(candidates.of(direction)) for direction in directions])
                for direction, tile, scores in zip(directions, tiles, cells, strict=True):
                    rules.scores(tile, direction, tile_rows, candidates, scale, out=scores)
                maxima = [row_max(scores) for scores in cells]
                num_correct = add_correct(num_correct, directions, maxima, tile_rows)
                maximum = torch.stack(maxima).amax(dim=0)
                offset = maximum.masked_fill(maximum == -torch.inf, 0.0)
                sum_exp = torch.zeros_like(offset)
                for scores in cells:
                    sum_exp += scores.sub_(offset.unsqueeze(1)).exp_().sum(dim=1)
                gap = offset + sum_exp.log() - tile_positive  # -inf in a row without negatives, whose loss is 0
                weight = focal_weights(gap, rules.focal, tile_rows.mixed_losses)
                row_weights[start:end] = weight
                terms = F.softplus(gap) * weight
                loss += terms.sum() / len(partitions)
                row_losses[start:end] += terms / len(partitions)
                sigma = torch.sigmoid(gap) * weight / len(partitions)
                sigma_sum[start:end] += sigma
                weights = (sigma / sum_exp).masked_fill_(sum_exp == 0, 0.0).mul_(scale).unsqueeze(1)
                for direction, tile, exp in zip(directions, tiles, cells, strict=True):
                    anchor_grads = (
                        rows.anchors(direction).with_values(grads.anchors(direction)).slice(start, end).values
                    )
                    tile.add_anchor_grads(anchor_grads, exp, weights)
                    tile.add_candidate_grads(grads.candidates(direction), exp, weights)
        ctx.computed = grads.finish(rows, sigma_sum, scale)
        ctx.mark_non_differentiable(num_correct, row_losses, row_weights)
        return loss, num_correct, row_losses, row_weights
