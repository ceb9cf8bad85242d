"""InfoNCE over the in-batch and hard negatives of all ranks, with the exact gradient of the global batch.

B, M: queries and documents of this rank; N: queries, K: documents of all ranks; D: dimensions.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.schema import InfoNCEConfig
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.types import LossInput, LossOutput


class InfoNCE:
    """van den Oord et al., "Representation Learning with Contrastive Predictive Coding" (2018).

    The loss of query i is -log softmax over all K documents of the scores <q_i, d_j> / temperature, at its
    positive. The ranks' documents are gathered with their gradient and each rank scores its own queries
    only, so memory and work grow with B x K, not with N x K. Any number of hard negatives per query, any
    number of rows per rank.

    Args:
        config: temperature; whether documents that equal the positive, or that are the positive of an equal
            query, are left out of the negatives.
    """

    def __init__(self, config: InfoNCEConfig) -> None:
        self.temperature = config.temperature
        self.mask_duplicates = config.mask_duplicates

    def __call__(self, queries: Tensor, documents: Tensor, known: LossInput) -> LossOutput:
        """Queries [B, D] and documents [M, D], float32, to this rank's share of the global mean.

        Written as softplus(logsumexp of the negatives - positive) rather than logsumexp(all) - positive:
        the same number, but exact in fp32 when the loss is small, where the difference would cancel.
        """
        counts = row_counts(documents.shape[0], documents.device)
        everything = gather_rows(documents, counts)
        num_queries = sum(row_counts(queries.shape[0], queries.device))
        before = sum(counts[: dist.get_rank()])
        positives = known.positives + before

        # The product must not be rounded to bf16: logits of 50 would be off by a quarter.
        with torch.autocast(queries.device.type, enabled=False):
            scores = queries.float() @ everything.float().T / self.temperature
        positive = scores.gather(1, positives.unsqueeze(1)).squeeze(1)
        excluded = self._no_negatives(known, positives, counts)
        alone = excluded.all(dim=1, keepdim=True)
        # A row without any negative has loss 0; its scores stay finite so that its gradient is 0, not NaN.
        negative = scores.masked_fill(excluded & ~alone, -torch.inf)
        gap = (torch.logsumexp(negative, dim=1) - positive).masked_fill(alone.squeeze(1), -torch.inf)
        # The zero term ties a rank without queries to the gather, whose backward pass needs every rank.
        share = (F.softplus(gap).sum() + 0.0 * everything.sum()) / max(1, num_queries)
        beaten = (negative >= positive.unsqueeze(1)).any(dim=1) & ~alone.squeeze(1)
        right = (~beaten).sum() / max(1, num_queries)
        return LossOutput(share, {"accuracy": right})

    def _no_negatives(self, known: LossInput, positives: Tensor, counts: list[int]) -> Tensor:
        """[B, K], true where a document is no negative of a query; the positive itself always."""
        columns = torch.arange(sum(counts), device=positives.device)
        excluded = columns == positives.unsqueeze(1)
        if not self.mask_duplicates:
            return excluded
        # A document that answers an equal query answers this one too, wherever its text stands.
        query_of = torch.full_like(known.document_keys, _NO_QUERY)
        query_of[known.positives] = known.query_keys
        answers = gather_rows(query_of, counts) == known.query_keys.unsqueeze(1)
        texts, text_of = gather_rows(known.document_keys, counts).unique(return_inverse=True)
        right = answers.new_zeros((len(answers), len(texts)), dtype=torch.float32)
        right.index_add_(1, text_of, answers.float())
        return excluded | (right > 0)[:, text_of]


# No hash is this one: see `text_keys`, whose keys are 63 bits.
_NO_QUERY = -1
