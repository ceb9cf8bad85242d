"""The softmax of InfoNCE for batches whose candidates no rank could hold: they travel around the ranks.

While they pass, each row keeps its largest score, the sum of exp(z_ij) and the gradient of that sum online, as in flash
attention (Dao et al., 2022) with candidates for keys and values. Then the rows travel, and every rank adds up the
gradient of its own candidates. Communication overlaps with computation, and gradients never travel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.loss_choices import LossDirection
from embedtrain.distributed.collectives import ring
from embedtrain.losses.encoded import Part
from embedtrain.losses.scores import Candidates, Rows, ScoringRules
from embedtrain.losses.softmax import (
    GradientInForward,
    Gradients,
    Partitions,
    SoftmaxSums,
    TileBuffer,
    add_correct,
    differentiable,
    focal_weights,
    row_max,
)
from embedtrain.losses.types import GlobalRows, rows_per_rank


def ring_softmax(
    rows: Rows,
    candidates: Candidates,
    rules: ScoringRules,
    scale: Tensor,
    positive: Tensor,
    partitions: Partitions,
    texts: tuple[Part, Part | None],
    global_rows: GlobalRows,
) -> SoftmaxSums:
    """As `tiled_softmax`, with only this rank's `candidates`; those of other ranks pass by. A collective.

    `texts` are the prepared documents of this rank, and its queries if a direction compares rows with them.
    """
    sums = _Ring.apply(  # type: ignore[no-untyped-call]
        *differentiable(rows, candidates, scale, positive),
        (rows, candidates, rules, partitions, texts, global_rows),
    )
    return SoftmaxSums(*sums)


class _Ring(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor | None,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        positive: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, Partitions, tuple[Part, Part | None], GlobalRows],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, candidates, rules, partitions, texts, global_rows = rest
        grads = Gradients.zeros(rows, candidates)
        softmaxes = [_OnlineSoftmax(rows, directions) for directions in partitions]
        for passing in _passing_candidates(candidates, rules, texts, global_rows):
            for softmax in softmaxes:
                softmax.add(rows, passing, rules, scale)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        row_weights, weight = [], torch.zeros_like(positive)
        for softmax in softmaxes:
            gap = softmax.logsumexp() - positive
            weight = focal_weights(gap, rules.focal, rows.mixed_losses)
            terms = F.softplus(gap) * weight
            loss += terms.sum() / len(partitions)
            row_losses += terms / len(partitions)
            sigma = torch.sigmoid(gap) * weight / len(partitions)
            sigma_sum += sigma
            weights = (sigma / softmax.sum_exp).masked_fill_(softmax.sum_exp == 0, 0.0).mul_(scale)
            for direction, exp_grads in zip(softmax.directions, softmax.exp_grads, strict=True):
                weights_of_rows = rows.anchors(direction).per_row(weights)
                grads.anchors(direction).addcmul_(exp_grads, weights_of_rows.unsqueeze(1))
            row_weights += [softmax.offset(), weights]
            num_correct = add_correct(num_correct, softmax.directions, softmax.maxima, rows)
        for passing_rows, passing_weights in _passing_rows(rows, torch.stack(row_weights, dim=1), global_rows):
            _add_candidate_grads(grads, passing_rows, passing_weights, candidates, rules, scale, partitions)
        ctx.computed = grads.finish(rows, sigma_sum, scale)
        ctx.mark_non_differentiable(num_correct, row_losses, weight)
        return loss, num_correct, row_losses, weight


class _OnlineSoftmax:
    """Of one partition and each row: maximum, sum of exp(score - maximum), and the gradient of that sum."""

    def __init__(self, rows: Rows, directions: Sequence[LossDirection]) -> None:
        self.directions = directions
        self.maximum = torch.full_like(rows.accuracy_thresholds, -torch.inf)
        self.maxima = [self.maximum.clone() for _ in directions]  # of each direction
        self.sum_exp = torch.zeros_like(self.maximum)
        self.exp_grads = [torch.zeros_like(rows.anchors(direction).values) for direction in directions]

    def add(self, rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor) -> None:
        """Add further candidates."""
        for number, direction in enumerate(self.directions):
            columns, anchors = candidates.of(direction), rows.anchors(direction)
            buffer = TileBuffer(rows, len(columns))
            for start, end in buffer.row_slices:
                (cells,) = buffer.tiles(end - start, [len(columns)])
                tile_rows = rows.slice(start, end)
                tile = rules.tile(direction, tile_rows, candidates)
                scores = rules.scores(tile, direction, tile_rows, candidates, scale, out=cells)
                highest = row_max(scores)
                self.maxima[number][start:end] = torch.maximum(self.maxima[number][start:end], highest)
                maximum = torch.maximum(self.maximum[start:end], highest)
                offset = maximum.masked_fill(maximum == -torch.inf, 0.0)
                rescale = (self.maximum[start:end] - offset).exp()
                scores.sub_(offset.unsqueeze(1)).exp_()
                self.maximum[start:end] = maximum
                self.sum_exp[start:end] = self.sum_exp[start:end] * rescale + scores.sum(dim=1)
                for exp_grads, of in zip(self.exp_grads, self.directions, strict=True):
                    part = rows.anchors(of).with_values(exp_grads).slice(start, end)
                    part.values.mul_(part.per_row(rescale).unsqueeze(1))
                grads = anchors.with_values(self.exp_grads[number]).slice(start, end).values
                tile.add_anchor_grads(grads, scores, torch.ones_like(offset).unsqueeze(1))

    def offset(self) -> Tensor:
        """Subtracted from scores before their exp."""
        return self.maximum.masked_fill(self.maximum == -torch.inf, 0.0)

    def logsumexp(self) -> Tensor:
        """-inf for a row without negatives."""
        return self.offset() + self.sum_exp.log()


def _passing_candidates(
    local: Candidates, rules: ScoringRules, texts: tuple[Part, Part | None], global_rows: GlobalRows
) -> Iterator[Candidates]:
    """Every rank's candidates, beginning with this rank's."""
    documents, queries = texts
    counts, sizes = global_rows.counts, global_rows.part_sizes
    tensors, lengths = [documents.values], [rows_per_rank(sizes.documents, counts.documents)]
    if queries is not None:
        tensors.append(queries.values)
        lengths.append(rows_per_rank(sizes.queries, counts.queries))
    guides = {"guide_documents": counts.documents, "guide_queries": counts.queries}
    names = [name for name in guides if getattr(local, name) is not None]
    tensors += [getattr(local, name) for name in names]
    lengths += [guides[name] for name in names]
    for rank, received in ring(tensors, lengths):
        values = list(received)
        first = sum(counts.queries[:rank]), sum(counts.documents[:rank])
        passing = Part(values.pop(0), _of_rank(sizes.documents, counts.documents, rank))
        passing_queries = None
        if queries is not None:
            passing_queries = rules.score.columns(Part(values.pop(0), _of_rank(sizes.queries, counts.queries, rank)))
        yield Candidates(
            first_query=first[0],
            first_document=first[1],
            documents=rules.score.columns(passing),
            queries=passing_queries,
            **dict(zip(names, values, strict=True)),
        )


def _passing_rows(local: Rows, weights: Tensor, global_rows: GlobalRows) -> Iterator[tuple[Rows, Tensor]]:
    """Every rank's rows with their weights, beginning with this rank's."""
    counts, sizes = global_rows.counts.queries, global_rows.part_sizes
    tensors, lengths = [weights, local.queries.values], [counts, rows_per_rank(sizes.queries, counts)]
    if local.positives is not None:
        tensors.append(local.positives.values)  # one row each: only vectors are compared with queries
        lengths.append(counts)
    others = {name: value for name, value in local.tensors().items() if value is not None}
    for rank, received in ring([*tensors, *others.values()], [*lengths, *[counts] * len(others)]):
        values = list(received)
        passing_weights, queries = values.pop(0), Part(values.pop(0), _of_rank(sizes.queries, counts, rank))
        positives = None if local.positives is None else Part(values.pop(0))
        named = dict(zip(others, values, strict=True))
        yield Rows(first=sum(counts[:rank]), queries=queries, positives=positives, **named), passing_weights


def _add_candidate_grads(
    grads: Gradients,
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
            buffer = TileBuffer(rows, len(local.of(direction)))
            for start, end in buffer.row_slices:
                tile_rows = rows.slice(start, end)
                (cells,) = buffer.tiles(end - start, [len(local.of(direction))])
                tile = rules.tile(direction, tile_rows, local)
                scores = rules.scores(tile, direction, tile_rows, local, scale, out=cells)
                offset, weights = row_weights[start:end, 2 * number : 2 * number + 2].unsqueeze(1).unbind(2)
                tile.add_candidate_grads(grads.candidates(direction), scores.sub_(offset).exp_(), weights)


def _of_rank(sizes: NDArray[np.int64] | None, counts: Sequence[int], rank: int) -> NDArray[np.int64] | None:
    first = sum(counts[:rank])
    return None if sizes is None else sizes[first : first + counts[rank]]
