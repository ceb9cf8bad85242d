"""XTR: a softmax over documents by the tokens that each token of a query retrieves from all documents of the batch.

Row a of a query retrieves the k rows of all documents with the largest inner products <q_a, d_b>; k' is the smallest of
these products. The score of a document is the mean, over the rows of the query that retrieve any of its rows, of the
largest product, and 0 if there are none:

    m_ad = max over rows b of d of <q_a, d_b>        s(q, d) = sum of m_ad where m_ad >= k'_a / number of such a

Since a row's largest product is retrieved first, MaxSim's maxima and k' are all that the score needs.

Q: rows of these queries; t: documents of all ranks; B, M: queries and documents of this rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.loss_choices import LossDirection
from embedtrain.config.losses import XTRConfig
from embedtrain.distributed.collectives import gather_rows
from embedtrain.kinds.late_interaction.score import MaxSim, MaxSimTile, SortedDocuments, sorted_by_length, sum_by_text
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.excluded import ExcludedCandidates, ExcludingLoss, Exclusion
from embedtrain.losses.score import Score
from embedtrain.losses.similarity import Temperature, rounding_tolerance
from embedtrain.losses.softmax import GradientInForward, SoftmaxSums, row_max
from embedtrain.losses.types import BatchInfo, LossOutput, rows_per_rank

# Rows of queries in one tile: then a block of products is much wider than the k of them that are kept.
TILE_ROWS = 1024
# Maxima of one tile: 64 MiB of float32.
_TILE_CELLS = 1 << 24


class XTR(ExcludingLoss):
    """Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval" (2023).

    The loss of query i is -log softmax, at its positive, of the scores above, divided by a temperature, over the
    documents of all ranks. Tokens of excluded documents, such as duplicates of the positive, are retrieved as well.
    Products equal to the k-th largest are all retrieved. Logs `accuracy` and a trained `temperature`, as InfoNCE does.

    A rank holds the rows of all documents, and a few of its queries' maxima at a time.
    """

    def __init__(self, config: XTRConfig, score: Score | None = None) -> None:
        super().__init__(Exclusion(directions=(LossDirection.query_document,), duplicates=config.mask_duplicates))
        self.top_k = config.top_k
        self.temperature = Temperature(
            config.temperature, trained=config.learn_temperature, bounds=config.temperature_bounds
        )

    def compute(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        score = MaxSim(mean=False)
        anchors, local, rows = score.prepare(queries), score.prepare(documents), batch_info.rows
        sizes, counts = rows.part_sizes.documents, rows.counts
        gathered = Part(gather_rows(local.values, rows_per_rank(sizes, counts.documents)), sizes)
        columns = sorted_by_length(gathered)
        excluded = ExcludedCandidates.of(self.exclusion, batch_info)
        scale = self.temperature.scale(anchors.values)
        positives = batch_info.positives + rows.local_documents.start
        sums = SoftmaxSums(
            *_Softmax.apply(  # type: ignore[no-untyped-call]
                anchors.values,
                columns.values,
                scale,
                (anchors, columns, excluded, positives, rows.local_rows.start, self.top_k),
            )
        )
        num_rows = max(1, sum(counts.queries))
        metrics = {"accuracy": sums.num_correct / num_rows}
        if self.temperature.log_scale is not None:
            metrics["temperature"] = 1.0 / (scale.detach().squeeze() * len(counts.queries))
        return LossOutput(sums.loss / num_rows, metrics, sums.row_losses / num_rows)


class _XTRTile(MaxSimTile):
    """Scores of queries and all documents of the batch."""

    def __init__(self, anchors: Part, columns: SortedDocuments, top_k: int) -> None:
        super().__init__(anchors, columns)
        self.top_k = top_k
        self.highest = anchors.values.new_empty(len(anchors.values), 0)  # up to k products of each row

    def _visit(self, products: Tensor) -> None:
        highest = products.topk(min(self.top_k, products.shape[1]), dim=1, sorted=False).values
        highest = torch.cat([self.highest, highest], dim=1)
        self.highest = highest.topk(min(self.top_k, highest.shape[1]), dim=1, sorted=False).values

    def _sums(self) -> Tensor:
        best = self._best()
        if best.numel():
            self.retrieved = best >= self.highest.amin(dim=1, keepdim=True)
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
        rest: tuple[Part, SortedDocuments, ExcludedCandidates, Tensor, int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors, columns, excluded, positives, first, top_k = rest
        query_grads, document_grads = torch.zeros_like(queries), torch.zeros_like(documents)
        row_losses = queries.new_zeros(len(anchors))
        num_correct = torch.zeros((), dtype=torch.int64, device=queries.device)
        # Inner products of vectors of length 1, and so their means.
        tolerance = rounding_tolerance(queries) * scale
        for start, end in _row_slices(anchors, len(columns)):
            rows, index = anchors.slice(start, end), positives[start:end].unsqueeze(1)
            tile = _XTRTile(rows, columns, top_k)
            scores = tile.scores(scale, queries.new_empty(end - start, len(columns)))
            positive = scores.gather(1, index).squeeze(1)
            scores = excluded.mask_scores(scores, LossDirection.query_document, first + start, 0)
            highest = row_max(scores)
            num_correct += (highest < positive - tolerance).sum()
            scores.sub_(highest.masked_fill(highest == -torch.inf, 0.0).unsqueeze(1)).exp_()
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


def _row_slices(anchors: Part, num_columns: int) -> list[tuple[int, int]]:
    rows = min(TILE_ROWS, _TILE_CELLS // max(1, num_columns))
    height = max(1, rows // anchors.max_size)
    return [(start, min(start + height, len(anchors))) for start in range(0, len(anchors), height)]
