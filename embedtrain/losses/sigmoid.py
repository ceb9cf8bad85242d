"""SigLIP: a binary classification of every pair of a query and a document of the global batch.

B, M: queries and documents of this rank; N, K: of all ranks; b: queries of one chunk; D: dimensions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embedtrain.config.losses import (
    SIGLIP_BIAS,
    SIGLIP_TEMPERATURE,
    VECTOR_TEMPERATURE_BOUNDS,
    Implementation,
    LossDirection,
    SigLIPConfig,
    Similarity,
)
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.encoded import Part
from embedtrain.losses.excluded import ExcludedCandidates, ExcludingLoss, Exclusion
from embedtrain.losses.ring import Block, Reducer, Texts, ring_statistics, uses_ring
from embedtrain.losses.score import Columns, ScoreTile, VectorScore
from embedtrain.losses.similarity import (
    Temperature,
    at_least_float32,
    inner_products,
    row_max,
    row_slices,
    rows_per_chunk,
)
from embedtrain.losses.types import BatchInfo, GlobalRows, LossOutput

# Matrices [b, K] that live at a time in the backward pass of a chunk.
_LIVE_MATRICES = 4


class SigLIP(ExcludingLoss):
    """Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (ICCV 2023).

    For each query the sum over all K documents of -log sigmoid(y (similarity / temperature + bias)), y = 1 at
    its positive and -1 elsewhere; the mean over all queries. The documents of all ranks are gathered with their
    gradient, or travel around a ring of ranks; each rank computes its own queries, a chunk at a time, and recomputes a
    chunk's [b, K] in the backward pass. Logs `accuracy`, the fraction of queries whose positive is more similar than
    any other document, `temperature` and `bias`.
    """

    def __init__(self, config: SigLIPConfig) -> None:
        super().__init__()
        self.config = config
        self.similarity = config.similarity or Similarity.cosine
        self.implementation, self.mask_duplicates = config.implementation, config.mask_duplicates
        self.temperature = Temperature(
            SIGLIP_TEMPERATURE if config.temperature is None else config.temperature,
            trained=config.learn_temperature,
            bounds=config.temperature_bounds or VECTOR_TEMPERATURE_BOUNDS,
        )
        self.fixed_bias = SIGLIP_BIAS if config.bias is None else config.bias
        self.bias = nn.Parameter(torch.tensor([self.fixed_bias])) if config.learn_bias else None
        self.followed_bias: Tensor | None = None  # in place of a fixed one: of one element, read in every batch

    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """See `ExcludingLoss`."""
        return Exclusion(
            directions=(LossDirection.query_document,),
            duplicates=self.mask_duplicates,
            ring=uses_ring(self.implementation, rows, width, dtype),
        )

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's loss."""
        queries, documents = at_least_float32(queries), at_least_float32(documents)
        if self.similarity is Similarity.cosine:
            queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
        counts = batch_info.rows.counts
        exclusion = self.exclusion(batch_info.rows, documents.shape[1], documents.dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        scale = self.temperature.scale(queries)
        own = self.followed_bias if self.bias is None else self.bias
        bias = queries.new_full((1,), self.fixed_bias) if own is None else own.reshape(1).to(queries.dtype)
        compute = self._around_ring if exclusion.ring else self._gathered
        loss, num_correct, row_losses = compute(queries, documents, batch_info, excluded, scale, bias)
        num_queries, num_ranks = max(1, sum(counts.queries)), len(counts.queries)
        metrics = {
            "accuracy": num_correct / num_queries,
            "temperature": 1 / scale.detach().squeeze() / num_ranks,
            "bias": bias.detach().squeeze() / num_ranks,
        }
        return LossOutput(loss / num_queries, metrics, row_losses / num_queries)

    def _gathered(
        self,
        queries: Tensor,
        documents: Tensor,
        batch_info: BatchInfo,
        excluded: ExcludedCandidates,
        scale: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of the losses of this rank's queries, the number of correct ones, and the losses [B]."""
        all_documents = gather_rows(documents, batch_info.rows.counts.documents)
        positives, first = (
            batch_info.positives + batch_info.rows.local_documents.start,
            batch_info.rows.local_rows.start,
        )
        # The zero term connects a rank without queries to the gather, whose backward pass needs every rank, and to
        # the parameters.
        loss = 0.0 * (all_documents.sum() + scale.sum() + bias.sum())
        num_correct = torch.zeros((), dtype=torch.int64, device=queries.device)
        row_losses = []
        size = rows_per_chunk(len(all_documents) * _LIVE_MATRICES, queries.dtype)
        if self.implementation is Implementation.plain:
            size = max(1, len(queries))
        for start in range(0, len(queries), size):
            part = slice(start, start + size)
            chunk_losses, chunk_correct = checkpoint(
                _chunk,
                *(first + start, queries[part], positives[part], all_documents, scale, bias, excluded),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            loss, num_correct = loss + chunk_losses.sum(), num_correct + chunk_correct
            row_losses.append(chunk_losses.detach())
        return loss, num_correct, torch.cat([queries.detach().new_zeros(0), *row_losses])

    def _around_ring(
        self,
        queries: Tensor,
        documents: Tensor,
        batch_info: BatchInfo,
        excluded: ExcludedCandidates,
        scale: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `_gathered`, with the documents of one other rank at a time."""
        rows = batch_info.rows
        # The bias is one more dimension.
        scaled = torch.cat([queries * scale, bias.expand(len(queries), 1)], dim=1)
        columns = torch.cat([documents, documents.new_ones(len(documents), 1)], dim=1)
        with torch.autocast(queries.device.type, enabled=False):
            statistics = ring_statistics(
                _NegativeLosses(excluded),
                Texts(rows.local_rows.start, (Part(scaled),)),
                Texts(rows.local_documents.start, (Part(columns),)),
                rows,
                ((None,), (None,)),
            )
        of_negatives, highest, positive = statistics.unbind(dim=1)
        positive_logits = (scaled * columns[batch_info.positives]).sum(dim=1)
        losses = of_negatives - F.logsigmoid(positive_logits)
        return losses.sum(), (highest.detach() < positive.detach()).sum(), losses.detach()


class _NegativeLosses(Reducer):
    """Of each query: the sum of its losses at negatives, differentiable, and the largest logits of both kinds."""

    def __init__(self, excluded: ExcludedCandidates) -> None:
        self.excluded, self.score = excluded, VectorScore(Similarity.dot)

    def columns(self, parts: Sequence[Part]) -> tuple[Columns, ...]:
        """The documents as they are."""
        return tuple(parts)

    def slices(self, rows: Texts, num_candidates: int) -> list[tuple[int, int]]:
        """See `_chunk`."""
        size = rows_per_chunk(num_candidates * _LIVE_MATRICES, rows.parts[0].values.dtype)
        return row_slices(len(rows), size)

    def start(self, rows: Texts) -> tuple[Part, ...]:
        """The sum, the largest logit of a negative, and the positive's."""
        values = rows.parts[0].values.new_full((len(rows), 3), -torch.inf)
        values[:, 0] = 0
        return (Part(values),)

    def collect(self, number: int, rows: Texts, known: Sequence[Part], block: Block) -> None:
        """Add the losses of further negatives."""
        _tile, logits, positive = self._logits(rows, block)
        sums, highest, own = known[0].values.unbind(dim=1)
        own.copy_(torch.maximum(own, positive))
        sums += -F.logsigmoid(-logits).sum(dim=1)
        highest.copy_(torch.maximum(highest, row_max(logits)))

    def finish(self, known: Sequence[Part]) -> tuple[Tensor, tuple[Part, ...]]:
        """The three numbers."""
        return known[0].values, ()

    def derivatives(
        self, rows: Texts, kept: Sequence[Part], upstream: Tensor, block: Block
    ) -> list[tuple[ScoreTile, Tensor, Tensor]]:
        """The sigmoids of the negatives' logits."""
        tile, logits, _positive = self._logits(rows, block)
        return [(tile, logits.sigmoid_(), upstream[:, :1])]

    def _logits(self, rows: Texts, block: Block) -> tuple[ScoreTile, Tensor, Tensor]:
        """The tile, its logits [c, t], -inf where a document is no negative, and those of positives among them [c]."""
        tile = self.score.tile(rows.parts[0], block.columns[0])
        logits = tile.scores(rows.parts[0].values.new_ones(1))
        index, is_own = self.own_column(self.excluded.positives, rows, block)
        positive = torch.where(is_own, logits.gather(1, index), -torch.inf).squeeze(1)
        logits = self.excluded.mask_scores(logits, LossDirection.query_document, rows.first, block.first)
        return tile, logits, positive


def _chunk(
    first: int,
    queries: Tensor,
    positives: Tensor,
    documents: Tensor,
    scale: Tensor,
    bias: Tensor,
    excluded: ExcludedCandidates,
) -> tuple[Tensor, Tensor]:
    """Queries [b, D], from number `first` of all ranks', with positives [b] among all documents [K, D].

    Returns the losses [b], and the number of queries whose positive is first.
    """
    logits = inner_products(queries, documents) * scale + bias
    positive = logits.gather(1, positives.unsqueeze(1)).squeeze(1)
    negatives = excluded.mask_scores(logits.clone(), LossDirection.query_document, first, 0)
    # Log sigmoid of +inf is 0, with gradient 0.
    losses = -F.logsigmoid(-negatives).sum(dim=1) - F.logsigmoid(positive)
    return losses, (negatives.detach().amax(dim=1) < positive.detach()).sum()
