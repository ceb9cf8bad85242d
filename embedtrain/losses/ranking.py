"""Losses of the pairs of documents within each list: RankNet, LambdaLoss and ADR-MSE.

B, M: queries and documents of this rank; P: pairs of one chunk; s and y: score and label of a document.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.listwise_losses import ADRMSEConfig, LambdaLossConfig, LambdaWeighting, RankNetConfig
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.lists import Lists
from embedtrain.losses.score import Score, VectorScore
from embedtrain.losses.similarity import rows_per_chunk
from embedtrain.losses.types import BatchInfo, EncodedLoss, LossOutput

# Vectors [P] that live at a time in the backward pass of a chunk, approximately.
_LIVE_VECTORS = 24


class RankNet(EncodedLoss):
    """Burges et al., "Learning to Rank using Gradient Descent" (ICML 2005).

    softplus(s_j - s_i) for every pair of documents of a query with y_i > y_j. The mean over a query's pairs, and then
    over the queries that have one; or over all pairs of the global batch (`mean_over=pairs`). Logs `agreement`, the
    same mean of 1 where s_i > s_j.
    """

    def __init__(self, config: RankNetConfig | LambdaLossConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
        weights = self._weights(lists)

        def chunk(scores: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
            order = (lists.labels[first] - lists.labels[second]).sign()  # 0: not a pair
            counted = order.abs() if weights is None else order.abs() * weights.mask(first, second)
            margins = order * (scores[first] - scores[second])
            terms = counted * F.softplus(-margins)
            if weights is not None:
                terms = terms * weights(first, second)
            by_query = terms.new_zeros(3, lists.num_queries)
            agreed = counted * (margins.detach() > 0)
            return by_query.index_add(1, lists.owners[first], torch.stack([terms, counted, agreed])).unbind()

        sums, counts, agreed = _over_pairs(lists, chunk, [lists.sum(0.0 * lists.scores)] * 3)
        mean = lists.weights(counts, self.config.mean_over)
        return lists.output(sums * mean, agreement=(agreed.detach() * mean).sum())

    def _weights(self, lists: Lists) -> "PairWeights | None":
        return None


class LambdaLoss(RankNet):
    """Wang et al., "The LambdaLoss Framework for Ranking Metric Optimization" (CIKM 2018).

    RankNet's terms, each times a weight that bounds what exchanging the two documents costs in nDCG. With the rank r of
    a document by s, D(r) = log2(1 + r) and the gain g = (2^y - 1) / maxDCG:

    - lambdarank: |1/D(r_i) - 1/D(r_j)| |g_i - g_j|
    - ndcg_loss2: |1/D(k) - 1/D(k + 1)| |g_i - g_j| with k = |r_i - r_j|
    - ndcg_loss2pp: mu times ndcg_loss2, plus lambdarank

    With `top_k` a pair counts if one of the two is among the first k by s, and maxDCG is that of k documents. Weights
    have no gradient. The mean is that of RankNet.
    """

    config: LambdaLossConfig

    def _weights(self, lists: Lists) -> "PairWeights":
        return PairWeights(lists, self.config)


class PairWeights:
    """The weights of pairs in LambdaLoss: a function of the indices [P] of two documents."""

    @torch.no_grad()
    def __init__(self, lists: Lists, config: LambdaLossConfig) -> None:
        self.weighting, self.mu = config.weighting, config.mu
        self.top_k = config.top_k or max(1, lists.max_size)
        self.ranks = lists.ranks(lists.scores)
        gains = torch.exp2(lists.labels) - 1
        ideal = lists.ranks(lists.labels)
        best = lists.sum(gains * (ideal <= self.top_k) / _discount(ideal, gains))
        self.gains = gains / best.clamp(min=1e-10)[lists.owners]

    def mask(self, first: Tensor, second: Tensor) -> Tensor:
        """[P], 1 for pairs that count."""
        return (torch.minimum(self.ranks[first], self.ranks[second]) <= self.top_k).to(self.gains.dtype)

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """[P]."""
        gains = (self.gains[first] - self.gains[second]).abs()
        left, right = self.ranks[first], self.ranks[second]
        lambdarank = (1 / _discount(left, gains) - 1 / _discount(right, gains)).abs()
        distance = (left - right).abs()
        ndcg_loss2 = 1 / _discount(distance, gains) - 1 / _discount(distance + 1, gains)
        match self.weighting:
            case LambdaWeighting.lambdarank:
                return lambdarank * gains
            case LambdaWeighting.ndcg_loss2:
                return ndcg_loss2 * gains
            case LambdaWeighting.ndcg_loss2pp:
                return (self.mu * ndcg_loss2 + lambdarank) * gains


class ADRMSE(EncodedLoss):
    """Schlatt et al., "Rank-DistiLLM: Closing the Effectiveness Gap Between Cross-Encoders and LLMs ..." (ECIR 2025).

    (r - (1 + sum over the other documents j of sigmoid(s_j - s)))^2 / log2(1 + r) for a document of rank r by y, where
    documents of equal labels have the mean of their ranks. The mean over a query's documents, and then over all queries
    with at least two.
    """

    def __init__(self, config: ADRMSEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
        labels = lists.labels

        def chunk(scores: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            behind = torch.sigmoid(scores[second] - scores[first])  # how much `first` ranks behind `second`
            behind_by_label = ((labels[second] - labels[first]).sign() + 1) / 2
            indices = torch.cat([first, second])
            ranks, targets = (
                torch.zeros_like(scores).index_add(0, indices, torch.cat([part, 1 - part]))
                for part in (behind, behind_by_label)
            )
            return ranks, targets

        ranks, targets = (1 + part for part in _over_pairs(lists, chunk, [0.0 * lists.scores] * 2))
        terms = (targets - ranks).square() / torch.log2(1 + targets)
        sizes = lists.sum(torch.ones_like(terms))
        return lists.output(lists.sum(terms) * lists.weights(sizes * (sizes > 1)))


def _over_pairs(
    lists: Lists, chunk: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], zeros: list[Tensor]
) -> list[Tensor]:
    """The sums of `chunk(scores, first, second)` over chunks of pairs, which the backward pass computes again.

    `zeros`: of the results' shapes, connected to the scores.
    """
    sums = list(zeros)
    max_pairs = rows_per_chunk(_LIVE_VECTORS, lists.scores.dtype)
    for first, second in lists.pairs(max_pairs):
        parts = checkpoint(chunk, lists.scores, first, second, use_reentrant=False, preserve_rng_state=False)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return sums


def _discount(ranks: Tensor, like: Tensor) -> Tensor:
    return torch.log2(1 + ranks.to(like.dtype))
