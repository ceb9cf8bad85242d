"""SigLIP: every pair of a query and a document of the global batch is a yes or a no of its own.

B, M: queries and documents of this rank; N, K: of all ranks; b: queries of one chunk; D: dimensions.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embedtrain.config.losses import LossDirection, SigLIPConfig, Similarity
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.negatives import NoNegatives
from embedtrain.losses.similarity import products, rows_at_once, widened
from embedtrain.losses.temperature import Temperature
from embedtrain.losses.types import BatchInfo, Loss, LossOutput

# So many matrices [b, K] of a chunk live at a time, in its backward pass.
_LIVE_MATRICES = 4


class SigLIP(Loss):
    """Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (ICCV 2023).

    For each query the sum over all K documents of -log sigmoid(y (similarity / temperature + bias)), y = 1 at
    its positive and -1 elsewhere; the mean over all queries. The ranks' documents are gathered with their
    gradient, each rank takes its own queries, a chunk at a time, and computes a chunk's [b, K] again in the
    backward pass.

    Logs `accuracy`, the share of queries whose positive is more similar than any other document, and
    `temperature` and `bias`.

    Args:
        config: temperature and bias, the values or where they start from; which of them are trained, the
            temperature by its logarithm and within `temperature_bounds`; whether documents that equal the
            positive, or that are the positive of an equal query, are left out.
    """

    def __init__(self, config: SigLIPConfig) -> None:
        super().__init__()
        self.similarity, self.mask_duplicates = config.similarity, config.mask_duplicates
        self.temperature = Temperature(
            config.temperature, trained=config.learn_temperature, bounds=config.temperature_bounds
        )
        self.fixed_bias = config.bias
        self.bias = nn.Parameter(torch.tensor([config.bias])) if config.learn_bias else None

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's share."""
        queries, documents = widened(queries), widened(documents)
        if self.similarity is Similarity.cosine:
            queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
        query_counts = row_counts(len(queries), queries.device)
        counts = row_counts(len(documents), documents.device)
        everything = gather_rows(documents, counts)
        no_negatives = NoNegatives(
            batch_info, (query_counts, counts), duplicates=self.mask_duplicates, positive_again=False
        )
        rows = torch.arange(len(queries), device=queries.device) + sum(query_counts[: dist.get_rank()])
        scale = self.temperature.scale(queries)
        bias = queries.new_full((1,), self.fixed_bias) if self.bias is None else self.bias.to(queries.dtype)

        # The zero term ties a rank without queries to the gather, whose backward pass needs every rank, and to
        # the parameters.
        summed = 0.0 * (everything.sum() + scale.sum() + bias.sum())
        right = torch.zeros((), dtype=torch.int64, device=queries.device)
        size = rows_at_once(len(everything) * _LIVE_MATRICES, queries.dtype)
        for some_rows, some in zip(rows.split(size), queries.split(size), strict=True):
            if len(some) == 0:
                continue
            part, part_right = checkpoint(
                _chunk,
                *(some_rows, some, everything, scale, bias, no_negatives),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            summed, right = summed + part, right + part_right
        num_queries = max(1, sum(query_counts))
        told = {
            "accuracy": right / num_queries,
            "temperature": 1 / scale.detach().squeeze() / len(counts),
            "bias": bias.detach().squeeze() / len(counts),
        }
        return LossOutput(summed / num_queries, told)


def _chunk(
    rows: Tensor, queries: Tensor, documents: Tensor, scale: Tensor, bias: Tensor, no_negatives: NoNegatives
) -> tuple[Tensor, Tensor]:
    """Queries [b, D], rows `rows` [b] of all, against all documents [K, D]: the sum; how many positives beat all."""
    logits = products(queries, documents) * scale + bias
    positive = logits.gather(1, no_negatives.positives[rows].unsqueeze(1)).squeeze(1)
    others = no_negatives.strike_out(logits.clone(), LossDirection.query_document, rows, 0)
    # Log sigmoid of +inf is 0, with gradient 0.
    summed = -F.logsigmoid(-others).sum() - F.logsigmoid(positive).sum()
    return summed, (others.detach().amax(dim=1) < positive.detach()).sum()
