"""InfoNCE over given candidates: all scores at a time, or a few rows' (a rank's at a time: see `ring`).

For row i with positive score z_ip and negatives z_ij = scale * <a_i, c_j>, in each partition of its directions:

    gap_i = logsumexp_j z_ij - z_ip        loss_i = softplus(gap_i)        sigma_i = sigmoid(gap_i)
    dloss_i/dz_ij = exp(z_ij - z_ip - loss_i) = sigma_i * softmax_j(z_ij)        dloss_i/dz_ip = -sigma_i

the softplus form of -log softmax, in which nothing cancels when losses are small. `plain` holds all scores
and leaves the gradient to autograd. `tiled` computes the gradient in the forward pass, a few rows of scores at
a time: a row's logsumexp is final at once, so its scores become its gradient in place and nothing is computed
twice; the backward pass only scales it. The scale's gradient needs no scores: z is linear in it,
so it is sum_i <a_i, da_i> / scale (Euler).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.losses.scores import QUERY_ANCHORS, QUERY_CANDIDATES, Candidates, Rows, Rules, widest

# Scores held at a time: 64 MiB of fp32. Fewer rows at a time would read and write the candidates' gradient more often.
TILE_CELLS = 1 << 24
LEAST_ROWS = 64

Partitions = Sequence[Sequence[LossDirection]]


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Sums over this rank's rows: the loss (with its gradient), and rows whose positive beats every negative."""

    loss: Tensor
    right: Tensor


def plain(
    rows: Rows, candidates: Candidates, rules: Rules, scale: Tensor, margin: float, parts: Partitions
) -> RowLosses:
    """Rows' tensors and candidates' have their gradients; the matrix of scores is held until the backward pass."""
    positive = positive_scores(rows, scale, margin)
    loss, right = positive.new_zeros(()), torch.zeros((), dtype=torch.int64, device=positive.device)
    for directions in parts:
        blocks = [rules.scores(side, rows, candidates, scale) for side in directions]
        tops = [row_maximum(block.detach()) for block in blocks]
        right = count_right(right, directions, tops, rows)
        scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        # A row without any negative has loss 0; its scores become finite so that its gradient is 0, not NaN.
        alone = torch.stack(tops).amax(dim=0) == -torch.inf
        scores[alone] = 0.0
        lse = torch.logsumexp(scores, dim=1) if scores.shape[1] else torch.zeros_like(positive)
        loss = loss + F.softplus((lse - positive).masked_fill(alone, -torch.inf)).sum() / len(parts)
    return RowLosses(loss, right)


def count_right(right: Tensor, directions: Sequence[LossDirection], tops: Sequence[Tensor], rows: Rows) -> Tensor:
    """Plus the rows whose positive beats all documents, once that side comes along."""
    if LossDirection.query_document not in directions:
        return right
    return right + (tops[list(directions).index(LossDirection.query_document)] < rows.beaten_from).sum()


def positive_scores(rows: Rows, scale: Tensor, margin: float) -> Tensor:
    """Of each row [B], the margin taken off; differentiable."""
    return ((rows.queries * rows.positives).sum(dim=1) - margin) * scale


def tiled(
    rows: Rows, candidates: Candidates, rules: Rules, scale: Tensor, margin: float, parts: Partitions
) -> RowLosses:
    """The same with a few rows' scores in memory at a time, and the gradient at once."""
    loss, right = _Tiled.apply(  # type: ignore[no-untyped-call]
        rows.queries,
        rows.positives,
        candidates.documents,
        candidates.queries,
        scale,
        (rows, candidates, rules, margin, parts),
    )
    return RowLosses(loss, right)


class GradientAtOnce(torch.autograd.Function):
    """Inputs: queries, positives, documents, candidate queries or None, scale, and the rest in a tuple."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed."""
        ready, ctx.ready = ctx.ready, None
        assert ready is not None, "this loss has no second backward pass: its gradient is scaled in place"
        return *(None if part is None else part.mul_(grads[0]) for part in ready), None


@dataclass(slots=True)
class Gradients:
    """Of the sum of the rows' losses, filled in step by step."""

    queries: Tensor
    positives: Tensor
    documents: Tensor
    candidate_queries: Tensor | None
    scale: Tensor

    @classmethod
    def zeros(cls, rows: Rows, candidates: Candidates, scale: Tensor) -> "Gradients":
        """None of them yet."""
        queries = candidates.queries
        return cls(
            torch.zeros_like(rows.queries),
            torch.zeros_like(rows.positives),
            torch.zeros_like(candidates.documents),
            None if queries is None else torch.zeros_like(queries),
            torch.zeros_like(scale),
        )

    def anchors(self, side: LossDirection) -> Tensor:
        """Where the gradient of a side's anchors belongs."""
        return self.queries if side in QUERY_ANCHORS else self.positives

    def of(self, side: LossDirection) -> Tensor:
        """Where the gradient of a side's candidates belongs."""
        chosen = self.candidate_queries if side in QUERY_CANDIDATES else self.documents
        assert chosen is not None
        return chosen

    def finish(self, rows: Rows, pull: Tensor, scale: Tensor, margin: float) -> tuple[Tensor | None, ...]:
        """Add the positives' part; `pull` [B] is minus the loss's derivative at the positive's score."""
        self.scale += ((rows.queries * self.queries).sum() + (rows.positives * self.positives).sum()) / scale
        self.scale -= (pull * ((rows.queries * rows.positives).sum(dim=1) - margin)).sum()
        pulled = (pull * scale).unsqueeze(1)
        self.queries.addcmul_(pulled, rows.positives, value=-1.0)
        self.positives.addcmul_(pulled, rows.queries, value=-1.0)
        return self.queries, self.positives, self.documents, self.candidate_queries, self.scale


def anchors_of(side: LossDirection, rows: Rows) -> Tensor:
    """What a side compares with its candidates."""
    return rows.queries if side in QUERY_ANCHORS else rows.positives


def _pieces(rows: Rows, width: int) -> list[tuple[int, int]]:
    """Stretches of rows whose scores fit."""
    height = max(LEAST_ROWS, TILE_CELLS // max(1, width))
    return [(start, min(start + height, len(rows))) for start in range(0, len(rows), height)]


class Space:
    """Memory for tiles, used again and again: two at a time would be twice as much, and fresh pages cost time."""

    def __init__(self, rows: Rows, width: int) -> None:
        self.pieces = _pieces(rows, width)
        self.cells = rows.queries.new_empty(max((end - start for start, end in self.pieces), default=0) * width)

    def tiles(self, height: int, widths: Sequence[int]) -> list[Tensor]:
        """Side by side, one of each width; what they held before is lost."""
        sizes = [height * width for width in widths]
        parts = self.cells[: sum(sizes)].split(sizes)
        return [part.view(height, width) for part, width in zip(parts, widths, strict=True)]


class _Tiled(GradientAtOnce):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        rest: tuple[Rows, Candidates, Rules, float, Partitions],
    ) -> tuple[Tensor, Tensor]:
        rows, candidates, rules, margin, parts = rest
        found = Gradients.zeros(rows, candidates, scale)
        positive = positive_scores(rows, scale, margin)
        pull, loss = torch.zeros_like(positive), positive.new_zeros(())
        right = torch.zeros((), dtype=torch.int64, device=positive.device)
        space = Space(rows, max(widest(directions, candidates) for directions in parts))
        for start, end in space.pieces:
            these, score = rows.part(start, end), positive[start:end]
            for directions in parts:
                tiles = space.tiles(end - start, [len(candidates.of(side)) for side in directions])
                for side, tile in zip(directions, tiles, strict=True):
                    rules.scores(side, these, candidates, scale, out=tile)
                tops = [row_maximum(tile) for tile in tiles]
                right = count_right(right, directions, tops, these)
                hardest = torch.stack(tops).amax(dim=0)
                top = hardest.masked_fill(hardest == -torch.inf, 0.0)
                mass = torch.zeros_like(top)
                for tile in tiles:
                    mass += tile.sub_(top.unsqueeze(1)).exp_().sum(dim=1)
                gap = top + mass.log() - score  # -inf in a row without negatives, whose loss is 0
                loss += F.softplus(gap).sum() / len(parts)
                slope = torch.sigmoid(gap) / len(parts)
                pull[start:end] += slope
                each = (slope / mass).masked_fill_(mass == 0, 0.0).mul_(scale).unsqueeze(1)
                for side, tile in zip(directions, tiles, strict=True):
                    found.anchors(side)[start:end].addcmul_(tile @ candidates.of(side), each)
                    found.of(side).addmm_(tile.T, anchors_of(side, these) * each)
        ctx.ready = found.finish(rows, pull, scale, margin)
        ctx.mark_non_differentiable(right)
        return loss, right


def row_maximum(scores: Tensor) -> Tensor:
    """The largest score of each row; -inf where there are none."""
    if scores.shape[1] == 0:  # torch has no maximum of nothing
        return scores.new_full((len(scores),), -torch.inf)
    return scores.amax(dim=1)
