"""The softmax of InfoNCE over all candidates: all scores at once, a few rows at a time, or around a ring of ranks.

For row i with positive score z_ip and negatives z_ij = scale * <a_i, c_j>, in each partition of its directions:

    gap_i = logsumexp_j z_ij - z_ip        loss_i = softplus(gap_i)        sigma_i = sigmoid(gap_i)
    dloss_i/dz_ij = exp(z_ij - z_ip - loss_i) = sigma_i * softmax_j(z_ij)        dloss_i/dz_ip = -sigma_i

This is -log softmax in its softplus form, in which nothing cancels when losses are small. `plain_softmax` holds all
scores and leaves the gradient to autograd. `tiled_softmax` computes the gradient in the forward pass, a few rows of
scores at a time: a row's logsumexp is final at once, so its scores become its gradient in place and nothing is computed
twice; the backward pass only scales the result. The gradient of the scale needs no scores: z is linear in it, so it is
sum_i <a_i, da_i> / scale (Euler).

`ring_softmax` is for batches whose vectors no rank could hold: candidates travel around the ranks. While they pass,
each row keeps its largest score, the sum of exp(z_ij) and sum_j exp(z_ij) c_j online, as in flash attention (Dao et
al., 2022) with candidates for keys and values: that is the gradient of the rows. Then the rows travel, and every rank
adds up the gradient of its own candidates. Communication overlaps with computation, and gradients never travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.distributed.collectives import ring
from embedtrain.losses.excluded import QUERY_ANCHORS, QUERY_CANDIDATES
from embedtrain.losses.score import VectorScore
from embedtrain.losses.scores import Candidates, Rows, ScoringRules
from embedtrain.losses.types import Counts

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


def plain_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, margin: float, partitions: Partitions
) -> SoftmaxSums:
    """This rank's rows against the candidates of all ranks; the scores are held until the backward pass.

    `scale` [1] is one over the temperature, and `margin` is subtracted from the positive's similarity.
    """
    positive = _positive_scores(rows, scale, margin)
    loss, num_correct = positive.new_zeros(()), torch.zeros((), dtype=torch.int64, device=positive.device)
    row_losses = torch.zeros_like(positive)
    for directions in partitions:
        blocks = [rules.scores(direction, rows, candidates, scale) for direction in directions]
        maxima = [_row_max(block.detach()) for block in blocks]
        num_correct = _add_correct(num_correct, directions, maxima, rows)
        scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        # A row without negatives has loss 0; finite scores make its gradient 0 instead of NaN.
        no_negatives = torch.stack(maxima).amax(dim=0) == -torch.inf
        scores = scores.masked_fill_(no_negatives.unsqueeze(1), 0.0)
        lse = torch.logsumexp(scores, dim=1) if scores.shape[1] else torch.zeros_like(positive)
        terms = F.softplus((lse - positive).masked_fill(no_negatives, -torch.inf))
        loss = loss + terms.sum() / len(partitions)
        row_losses += terms.detach() / len(partitions)
    return SoftmaxSums(loss, num_correct, row_losses)


def tiled_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, margin: float, partitions: Partitions
) -> SoftmaxSums:
    """As `plain_softmax`, with a few rows of scores in memory at a time and the gradient computed at once."""
    sums = _Tiled.apply(  # type: ignore[no-untyped-call]
        rows.queries, rows.positives, candidates.documents, candidates.queries, scale,
        (rows, candidates, rules, margin, partitions),
    )  # fmt: skip
    return SoftmaxSums(*sums)


def ring_softmax(
    rows: Rows,
    candidates: Candidates,
    rules: ScoringRules,
    scale: Tensor,
    margin: float,
    partitions: Partitions,
    counts: Counts,
) -> SoftmaxSums:
    """As `tiled_softmax`, with only this rank's `candidates`; those of other ranks pass by. A collective."""
    sums = _Ring.apply(  # type: ignore[no-untyped-call]
        rows.queries, rows.positives, candidates.documents, candidates.queries, scale,
        (rows, candidates, rules, margin, partitions, counts),
    )  # fmt: skip
    return SoftmaxSums(*sums)


def _positive_scores(rows: Rows, scale: Tensor, margin: float) -> Tensor:
    """[B], with the margin subtracted; differentiable."""
    return ((rows.queries * rows.positives).sum(dim=1) - margin) * scale


def _row_max(scores: Tensor) -> Tensor:
    """The largest score of each row; -inf without candidates."""
    if scores.shape[1] == 0:  # torch has no maximum of an empty dimension
        return scores.new_full((len(scores),), -torch.inf)
    return scores.amax(dim=1)


def _add_correct(
    num_correct: Tensor, directions: Sequence[LossDirection], maxima: Sequence[Tensor], rows: Rows
) -> Tensor:
    """Add the rows whose positive beats all documents, in the partition that has that direction."""
    if LossDirection.query_document not in directions:
        return num_correct
    maximum = maxima[list(directions).index(LossDirection.query_document)]
    return num_correct + (maximum < rows.accuracy_thresholds).sum()


class _GradientInForward(torch.autograd.Function):
    """Inputs: queries, positives, documents, candidate queries or None, scale, and a tuple of everything else."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed."""
        computed, ctx.computed = ctx.computed, None
        assert computed is not None, "this loss has no second backward pass: its gradient is scaled in place"
        return *(None if grad is None else grad.mul_(grads[0]) for grad in computed), None


@dataclass(slots=True)
class _Gradients:
    """The gradient of the sum of the rows' losses, accumulated step by step."""

    queries: Tensor
    positives: Tensor
    documents: Tensor
    candidate_queries: Tensor | None
    scale: Tensor

    @classmethod
    def zeros(cls, rows: Rows, candidates: Candidates, scale: Tensor) -> "_Gradients":
        """Before the first step."""
        queries = candidates.queries
        return cls(
            torch.zeros_like(rows.queries),
            torch.zeros_like(rows.positives),
            torch.zeros_like(candidates.documents),
            None if queries is None else torch.zeros_like(queries),
            torch.zeros_like(scale),
        )

    def anchors(self, direction: LossDirection) -> Tensor:
        """The gradient that the anchors of a direction contribute to."""
        return self.queries if direction in QUERY_ANCHORS else self.positives

    def candidates(self, direction: LossDirection) -> Tensor:
        """The gradient that the candidates of a direction contribute to."""
        grads = self.candidate_queries if direction in QUERY_CANDIDATES else self.documents
        assert grads is not None
        return grads

    def finish(self, rows: Rows, sigma: Tensor, scale: Tensor, margin: float) -> tuple[Tensor | None, ...]:
        """Add the positives' part; `sigma` [B] is minus the derivative of the loss at the positive's score."""
        self.scale += ((rows.queries * self.queries).sum() + (rows.positives * self.positives).sum()) / scale
        self.scale -= (sigma * ((rows.queries * rows.positives).sum(dim=1) - margin)).sum()
        scaled = (sigma * scale).unsqueeze(1)
        self.queries.addcmul_(scaled, rows.positives, value=-1.0)
        self.positives.addcmul_(scaled, rows.queries, value=-1.0)
        return self.queries, self.positives, self.documents, self.candidate_queries, self.scale


class _TileBuffer:
    """Memory for tiles, reused: two tiles at a time would double it, and fresh pages cost time."""

    def __init__(self, rows: Rows, width: int) -> None:
        height = max(MIN_TILE_ROWS, TILE_CELLS // max(1, width))
        self.row_slices = [(start, min(start + height, len(rows))) for start in range(0, len(rows), height)]
        highest = max((end - start for start, end in self.row_slices), default=0)
        self._cells = rows.queries.new_empty(highest * width)

    def tiles(self, height: int, widths: Sequence[int]) -> list[Tensor]:
        """Adjacent tiles of these widths; their previous content is lost."""
        sizes = [height * width for width in widths]
        parts = self._cells[: sum(sizes)].split(sizes)
        return [part.view(height, width) for part, width in zip(parts, widths, strict=True)]


class _Tiled(_GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, float, Partitions],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, candidates, rules, margin, partitions = rest
        grads = _Gradients.zeros(rows, candidates, scale)
        positive = _positive_scores(rows, scale, margin)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        widths = [sum(len(candidates.of(direction)) for direction in directions) for directions in partitions]
        buffer = _TileBuffer(rows, max(widths))
        for start, end in buffer.row_slices:
            tile_rows, tile_positive = rows.slice(start, end), positive[start:end]
            for directions in partitions:
                tiles = buffer.tiles(end - start, [len(candidates.of(direction)) for direction in directions])
                for direction, tile in zip(directions, tiles, strict=True):
                    rules.scores(direction, tile_rows, candidates, scale, out=tile)
                maxima = [_row_max(tile) for tile in tiles]
                num_correct = _add_correct(num_correct, directions, maxima, tile_rows)
                maximum = torch.stack(maxima).amax(dim=0)
                offset = maximum.masked_fill(maximum == -torch.inf, 0.0)
                sum_exp = torch.zeros_like(offset)
                for tile in tiles:
                    sum_exp += tile.sub_(offset.unsqueeze(1)).exp_().sum(dim=1)
                gap = offset + sum_exp.log() - tile_positive  # -inf in a row without negatives, whose loss is 0
                terms = F.softplus(gap)
                loss += terms.sum() / len(partitions)
                row_losses[start:end] += terms / len(partitions)
                sigma = torch.sigmoid(gap) / len(partitions)
                sigma_sum[start:end] += sigma
                weights = (sigma / sum_exp).masked_fill_(sum_exp == 0, 0.0).mul_(scale).unsqueeze(1)
                for direction, tile in zip(directions, tiles, strict=True):
                    VectorScore.add_anchor_grads(
                        grads.anchors(direction)[start:end], tile, candidates.of(direction), weights
                    )
                    VectorScore.add_candidate_grads(
                        grads.candidates(direction), tile, tile_rows.anchors(direction), weights
                    )
        ctx.computed = grads.finish(rows, sigma_sum, scale, margin)
        ctx.mark_non_differentiable(num_correct, row_losses)
        return loss, num_correct, row_losses


class _Ring(_GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, float, Partitions, Counts],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, candidates, rules, margin, partitions, counts = rest
        grads = _Gradients.zeros(rows, candidates, scale)
        positive = _positive_scores(rows, scale, margin)
        softmaxes = [_OnlineSoftmax(rows, directions) for directions in partitions]
        for passing in _passing_candidates(candidates, counts):
            for softmax in softmaxes:
                softmax.add(rows, passing, rules, scale)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        row_weights = []
        for softmax in softmaxes:
            gap = softmax.logsumexp() - positive
            terms = F.softplus(gap)
            loss += terms.sum() / len(partitions)
            row_losses += terms / len(partitions)
            sigma = torch.sigmoid(gap) / len(partitions)
            sigma_sum += sigma
            weights = (sigma / softmax.sum_exp).masked_fill_(softmax.sum_exp == 0, 0.0).mul_(scale)
            for direction, weighted in zip(softmax.directions, softmax.weighted, strict=True):
                grads.anchors(direction).addcmul_(weighted, weights.unsqueeze(1))
            row_weights += [softmax.offset(), weights]
            num_correct = _add_correct(num_correct, softmax.directions, softmax.maxima, rows)
        for passing_rows, passing_weights in _passing_rows(rows, torch.stack(row_weights, dim=1), counts.queries):
            _add_candidate_grads(grads, passing_rows, passing_weights, candidates, rules, scale, partitions)
        ctx.computed = grads.finish(rows, sigma_sum, scale, margin)
        ctx.mark_non_differentiable(num_correct, row_losses)
        return loss, num_correct, row_losses


class _OnlineSoftmax:
    """Of one partition and each row: maximum, sum of exp(score - maximum), and that sum weighted by candidates."""

    def __init__(self, rows: Rows, directions: Sequence[LossDirection]) -> None:
        self.directions = directions
        self.maximum = torch.full_like(rows.accuracy_thresholds, -torch.inf)
        self.maxima = [self.maximum.clone() for _ in directions]  # of each direction
        self.sum_exp = torch.zeros_like(self.maximum)
        self.weighted = [torch.zeros_like(rows.queries) for _ in directions]

    def add(self, rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor) -> None:
        """Add further candidates."""
        for direction, weighted, direction_maximum in zip(self.directions, self.weighted, self.maxima, strict=True):
            columns = candidates.of(direction)
            buffer = _TileBuffer(rows, len(columns))
            for start, end in buffer.row_slices:
                (tile,) = buffer.tiles(end - start, [len(columns)])
                scores = rules.scores(direction, rows.slice(start, end), candidates, scale, out=tile)
                highest = _row_max(scores)
                direction_maximum[start:end] = torch.maximum(direction_maximum[start:end], highest)
                maximum = torch.maximum(self.maximum[start:end], highest)
                offset = maximum.masked_fill(maximum == -torch.inf, 0.0)
                rescale = (self.maximum[start:end] - offset).exp()
                scores.sub_(offset.unsqueeze(1)).exp_()
                self.maximum[start:end] = maximum
                self.sum_exp[start:end] = self.sum_exp[start:end] * rescale + scores.sum(dim=1)
                for weighted_sum in self.weighted:
                    weighted_sum[start:end] *= rescale.unsqueeze(1)
                weighted[start:end].addmm_(scores, columns)

    def offset(self) -> Tensor:
        """Subtracted from scores before their exp."""
        return self.maximum.masked_fill(self.maximum == -torch.inf, 0.0)

    def logsumexp(self) -> Tensor:
        """-inf for a row without negatives."""
        return self.offset() + self.sum_exp.log()


def _passing_candidates(local: Candidates, counts: Counts) -> Iterator[Candidates]:
    """Every rank's candidates, beginning with this rank's."""
    names = ["documents", "queries", "guide_documents", "guide_queries"]
    tensors = {name: getattr(local, name) for name in names if getattr(local, name) is not None}
    lengths = [counts.documents if name.endswith("documents") else counts.queries for name in tensors]
    for rank, received in ring(list(tensors.values()), lengths):
        yield Candidates(
            first_query=sum(counts.queries[:rank]),
            first_document=sum(counts.documents[:rank]),
            **dict(zip(tensors, received, strict=True)),
        )


def _passing_rows(local: Rows, weights: Tensor, counts: list[int]) -> Iterator[tuple[Rows, Tensor]]:
    """Every rank's rows with their weights, beginning with this rank's."""
    tensors = {name: value for name, value in local.tensors().items() if value is not None}
    for rank, received in ring([*tensors.values(), weights], [counts] * (len(tensors) + 1)):
        yield Rows(first=sum(counts[:rank]), **dict(zip(tensors, received[:-1], strict=True))), received[-1]


def _add_candidate_grads(
    grads: _Gradients,
    rows: Rows,
    row_weights: Tensor,
    local: Candidates,
    rules: ScoringRules,
    scale: Tensor,
    partitions: Partitions,
) -> None:
    """Add one rank's rows to the gradient of this rank's candidates.

    `row_weights` [c, 2 P] has, for each partition, the offset subtracted from scores and the factor of their exp.
    """
    for number, directions in enumerate(partitions):
        for direction in directions:
            buffer = _TileBuffer(rows, len(local.of(direction)))
            for start, end in buffer.row_slices:
                tile_rows = rows.slice(start, end)
                (tile,) = buffer.tiles(end - start, [len(local.of(direction))])
                scores = rules.scores(direction, tile_rows, local, scale, out=tile)
                offset, weights = row_weights[start:end, 2 * number : 2 * number + 2].unsqueeze(1).unbind(2)
                exp = scores.sub_(offset).exp_()
                VectorScore.add_candidate_grads(grads.candidates(direction), exp, tile_rows.anchors(direction), weights)
