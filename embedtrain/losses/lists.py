"""The scored documents of each query, which the losses of pointwise.py, listwise.py and ranking.py share.

B, M: queries and documents of this rank. Lists are ragged: every reduction is over segments of [M], never over a padded
matrix, so a list has the same loss alone and beside others of any length.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.listwise_losses import MeanOver
from embedtrain.distributed.collectives import sum_over_ranks
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.score import Score
from embedtrain.losses.similarity import group_max
from embedtrain.losses.types import BatchInfo, LossOutput


@dataclass(frozen=True, slots=True)
class Lists:
    """The documents of this rank's queries, list by list."""

    scores: Tensor  # [M], of the model, divided by the temperature
    labels: Tensor  # [M], of annotators or a teacher
    owners: Tensor  # int64 [M], ascending
    sizes: NDArray[np.int64]  # [B], documents of each query
    max_size: int  # of all ranks
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
