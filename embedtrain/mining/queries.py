"""The distinct queries of a block of rows, and the scores of their documents.

Shapes: R rows, Q distinct queries, P pairs.
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
from embedtrain.mining.inputs import MiningInputs, distinct_pairs, positions_within
from embedtrain.mining.pool import IntArray, stripped_keys
from embedtrain.mining.sources import MiningSource

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


def group_by_depth(counts: IntArray) -> list[IntArray]:
    """Group queries by their number of documents, so that one with many does not make all others search as deep."""
    size = np.ceil(np.log2(np.maximum(counts, _SMALLEST_DEPTH) / _SMALLEST_DEPTH)).astype(np.int64)
    return [np.flatnonzero(size == group_size).astype(np.int64) for group_size in np.unique(size)]
