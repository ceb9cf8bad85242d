"""Losses of each query's own documents: pointwise, listwise and by pairs of documents.

Of a cross-encoder's scores, or of a dense model's similarities. Lists are ragged: every reduction is over segments of
[M], never over a padded matrix, so a list has the same loss alone and beside others of any length.

B, M: queries and documents of this rank; s and y: score and label of a document; n: documents of a list.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.losses import (
    ADRMSEConfig,
    BCEConfig,
    LambdaLossConfig,
    LambdaWeighting,
    ListConfig,
    ListNetConfig,
    MeanOver,
    MSEConfig,
    PListMLEConfig,
    RankNetConfig,
    SoftmaxConfig,
)
from embedtrain.distributed.collectives import sum_over_ranks
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.score import Score, VectorScore
from embedtrain.losses.similarity import group_log_softmax, group_logsumexp, group_max, rows_per_chunk
from embedtrain.losses.types import BatchInfo, EncodedLoss, LossOutput


@dataclass(frozen=True, slots=True)
class Lists:
    """The documents of this rank's queries, list by list."""

    scores: Tensor  # [M], of the model, divided by the temperature
    labels: Tensor  # [M], of annotators or a teacher
    owners: Tensor  # int64 [M], ascending
    sizes: NDArray[np.int64]  # [B], documents of each query
    max_size: int  # of all ranks
    num_pairs: int  # documents of all ranks, at least 1
    metrics: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        queries: Encoded,
        documents: Encoded,
        batch_info: BatchInfo,
        score: Score,
        temperature: float = 1.0,
    ) -> Self:
        """Of a batch; without `BatchInfo.scores` the first document of a row has label 1 and the others 0."""
        raw = score.pairs(queries, documents, batch_info)
        labels = batch_info.scores
        if labels is None:
            labels = (torch.searchsorted(batch_info.owners, batch_info.owners) == _arange(raw)).to(raw.dtype)
        rows = batch_info.rows
        return cls(
            raw / temperature,
            labels.to(raw.dtype),
            batch_info.owners,
            rows.local_num_documents,
            int(rows.num_documents.max(initial=0)),
            max(1, len(rows.document_keys)),
            score_range(raw, batch_info),
        )

    @property
    def num_queries(self) -> int:
        """B, with those that have no documents."""
        return len(self.sizes)

    @property
    def starts(self) -> Tensor:
        """Int64 [M], index of the first document of each document's list."""
        return torch.searchsorted(self.owners, self.owners)

    @property
    def ends(self) -> Tensor:
        """Int64 [M], index after the last document of each document's list."""
        return torch.searchsorted(self.owners, self.owners, right=True)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each list's values [M], differentiably: [B]."""
        return values.new_zeros(self.num_queries).index_add(0, self.owners, values)

    def order(self, keys: Tensor) -> Tensor:
        """Int64 [M], the documents by list and, within a list, from the highest of the keys [M] to the lowest.

        Documents with equal keys keep their order.
        """
        by_key = keys.detach().argsort(descending=True, stable=True)
        return by_key[self.owners[by_key].argsort(stable=True)]

    def ranks(self, keys: Tensor) -> Tensor:
        """Int64 [M], 1 for the document with the highest of the keys [M] in its list."""
        return self.order(keys).argsort() - self.starts + 1

    def pairs(self, max_pairs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All unordered pairs of documents of the same list, once each, in chunks of about `max_pairs`.

        Yields the indices of the first and of the second documents. The host knows their number, so the device is not
        read.
        """
        following = np.repeat(self.sizes, self.sizes) - _within(self.sizes) - 1  # documents after each in its list
        # Chunks of consecutive first documents.
        chunk_of = (np.cumsum(following) - following) // max(1, max_pairs)
        bounds = np.flatnonzero(np.diff(chunk_of, prepend=-1, append=-1)).tolist()
        counts = self.ends - _arange(self.scores) - 1
        for begin, end in itertools.pairwise(bounds):
            total = int(following[begin:end].sum())
            if total == 0:
                continue
            numbers, documents = counts[begin:end], torch.arange(begin, end, device=counts.device)
            first = documents.repeat_interleave(numbers, output_size=total)
            before = (numbers.cumsum(0) - numbers).repeat_interleave(numbers, output_size=total)
            yield first, first + 1 + torch.arange(total, device=counts.device) - before

    def weights(self, terms: Tensor, over: MeanOver = MeanOver.queries) -> Tensor:
        """[B], by which the sum of each list's terms is multiplied for a mean over the lists of all ranks.

        `terms` [B] are their numbers. Over queries: the mean of the lists' means, of the lists that have terms; over
        pairs: the mean of all terms.
        """
        terms = terms.detach().double()
        if over is MeanOver.queries:
            counted = (terms > 0).double()
            weights = counted / terms.clamp(min=1) / sum_over_ranks(counted.sum()).clamp(min=1)
        else:
            weights = torch.ones_like(terms) / sum_over_ranks(terms.sum()).clamp(min=1)
        return weights.to(self.scores.dtype)

    def output(self, row_losses: Tensor, **metrics: Tensor) -> LossOutput:
        """The loss of these parts of the lists, [B]."""
        return LossOutput(row_losses.sum(), {**self.metrics, **metrics}, row_losses.detach())


def score_range(scores: Tensor, batch_info: BatchInfo) -> dict[str, Tensor]:
    """The metric `score_range`: the highest minus the lowest score of a query's documents.

    This rank's part of the mean over the queries that have two documents or more. 0 where a model gives all documents
    of every query the same score. Without such queries on any rank there is no metric.
    """
    num_rows = int((batch_info.rows.num_documents > 1).sum())
    if num_rows == 0:
        return {}
    scores, size = scores.detach(), batch_info.num_queries
    highest, lowest = (group_max(values, batch_info.owners, size) for values in (scores, -scores))
    # A query without documents has -inf twice.
    ranges = (highest + lowest).clamp(min=0.0)
    return {"score_range": ranges.sum() / num_rows}


def constant_scores_warning(metrics: Mapping[str, float]) -> str | None:
    """A warning if a model gives all documents of every query the same score, by the metrics of a step."""
    if metrics.get("score_range", 1.0) > 0:
        return None
    return (
        "score_range=0: all documents of a query have the same score, and a model that has diverged does not recover; "
        "start again with a lower optim.lr and a longer optim.warmup"
    )


def _arange(values: Tensor) -> Tensor:
    return torch.arange(len(values), device=values.device)


def _within(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ..., size - 1 for each list."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


class ListLoss(EncodedLoss):
    """A loss of each query's own documents, compared by the model's score or by the similarity that the loss names."""

    config: ListConfig | MSEConfig

    def __init__(self, config: ListConfig | MSEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.config, self.score = config, score or VectorScore(config.similarity)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents, perhaps with scores [M], to this rank's loss."""
        temperature = self.config.temperature if isinstance(self.config, ListConfig) else 1.0
        return self.list_loss(Lists.of(queries, documents, batch_info, self.score, temperature))

    @abstractmethod
    def list_loss(self, lists: Lists) -> LossOutput:
        """The documents of this rank's queries to its loss."""


# Vectors [P] that live at a time in the backward pass of a chunk, approximately.
_LIVE_VECTORS = 24


class BCE(ListLoss):
    """Binary cross entropy of single pairs: softplus(s) - y s, the mean over all pairs.

    y from 0 to 1; `pos_weight` w multiplies the positives' part: w y softplus(-s) + (1 - y) softplus(s). Logs
    `accuracy`, the fraction of pairs whose score is above 0 exactly where y is above 0.5.
    """

    config: BCEConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
        scores, labels = lists.scores, lists.labels
        positive, negative = self.config.pos_weight * labels * F.softplus(-scores), (1 - labels) * F.softplus(scores)
        accuracy = ((scores > 0) == (labels > 0.5)).sum() / lists.num_pairs
        return lists.output(lists.sum(positive + negative) / lists.num_pairs, accuracy=accuracy)


class MSE(ListLoss):
    """Squared difference of score and teacher's score, the mean over all pairs."""

    config: MSEConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
        return lists.output(lists.sum((lists.scores - lists.labels).square()) / lists.num_pairs)


class Softmax(ListLoss):
    """Gao et al., "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline" (ECIR 2021).

    -log(exp(s_p) / (exp(s_p) + sum over the query's negatives n of exp(s_n))) of a positive p; with several positives
    the mean over them, each against the negatives alone, as if each step drew one of them. The mean over the queries
    that have a positive and a negative. The positive is the first document of a row, or with `positive_above` every
    document with a higher label. Logs `accuracy`, the fraction of these queries whose best document is a positive.
    """

    config: SoftmaxConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
        scores, owners, size = lists.scores, lists.owners, lists.num_queries
        threshold = self.config.positive_above
        positive = (
            lists.starts == torch.arange(len(owners), device=owners.device)
            if threshold is None
            else lists.labels > threshold
        )
        num_positives = lists.sum(positive.to(scores.dtype))
        has_negative = lists.sum((~positive).to(scores.dtype)) > 0
        negatives = group_logsumexp(scores.masked_fill(positive, -torch.inf), owners, size)
        # log(1 + exp(negatives - s)) of the positives of queries with negatives; others are 0, without gradient.
        counted = positive & has_negative[owners]
        terms = F.softplus((negatives[owners] - scores).masked_fill(~counted, -torch.inf))
        weights = lists.weights(num_positives * has_negative)
        best = group_max(scores.detach().masked_fill(~positive, -torch.inf), owners, size)
        is_best = (best >= group_max(scores.detach(), owners, size)).to(weights.dtype)
        return lists.output(lists.sum(terms) * weights, accuracy=(is_best * num_positives * weights).sum())


class ListNet(ListLoss):
    """Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach" (ICML 2007).

    The cross entropy of softmax(y) and softmax(s) over a query's documents, the mean over all queries with at least two
    documents. Differs from `distill_scores` by the entropy of softmax(y), a constant.
    """

    config: ListNetConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
        log_scores, log_labels = (
            group_log_softmax(values, lists.owners, lists.num_queries) for values in (lists.scores, lists.labels)
        )
        terms = -log_labels.exp() * log_scores
        return lists.output(lists.sum(terms) * lists.weights(_several(lists, terms)))


class PListMLE(ListLoss):
    """Lan et al., "Position-Aware ListMLE" (UAI 2014); without weights Xia et al., "Listwise Approach ..." (ICML 2008).

    In descending order of y, the sum over k = 1..n of w_k (logsumexp over l >= k of s_l - s_k), the mean over
    all queries with at least two documents. w_k is 2^(n-k) - 1 divided by the sum of these, or 1 without
    `position_weights`. Documents of equal labels keep the order that they have in the row.
    """

    config: PListMLEConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
        scores = lists.scores[lists.order(lists.labels)]
        terms = _suffix_logsumexp(scores, lists.ends, lists.max_size) - scores
        if self.config.position_weights:
            terms = terms * _position_weights(lists).to(terms.dtype)
        # The last term of a list is 0, and so is that of a list of one document.
        return lists.output(lists.sum(terms) * lists.weights(_several(lists, terms)))


def _several(lists: Lists, like: Tensor) -> Tensor:
    """[B], 1 for a list of at least two documents, else 0."""
    return (lists.sum(torch.ones_like(like)) > 1).to(like.dtype)


def _position_weights(lists: Lists) -> Tensor:
    """Float64 [M]: 2^(n-k) - 1 for the k-th document of a list of n, divided by their sum, 2^n - n - 1.

    Both divided by 2^n, which overflows for long lists. A list of one document has weight 0.
    """
    starts, ends = lists.starts, lists.ends
    sizes, positions = (ends - starts).double(), torch.arange(len(ends), device=ends.device) - starts + 1
    smallest = torch.exp2(-sizes)
    total = (1 - (sizes + 1) * smallest).masked_fill(sizes == 1, 1.0)
    return (torch.exp2(-positions.double()) - smallest) / total


def _suffix_logsumexp(values: Tensor, ends: Tensor, max_size: int) -> Tensor:
    """The logsumexp of each value and those after it in its list: [M] -> [M]; `ends` as in `Lists`.

    By doubling: after the step of width w, each value covers the next 2w. A cumulative sum over all lists would have
    to subtract the lists before, which cancels.
    """
    indices = torch.arange(len(values), device=values.device)
    width = 1
    while width < max_size:
        following = indices + width
        inside = following < ends
        others = values[torch.where(inside, following, indices)].masked_fill(~inside, -torch.inf)
        values = torch.logaddexp(values, others)
        width *= 2
    return values


class RankNet(ListLoss):
    """Burges et al., "Learning to Rank using Gradient Descent" (ICML 2005).

    softplus(s_j - s_i) for every pair of documents of a query with y_i > y_j. The mean over a query's pairs, and then
    over the queries that have one; or over all pairs of the global batch (`mean_over=pairs`). Logs `agreement`, the
    same mean of 1 where s_i > s_j.
    """

    config: RankNetConfig | LambdaLossConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
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


class ADRMSE(ListLoss):
    """Schlatt et al., "Rank-DistiLLM: Closing the Effectiveness Gap Between Cross-Encoders and LLMs ..." (ECIR 2025).

    (r - (1 + sum over the other documents j of sigmoid(s_j - s)))^2 / log2(1 + r) for a document of rank r by y, where
    documents of equal labels have the mean of their ranks. The mean over a query's documents, and then over all queries
    with at least two.
    """

    config: ADRMSEConfig

    def list_loss(self, lists: Lists) -> LossOutput:
        """See `ListLoss`."""
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
