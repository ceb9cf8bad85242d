"""The scored candidates that the search finds for each query of a block.

Shapes: Q distinct queries, N documents, C = min(rank_max, N) candidates per query, P pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from embedtrain.commands.mine.options import MarginReference, MineOptions
from embedtrain.inference.index import ShardedIndex
from embedtrain.losses.encoded import Part
from embedtrain.mining.inputs import FloatArray, QueryDocumentPairs, UniqueQueries, group_by_depth
from embedtrain.mining.pool import IntArray


@dataclass(frozen=True, kw_only=True)
class QueryCandidates:
    """The candidates of one query, its answers, and the scores of both.

    Scores are the teacher's if there is one; the order of the candidates is always the model's.
    """

    key: int  # of query and instruction
    answers: IntArray  # [A], ascending
    answer_scores: FloatArray  # [A]
    answer_ranks: IntArray  # [A], the number of candidates ranked before each answer
    reference: int  # index of the answer that margins refer to
    existing: IntArray  # [n], negatives that any row of this query keeps, ascending
    existing_scores: FloatArray  # [n]
    candidates: IntArray  # [C], best first
    scores: FloatArray  # [C], of the candidates
    logits: bool  # whether scores are logits of a probability, instead of similarities

    @property
    def reference_score(self) -> float:
        """The score of the positive that margins refer to."""
        return float(self.answer_scores[self.reference])


@dataclass(frozen=True, kw_only=True)
class BlockCandidates:
    """The candidates of all queries of a block, with one score per pair."""

    queries: UniqueQueries
    candidates: QueryDocumentPairs  # by query, best first by the model
    scores: FloatArray  # of `candidates`; the teacher's if there is one
    answer_scores: FloatArray  # of `queries.answers`
    answer_ranks: IntArray  # the number of candidates ranked before each answer
    existing_scores: FloatArray  # of `queries.existing_pairs`
    logits: bool  # whether scores are logits of a probability, instead of similarities

    def of_query(self, number: int, options: MineOptions) -> QueryCandidates:
        """The candidates of one query."""
        queries = self.queries
        candidates = self.candidates.slice_of(number)
        answers = queries.answers.slice_of(number)
        existing = queries.existing_pairs.slice_of(number)
        answer_scores = self.answer_scores[answers]
        lowest = options.margin_reference is MarginReference.lowest
        return QueryCandidates(
            key=int(queries.keys[number]),
            answers=queries.answers.documents[answers],
            answer_scores=answer_scores,
            answer_ranks=self.answer_ranks[answers],
            reference=int(answer_scores.argmin() if lowest else answer_scores.argmax()),
            existing=queries.existing_pairs.documents[existing],
            existing_scores=self.existing_scores[existing],
            candidates=self.candidates.documents[candidates],
            scores=self.scores[candidates],
            logits=self.logits,
        )


@dataclass(frozen=True, slots=True)
class CandidateWindow:
    """The best candidates of each query, best first; equal scores in the order of the pool."""

    documents: IntArray  # [Q, C]; -1 where a query has fewer candidates
    scores: FloatArray  # [Q, C]; minus infinity there

    def pairs(self) -> tuple[QueryDocumentPairs, FloatArray]:
        """The candidates as pairs, and their scores."""
        rows, columns = np.nonzero(self.documents >= 0)
        return QueryDocumentPairs(rows.astype(np.int64), self.documents[rows, columns]), self.scores[rows, columns]


def find_window(index: ShardedIndex, queries: Part, excluded: QueryDocumentPairs, rank_max: int) -> CandidateWindow:
    """The `rank_max` best documents of each query that are not excluded. A collective.

    sentence-transformers' `mine_hard_negatives` counts ranks alike. But if a positive is beyond the window, it also
    considers further documents, their number being the maximum number of positives of a query; here, the candidates of
    a row do not depend on other queries. `queries` are the same on every rank.
    """
    num_queries, width = len(queries), min(rank_max, index.num_documents)
    documents: IntArray = np.full((num_queries, width), -1, dtype=np.int64)
    scores: FloatArray = np.full((num_queries, width), -np.inf, dtype=np.float32)
    counts = excluded.counts(num_queries)
    excluded_keys = excluded.owners * index.num_documents + excluded.documents
    for group in group_by_depth(counts):
        # Deep enough to fill the window even if all excluded documents rank first.
        ranking = index.search(queries.take(torch.from_numpy(group), group), rank_max + int(counts[group].max()))
        ranked, ranked_scores = ranking.documents.numpy(), ranking.scores.numpy()
        is_excluded = np.isin(group[:, None] * index.num_documents + ranked, excluded_keys)
        order = np.argsort(is_excluded, axis=1, kind="stable")[:, :width]
        is_candidate = ~np.take_along_axis(is_excluded, order, axis=1)
        columns = order.shape[1]
        documents[group, :columns] = np.where(is_candidate, np.take_along_axis(ranked, order, axis=1), -1)
        scores[group, :columns] = np.where(is_candidate, np.take_along_axis(ranked_scores, order, axis=1), -np.inf)
    return CandidateWindow(documents, scores)


def ranks_of(window: CandidateWindow, pairs: QueryDocumentPairs, scores: FloatArray) -> IntArray:
    """The number of candidates ranked before each pair's document, int64 [P]; C if it is beyond the window."""
    ranks: IntArray = np.empty(len(pairs.owners), dtype=np.int64)
    for start in range(0, len(ranks), 4096):
        batch = slice(start, start + 4096)
        candidates, candidate_scores = window.documents[pairs.owners[batch]], window.scores[pairs.owners[batch]]
        score, document = scores[batch, None], pairs.documents[batch, None]
        is_before = (candidate_scores > score) | ((candidate_scores == score) & (candidates < document))
        ranks[batch] = (is_before & (candidates >= 0)).sum(axis=1)
    return ranks
