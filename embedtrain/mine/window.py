"""The window: of each query the best documents that may be negatives, and the scores of documents that are known.

Q queries, N documents, C = min(rank_max, N), P pairs, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.inference.index import ShardedIndex
from embedtrain.mine.relation import IntArray, positions_within

FloatArray = NDArray[np.float32]
# Queries of at most so many documents are searched together; of more, with those that have up to twice as many.
_FEW = 32


@dataclass(frozen=True, slots=True)
class QueryDocumentPairs:
    """Documents of queries: int64 [P] both, `owners` (which of the Q) ascending."""

    owners: IntArray
    documents: IntArray

    def counts(self, num_queries: int) -> IntArray:
        """Of each query, how many documents: int64 [Q]."""
        return np.bincount(self.owners, minlength=num_queries).astype(np.int64)

    def of(self, query: int) -> slice:
        """Where the documents of one query stand."""
        left, right = np.searchsorted(self.owners, [query, query + 1]).tolist()
        return slice(left, right)


@dataclass(frozen=True, slots=True)
class CandidateWindow:
    """Candidates, best first; equal scores in the pool's order.

    Attributes:
        documents: int64 [Q, C]; -1 where a query has fewer candidates.
        scores: float32 [Q, C]; minus infinity there.
    """

    documents: IntArray
    scores: FloatArray

    def pairs(self) -> QueryDocumentPairs:
        """The candidates one by one."""
        return QueryDocumentPairs(
            np.nonzero(self.documents >= 0)[0].astype(np.int64), self.documents[self.documents >= 0]
        )


def pool_order(num_documents: int) -> Tensor:
    """Places among equal scores: the document that was met first comes first."""
    return torch.arange(num_documents - 1, -1, -1)


def find_window(index: ShardedIndex, queries: Tensor, excluded: QueryDocumentPairs, rank_max: int) -> CandidateWindow:
    """The `rank_max` best documents of each query, those not counted that are no negatives of it. A collective.

    sentence-transformers' `mine_hard_negatives` counts alike, but where a positive lies beyond the window it also looks
    at the documents next after it, as many as the query of most positives in the whole data has. Here what is found
    for a row does not depend on other questions.

    Args:
        index: of the pool.
        queries: float32 [Q, D], the same on every rank.
        excluded: of each query, documents that are no negatives; none twice.
        rank_max: how many are wanted.
    """
    num_queries, width = len(queries), min(rank_max, index.num_documents)
    documents: IntArray = np.full((num_queries, width), -1, dtype=np.int64)
    scores: FloatArray = np.full((num_queries, width), -np.inf, dtype=np.float32)
    counts = excluded.counts(num_queries)
    struck = excluded.owners * index.num_documents + excluded.documents
    for some in group_by_depth(counts):
        # So deep that the window is full whatever of its documents are struck out.
        ranking = index.search(queries[torch.from_numpy(some)], rank_max + int(counts[some].max()))
        found, values = ranking.documents.numpy(), ranking.scores.numpy()
        out = np.isin(some[:, None] * index.num_documents + found, struck)
        order = np.argsort(out, axis=1, kind="stable")[:, :width]
        stays = ~np.take_along_axis(out, order, axis=1)
        documents[some, : order.shape[1]] = np.where(stays, np.take_along_axis(found, order, axis=1), -1)
        scores[some, : order.shape[1]] = np.where(stays, np.take_along_axis(values, order, axis=1), -np.inf)
    return CandidateWindow(documents, scores)


def scores_of(index: ShardedIndex, queries: Tensor, pairs: QueryDocumentPairs) -> FloatArray:
    """The score of each pair, float32 [P], to the bit what a search gives it. A collective."""
    scores: FloatArray = np.empty(len(pairs.owners), dtype=np.float32)
    counts = pairs.counts(len(queries))
    starts = np.cumsum(counts) - counts
    for some in group_by_depth(counts):
        own = counts[some]
        if not own.any():
            continue
        rows, columns = np.repeat(np.arange(len(some)), own), positions_within(own)
        places = np.repeat(starts[some], own) + columns
        documents: IntArray = np.full((len(some), int(own.max())), -1, dtype=np.int64)
        documents[rows, columns] = pairs.documents[places]
        found = index.scores_of(queries[torch.from_numpy(some)], torch.from_numpy(documents)).numpy()
        scores[places] = found[rows, columns]
    return scores


def ranks_of(window: CandidateWindow, pairs: QueryDocumentPairs, scores: FloatArray) -> IntArray:
    """For each pair how many candidates come before its document, int64 [P]; of C none is left to come after."""
    ranks: IntArray = np.empty(len(pairs.owners), dtype=np.int64)
    for start in range(0, len(ranks), 4096):
        some = slice(start, start + 4096)
        candidates, values = window.documents[pairs.owners[some]], window.scores[pairs.owners[some]]
        own, document = scores[some, None], pairs.documents[some, None]
        before = (values > own) | ((values == own) & (candidates < document))
        ranks[some] = (before & (candidates >= 0)).sum(axis=1)
    return ranks


def group_by_depth(counts: IntArray) -> list[IntArray]:
    """Queries put together by how many documents each has, so that one of many makes no others search as deep."""
    size = np.ceil(np.log2(np.maximum(counts, _FEW) / _FEW)).astype(np.int64)
    return [np.flatnonzero(size == each).astype(np.int64) for each in np.unique(size)]
