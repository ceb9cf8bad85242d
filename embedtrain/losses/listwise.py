"""Losses of each query's own documents: pointwise (BCE, MSE) and listwise (softmax, ListNet, p-ListMLE).

Of a cross-encoder's scores, or of a dense model's similarities. B, M: queries and documents of this rank; s and y:
score and label of a document; n: documents of a list.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.listwise_losses import BCEConfig, ListNetConfig, MSEConfig, PListMLEConfig, SoftmaxConfig
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.lists import Lists
from embedtrain.losses.score import Score, VectorScore
from embedtrain.losses.similarity import group_logsumexp, group_max
from embedtrain.losses.types import BatchInfo, EncodedLoss, LossOutput


class BCE(EncodedLoss):
    """Binary cross entropy of single pairs: softplus(s) - y s, the mean over all pairs.

    y from 0 to 1; `pos_weight` w multiplies the positives' part: w y softplus(-s) + (1 - y) softplus(s). Logs
    `accuracy`, the fraction of pairs whose score is above 0 exactly where y is above 0.5.
    """

    def __init__(self, config: BCEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
        scores, labels = lists.scores, lists.labels
        positive, negative = self.config.pos_weight * labels * F.softplus(-scores), (1 - labels) * F.softplus(scores)
        num_pairs = max(1, len(batch_info.rows.document_keys))
        accuracy = ((scores > 0) == (labels > 0.5)).sum() / num_pairs
        return lists.output(lists.sum(positive + negative) / num_pairs, accuracy=accuracy)


class MSE(EncodedLoss):
    """Squared difference of score and teacher's score, the mean over all pairs."""

    def __init__(self, config: MSEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score)
        num_pairs = max(1, len(batch_info.rows.document_keys))
        return lists.output(lists.sum((lists.scores - lists.labels).square()) / num_pairs)


class Softmax(EncodedLoss):
    """Gao et al., "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline" (ECIR 2021).

    -log(exp(s_p) / (exp(s_p) + sum over the query's negatives n of exp(s_n))) of a positive p; with several positives
    the mean over them, each against the negatives alone, as if each step drew one of them. The mean over the queries
    that have a positive and a negative. The positive is the first document of a row, or with `positive_above` every
    document with a higher label. Logs `accuracy`, the fraction of these queries whose best document is a positive.
    """

    def __init__(self, config: SoftmaxConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents, with scores [M] for `positive_above`, to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
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


class ListNet(EncodedLoss):
    """Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach" (ICML 2007).

    The cross entropy of softmax(y) and softmax(s) over a query's documents, the mean over all queries with at least two
    documents. Differs from `distill_scores` by the entropy of softmax(y), a constant.
    """

    def __init__(self, config: ListNetConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
        log_scores, log_labels = (
            values - group_logsumexp(values, lists.owners, lists.num_queries)[lists.owners]
            for values in (lists.scores, lists.labels)
        )
        terms = -log_labels.exp() * log_scores
        return lists.output(lists.sum(terms) * lists.weights(_several(lists, terms)))


class PListMLE(EncodedLoss):
    """Lan et al., "Position-Aware ListMLE" (UAI 2014); without weights Xia et al., "Listwise Approach ..." (ICML 2008).

    In descending order of y, the sum over k = 1..n of w_k (logsumexp over l >= k of s_l - s_k), the mean over
    all queries with at least two documents. w_k is 2^(n-k) - 1 divided by the sum of these, or 1 without
    `position_weights`. Documents of equal labels keep the order that they have in the row.
    """

    def __init__(self, config: PListMLEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        self.config = config

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        lists = Lists.of(queries, documents, batch_info, self.score, self.config.temperature)
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
