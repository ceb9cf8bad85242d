"""SigLIP: a binary classification of every pair of a query and a document of the global batch.

B, M: queries and documents of this rank; N, K: of all ranks; b: queries of one chunk; D: dimensions.
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embedtrain.config.loss_choices import LossDirection, Similarity
from embedtrain.config.losses import SigLIPConfig
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.excluded import ExcludedCandidates, Exclusion
from embedtrain.losses.similarity import Temperature, at_least_float32, inner_products, rows_per_chunk
from embedtrain.losses.types import BatchInfo, Loss, LossOutput, Prepared

# Matrices [b, K] that live at a time in the backward pass of a chunk.
_LIVE_MATRICES = 4


class SigLIP(Loss):
    """Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (ICCV 2023).

    For each query the sum over all K documents of -log sigmoid(y (similarity / temperature + bias)), y = 1 at
    its positive and -1 elsewhere; the mean over all queries. The documents of all ranks are gathered with their
    gradient; each rank computes its own queries, a chunk at a time, and recomputes a chunk's [b, K] in the
    backward pass. Logs `accuracy`, the fraction of queries whose positive is more similar than any other document,
    `temperature` and `bias`.
    """

    def __init__(self, config: SigLIPConfig) -> None:
        super().__init__()
        self.similarity = config.similarity or Similarity.cosine
        self.exclusion = Exclusion(directions=(LossDirection.query_document,), duplicates=config.mask_duplicates)
        self.temperature = Temperature(
            config.temperature, trained=config.learn_temperature, bounds=config.temperature_bounds
        )
        self.fixed_bias = config.bias
        self.bias = nn.Parameter(torch.tensor([config.bias])) if config.learn_bias else None

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """The excluded candidates."""
        if self.exclusion in batch_info.prepared:
            return {}
        return {self.exclusion: ExcludedCandidates.build(self.exclusion, batch_info.rows)}

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's loss."""
        queries, documents = at_least_float32(queries), at_least_float32(documents)
        if self.similarity is Similarity.cosine:
            queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
        counts = batch_info.rows.counts
        all_documents = gather_rows(documents, counts.documents)
        excluded = ExcludedCandidates.of(self.exclusion, batch_info)
        positives, first = (
            batch_info.positives + batch_info.rows.local_documents.start,
            batch_info.rows.local_rows.start,
        )
        scale = self.temperature.scale(queries)
        bias = queries.new_full((1,), self.fixed_bias) if self.bias is None else self.bias.to(queries.dtype)

        # The zero term connects a rank without queries to the gather, whose backward pass needs every rank, and to
        # the parameters.
        loss = 0.0 * (all_documents.sum() + scale.sum() + bias.sum())
        num_correct = torch.zeros((), dtype=torch.int64, device=queries.device)
        row_losses = []
        size = rows_per_chunk(len(all_documents) * _LIVE_MATRICES, queries.dtype)
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
        num_queries, num_ranks = max(1, sum(counts.queries)), len(counts.queries)
        metrics = {
            "accuracy": num_correct / num_queries,
            "temperature": 1 / scale.detach().squeeze() / num_ranks,
            "bias": bias.detach().squeeze() / num_ranks,
        }
        return LossOutput(
            loss / num_queries, metrics, torch.cat([queries.detach().new_zeros(0), *row_losses]) / num_queries
        )


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
