"""The distinct queries of a block of rows, and the scored candidates that the search finds for each.

Shapes: R rows, Q distinct queries, N documents, C = min(rank_max, N) candidates per query, P pairs, D dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.data.text_format import instructed_query, text_keys
from embedtrain.data.types import Example
from embedtrain.inference.index import ShardedIndex
from embedtrain.losses.encoded import Part
from embedtrain.mine.inputs import MiningInputs, distinct_pairs, positions_within
from embedtrain.mine.options import MarginReference, MineOptions
from embedtrain.mine.pool import IntArray, stripped_keys
from embedtrain.mine.sources import MiningSource

FloatArray = NDArray[np.float32]
# Queries with at most this many excluded documents are searched together; those with more, in groups that double.
_SMALLEST_DEPTH = 32


@dataclass(frozen=True, slots=True)
class QueryDocumentPairs:
    """Pairs of queries and documents."""

    owners: IntArray  # [P], the query of each pair, ascending
    documents: IntArray  # [P]

    def counts(self, num_queries: int) -> IntArray:
        """The number of documents of each query: int64 [Q]."""
        return np.bincount(self.owners, minlength=num_queries).astype(np.int64)

    def slice_of(self, query: int) -> slice:
        """Where the pairs of one query are."""
        left, right = np.searchsorted(self.owners, [query, query + 1]).tolist()
        return slice(left, right)


@dataclass(frozen=True, kw_only=True)
class UniqueQueries:
    """The distinct queries of a block: rows with the same text, instruction and prompt share one."""

    of_row: IntArray  # [R], the query of each row
    texts: Sequence[str]  # of the queries, without prompt
    inputs: Sequence[str]  # of the queries, as the model sees them
    prompts: Sequence[str]  # the prompt that each input starts with
    keys: IntArray  # [Q], keys of query and instruction (`instructed_query`)
    answers: QueryDocumentPairs  # by query, the positives of all rows with this key
    excluded: QueryDocumentPairs  # by query, the documents that are never its negatives
    existing: QueryDocumentPairs  # by row, in their order, the negatives to keep, without excluded documents
    existing_pairs: QueryDocumentPairs  # the distinct pairs of `existing`, by query

    @classmethod
    def of(cls, rows: Sequence[Example], source: MiningSource, inputs: MiningInputs, *, keep_existing: bool) -> Self:
        """The queries of rows of one source."""
        number_of: dict[tuple[str, str, str], int] = {}
        texts: list[str] = []
        of_row: IntArray = np.empty(len(rows), dtype=np.int64)
        for index, row in enumerate(rows):
            identity = (instructed_query(row.query, row.instruction), *source.format_query(row))
            number = number_of.setdefault(identity, len(number_of))
            if number == len(texts):
                texts.append(row.query)
            of_row[index] = number
        keys = text_keys([key for key, _, _ in number_of]).numpy()
        excluded = QueryDocumentPairs(*inputs.not_negatives.lookup(stripped_keys(texts)))
        existing = _existing_negatives(rows if keep_existing else [], of_row, excluded, inputs)
        return cls(
            of_row=of_row,
            texts=texts,
            inputs=[text for _, text, _ in number_of],
            prompts=[prompt for _, _, prompt in number_of],
            keys=keys,
            answers=QueryDocumentPairs(*inputs.answers.lookup(keys)),
            excluded=excluded,
            existing=existing,
            existing_pairs=QueryDocumentPairs(*distinct_pairs(of_row[existing.owners], existing.documents)),
        )


def _existing_negatives(
    rows: Sequence[Example], of_row: IntArray, excluded: QueryDocumentPairs, inputs: MiningInputs
) -> QueryDocumentPairs:
    owners: IntArray = np.repeat(np.arange(len(rows)), np.array([len(row.negatives) for row in rows], dtype=np.int64))
    documents = inputs.pool.numbers(text_keys([text for row in rows for text in row.negatives]).numpy())
    size = len(inputs.pool)
    keep = ~np.isin(of_row[owners] * size + documents, excluded.owners * size + excluded.documents)
    # Negatives of a row that differ in surrounding whitespace only count once.
    stripped = inputs.pool.stripped_keys[documents]
    order = np.lexsort((np.arange(len(stripped)), stripped, owners))
    is_duplicate = (np.diff(owners[order]) == 0) & (np.diff(stripped[order]) == 0)
    keep[order[1:][is_duplicate]] = False
    return QueryDocumentPairs(owners[keep], documents[keep])


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


def scores_of(index: ShardedIndex, queries: Part, pairs: QueryDocumentPairs) -> FloatArray:
    """The score of each pair, float32 [P], bit-identical to the score in a search. A collective."""
    scores: FloatArray = np.empty(len(pairs.owners), dtype=np.float32)
    counts = pairs.counts(len(queries))
    starts = np.cumsum(counts) - counts
    for group in group_by_depth(counts):
        group_counts = counts[group]
        if not group_counts.any():
            continue
        rows, columns = np.repeat(np.arange(len(group)), group_counts), positions_within(group_counts)
        indices = np.repeat(starts[group], group_counts) + columns
        documents: IntArray = np.full((len(group), int(group_counts.max())), -1, dtype=np.int64)
        documents[rows, columns] = pairs.documents[indices]
        group_scores = index.scores_of(
            queries.take(torch.from_numpy(group), group), torch.from_numpy(documents)
        ).numpy()
        scores[indices] = group_scores[rows, columns]
    return scores


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


def group_by_depth(counts: IntArray) -> list[IntArray]:
    """Group queries by their number of documents, so that one with many does not make all others search as deep."""
    size = np.ceil(np.log2(np.maximum(counts, _SMALLEST_DEPTH) / _SMALLEST_DEPTH)).astype(np.int64)
    return [np.flatnonzero(size == group_size).astype(np.int64) for group_size in np.unique(size)]
