"""XTR: a softmax over documents by the tokens that each token of a query retrieves from all documents of the batch.

Row a of a query retrieves the k rows of all documents with the largest inner products <q_a, d_b>; k' is the smallest of
these products. The score of a document is the mean, over the rows of the query that retrieve any of its rows, of the
largest product, and 0 if there are none:

    m_ad = max over rows b of d of <q_a, d_b>        s(q, d) = sum of m_ad where m_ad >= k'_a / number of such a

Since a row's largest product is retrieved first, MaxSim's maxima and k' are all that the score needs.

Q: rows of these queries; t: documents of all ranks; B, M: queries and documents of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Implementation, LossDirection, XTRConfig
from embedtrain.kinds.late_interaction.score import MaxSim, MaxSimTile, SortedDocuments, sorted_by_length, sum_by_text
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.excluded import ExcludedCandidates, ExcludingLoss, Exclusion
from embedtrain.losses.ring import Block, Reducer, Texts, gather_part, ring_statistics, uses_ring
from embedtrain.losses.score import Columns, Score, ScoreTile
from embedtrain.losses.similarity import Temperature, add_exp, finite, rounding_tolerance, row_max, row_slices
from embedtrain.losses.softmax import GradientInForward, SoftmaxSums
from embedtrain.losses.types import BatchInfo, EncodedLoss, GlobalRows, LossOutput

# Rows of queries in one tile: then a block of products is much wider than the k of them that are kept.
TILE_ROWS = 1024
# Maxima of one tile: 64 MiB of float32.
_TILE_CELLS = 1 << 24


class XTR(ExcludingLoss, EncodedLoss):
    """Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval" (2023).

    The loss of query i is -log softmax, at its positive, of the scores above, divided by a temperature, over the
    documents of all ranks. Tokens of excluded documents, such as duplicates of the positive, are retrieved as well.
    Products equal to the k-th largest are all retrieved; around a ring, where equal vectors are compared in blocks of
    their ranks, also those that differ by rounding. Logs `accuracy` and a trained `temperature`, as InfoNCE does.

    A rank holds the rows of all documents, or of one rank at a time, and a few of its queries' maxima.
    """

    def __init__(self, config: XTRConfig, score: Score | None = None) -> None:
        super().__init__()
        self.top_k, self.mask_duplicates = config.top_k, config.mask_duplicates
        self.implementation = config.implementation
        self.temperature = Temperature(
            config.temperature, trained=config.learn_temperature, bounds=config.temperature_bounds
        )

    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """See `ExcludingLoss`."""
        return Exclusion(
            directions=(LossDirection.query_document,),
            duplicates=self.mask_duplicates,
            ring=uses_ring(self.implementation, rows, width, dtype),
        )

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        with torch.autocast(queries.parts[0].values.device.type, enabled=False):  # it would round products to bf16
            return self._forward(queries, documents, batch_info)

    def _forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        score = MaxSim(mean=False)
        anchors, local, rows = score.prepare(queries), score.prepare(documents), batch_info.rows
        exclusion = self.exclusion(rows, local.values.shape[1], local.values.dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        scale, counts = self.temperature.scale(anchors.values), rows.counts
        compute = self._around_ring if exclusion.ring else self._gathered
        sums = compute(anchors, local, batch_info, excluded, scale)
        num_rows = max(1, sum(counts.queries))
        metrics = {"accuracy": sums.num_correct / num_rows}
        if self.temperature.log_scale is not None:
            metrics["temperature"] = 1.0 / (scale.detach().squeeze() * len(counts.queries))
        return LossOutput(sums.loss / num_rows, metrics, sums.row_losses / num_rows)

    def _gathered(
        self, anchors: Part, local: Part, batch_info: BatchInfo, excluded: ExcludedCandidates, scale: Tensor
    ) -> SoftmaxSums:
        rows = batch_info.rows
        columns = sorted_by_length(gather_part(local, rows.part_sizes.documents, rows.counts.documents))
        positives = batch_info.positives + rows.local_documents.start
        is_plain = self.implementation is Implementation.plain
        slices = _row_slices(anchors, len(columns), whole=is_plain)
        return SoftmaxSums(
            *_Softmax.apply(  # type: ignore[no-untyped-call]
                anchors.values,
                columns.values,
                scale,
                (anchors, columns, excluded, positives, rows.local_rows.start, self.top_k, slices),
            )
        )

    def _around_ring(
        self, anchors: Part, local: Part, batch_info: BatchInfo, excluded: ExcludedCandidates, scale: Tensor
    ) -> SoftmaxSums:
        rows, sizes = batch_info.rows, batch_info.rows.part_sizes
        assert sizes.documents is not None
        statistics = ring_statistics(
            _Statistics(excluded, min(self.top_k, max(1, int(sizes.documents.sum())))),
            Texts(rows.local_rows.start, (anchors.with_values(anchors.values * scale),)),
            Texts(rows.local_documents.start, (local,)),
            rows,
            ((sizes.queries,), (sizes.documents,)),
        )
        lse, positive = statistics.unbind(dim=1)[:2]
        highest, tolerance = statistics.detach()[:, 2], rounding_tolerance(anchors.values) * scale.detach()
        losses = F.softplus((lse - positive).masked_fill(highest == -torch.inf, -torch.inf))
        num_correct = (highest < positive.detach() - tolerance).sum()
        return SoftmaxSums(losses.sum(), num_correct, losses.detach())


class _XTRTile(MaxSimTile):
    """Scores of queries and all documents of the batch, or those whose rows of queries retrieve from `thresholds` on.

    `thresholds` [Q, 1] are the k-th largest products.
    """

    def __init__(self, anchors: Part, columns: SortedDocuments, top_k: int, thresholds: Tensor | None = None) -> None:
        super().__init__(anchors, columns)
        self.top_k, self.thresholds = top_k, thresholds
        self.highest = anchors.values.new_empty(len(anchors.values), 0)  # up to k products of each row

    def _visit(self, products: Tensor) -> None:
        if self.thresholds is not None:
            return
        highest = products.topk(min(self.top_k, products.shape[1]), dim=1, sorted=False).values
        highest = torch.cat([self.highest, highest], dim=1)
        self.highest = highest.topk(min(self.top_k, highest.shape[1]), dim=1, sorted=False).values

    def retrieve(self) -> None:
        """Compute `highest`."""
        self._best()

    def _sums(self) -> Tensor:
        best = self._best()
        if best.numel():
            thresholds = self.highest.amin(dim=1, keepdim=True) if self.thresholds is None else self.thresholds
            self.retrieved = best >= thresholds
        else:
            self.retrieved = torch.zeros_like(best, dtype=torch.bool)
        self.counts = sum_by_text(self.retrieved.to(best.dtype), self.anchors).clamp_(min=1)
        sums = sum_by_text(best.masked_fill_(~self.retrieved, 0.0), self.anchors)
        return self.columns.unsorted(sums / self.counts)

    def _cell_grads(self, tile_grads: Tensor, weights: Tensor) -> Tensor:
        cells = (tile_grads * weights)[:, self.columns.order] / self.counts
        rows = self.anchors.per_row(torch.arange(len(self.anchors), device=cells.device))
        return cells[rows].masked_fill_(~self.retrieved, 0.0)


class _Softmax(GradientInForward):
    """InfoNCE of a tile's scores, with the gradient computed at once; see `softmax` for the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        scale: Tensor,
        rest: tuple[Part, SortedDocuments, ExcludedCandidates, Tensor, int, int, list[tuple[int, int]]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors, columns, excluded, positives, first, top_k, slices = rest
        query_grads, document_grads = torch.zeros_like(queries), torch.zeros_like(documents)
        row_losses = queries.new_zeros(len(anchors))
        num_correct = torch.zeros((), dtype=torch.int64, device=queries.device)
        # Inner products of vectors of length 1, and so their means.
        tolerance = rounding_tolerance(queries) * scale
        for start, end in slices:
            rows, index = anchors.slice(start, end), positives[start:end].unsqueeze(1)
            tile = _XTRTile(rows, columns, top_k)
            scores = tile.scores(scale, queries.new_empty(end - start, len(columns)))
            positive = scores.gather(1, index).squeeze(1)
            scores = excluded.mask_scores(scores, LossDirection.query_document, first + start, 0)
            highest = row_max(scores)
            num_correct += (highest < positive - tolerance).sum()
            scores.sub_(finite(highest).unsqueeze(1)).exp_()
            sum_exp = scores.sum(dim=1)
            gap = highest + sum_exp.log() - positive  # -inf without negatives
            row_losses[start:end] = F.softplus(gap)
            sigma = torch.sigmoid(gap)
            grads = scores.mul_((sigma / sum_exp).masked_fill_(sum_exp == 0, 0.0).unsqueeze(1))
            grads.scatter_(1, index, -sigma.unsqueeze(1))
            weights = scale.expand(end - start).unsqueeze(1)
            tile.add_anchor_grads(anchors.with_values(query_grads).slice(start, end).values, grads, weights)
            tile.add_candidate_grads(document_grads, grads, weights)
        # The scores are homogeneous of degree 1 in each row of a query, as those of InfoNCE are.
        scale_grad = ((queries * query_grads).sum() / scale).expand_as(scale).clone()
        ctx.computed = query_grads, document_grads, scale_grad
        ctx.mark_non_differentiable(num_correct, row_losses)
        return row_losses.sum(), num_correct, row_losses


class _Statistics(Reducer):
    """Of each query: the logsumexp of its negatives' scores, its positive's score, and the largest of the negatives'.

    First the rows of queries retrieve, then documents are scored.
    """

    num_passes = 2

    def __init__(self, excluded: ExcludedCandidates, top_k: int) -> None:
        self.excluded, self.top_k = excluded, top_k

    def columns(self, parts: Sequence[Part]) -> tuple[Columns, ...]:
        """The documents, sorted by length."""
        return tuple(map(sorted_by_length, parts))

    def slices(self, rows: Texts, num_candidates: int) -> list[tuple[int, int]]:
        """As without the ring."""
        return _row_slices(rows.parts[0], num_candidates)

    def start(self, rows: Texts) -> tuple[Part, ...]:
        """The k largest products of each row [Q, k]; the largest score, the sum of exp, and the positive's score."""
        (anchors,) = rows.parts
        products = anchors.values.new_full((len(anchors.values), self.top_k), -torch.inf)
        values = anchors.values.new_full((len(rows), 3), -torch.inf)
        values[:, 1] = 0
        return anchors.with_values(products), Part(values)

    def collect(self, number: int, rows: Texts, known: Sequence[Part], block: Block) -> None:
        """Retrieve, then score."""
        products = known[0].values
        if number == 0:
            tile = self._tile(rows, block)
            tile.retrieve()
            products.copy_(torch.cat([products, tile.highest], dim=1).topk(self.top_k, dim=1).values)
            return
        _tile, scores, positive = self._scores(rows, _thresholds(products), block)
        maximum, sum_exp, own = known[1].values.unbind(dim=1)
        own.copy_(torch.maximum(own, positive))
        add_exp(maximum, sum_exp, scores)

    def finish(self, known: Sequence[Part]) -> tuple[Tensor, tuple[Part, ...]]:
        """The logsumexp is 0 without negatives."""
        maximum, sum_exp, positive = known[1].values.unbind(dim=1)
        lse = finite(maximum + sum_exp.log())
        kept = known[0].with_values(_thresholds(known[0].values)), Part(lse.unsqueeze(1))
        return torch.stack([lse, positive, maximum], dim=1), kept

    def derivatives(
        self, rows: Texts, kept: Sequence[Part], upstream: Tensor, block: Block
    ) -> list[tuple[ScoreTile, Tensor, Tensor]]:
        """The softmax of the negatives, and the positive."""
        tile, scores, _positive = self._scores(rows, kept[0].values, block)
        grads = scores.sub_(kept[1].values).exp_().mul_(upstream[:, :1])
        index, is_own = self.own_column(self.excluded.positives, rows, block)
        grads.scatter_add_(1, index, torch.where(is_own, upstream[:, 1:2], 0.0))
        return [(tile, grads, torch.ones_like(upstream[:, :1]))]

    def _scores(self, rows: Texts, thresholds: Tensor, block: Block) -> tuple[ScoreTile, Tensor, Tensor]:
        """The tile, its scores [c, t], -inf where a document is no negative, and those of positives among them [c]."""
        tile = self._tile(rows, block, thresholds)
        one, empty = thresholds.new_ones(1), thresholds.new_empty(len(rows), len(block))
        scores = tile.scores(one, empty)
        index, is_own = self.own_column(self.excluded.positives, rows, block)
        positive = torch.where(is_own, scores.gather(1, index), -torch.inf).squeeze(1)
        return tile, self.excluded.mask_scores(scores, LossDirection.query_document, rows.first, block.first), positive

    def _tile(self, rows: Texts, block: Block, thresholds: Tensor | None = None) -> _XTRTile:
        (columns,) = block.columns
        assert isinstance(columns, SortedDocuments)
        return _XTRTile(rows.parts[0], columns, self.top_k, thresholds)


def _thresholds(products: Tensor) -> Tensor:
    """The k-th largest products, [Q, 1], less their rounding error: equal vectors of two ranks are retrieved alike."""
    smallest, largest = products.amin(dim=1, keepdim=True), products.abs().amax(dim=1, keepdim=True)
    return smallest - rounding_tolerance(products) * largest.masked_fill(largest == torch.inf, 0.0)


def _row_slices(anchors: Part, num_columns: int, *, whole: bool = False) -> list[tuple[int, int]]:
    rows = min(TILE_ROWS, _TILE_CELLS // max(1, num_columns))
    height = max(1, len(anchors) if whole else rows // anchors.max_size)
    return row_slices(len(anchors), height)
