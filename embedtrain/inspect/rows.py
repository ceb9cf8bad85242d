"""Extra columns and duplicates of training rows.

R: rows; P, N: positives and negatives of all rows, row by row.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.data.cache.row_store import EXTRA_COLUMNS, RowStore
from embedtrain.data.sampling.permutation import random_bits

MAX_INSTRUCTIONS = 1_000  # different ones that are told apart


@dataclass(slots=True)
class ExtraColumns:
    """What lies beside the texts of a source's rows.

    Attributes:
        scores: how many, the smallest, the largest, and their sum.
        labels: how many rows are of each class.
        instructions: how many rows carry each one; for queries.
        document_instructions: likewise, for documents.
        more_instructions: rows whose instructions were too many to be told apart.
        width: of a teacher's vectors.
    """

    scores: tuple[int, float, float, float] | None = None
    labels: Counter[int] = field(default_factory=Counter)
    instructions: Counter[str] = field(default_factory=Counter)
    document_instructions: Counter[str] = field(default_factory=Counter)
    more_instructions: int = 0
    width: int | None = None


def summarise_extra_columns(store: RowStore) -> ExtraColumns:
    """What lies beside the texts of a source's rows."""
    found = ExtraColumns()
    if "vectors" in store.extra_columns:
        vectors = store[0].vectors
        found.width = len(vectors[0]) if vectors else None
    if not store.extra_columns & (EXTRA_COLUMNS.keys() - {"vectors", "most_negatives"}):
        return found
    for batch in batches_of(store):
        names = set(batch.schema.names)
        if "positive_scores" in names:
            parts = [batch.column(name).flatten() for name in ("positive_scores", "negative_scores") if name in names]
            values = np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])
            found.scores = _scores(found.scores, values)
        if "label" in names:
            found.labels.update(batch.column("label").drop_null().to_pylist())
        for name, counter in (
            ("instruction", found.instructions),
            ("document_instruction", found.document_instructions),
        ):
            if name in names:
                found.more_instructions += _count(counter, batch.column(name))
    return found


def batches_of(store: RowStore) -> Iterator[pa.RecordBatch]:
    """All rows as columns."""
    for number in range(len(store.rows.batch_starts) - 1):
        yield store.rows.batch(number)


def _scores(
    before: tuple[int, float, float, float] | None, values: NDArray[np.float32]
) -> tuple[int, float, float, float] | None:
    if not len(values):
        return before
    now = (len(values), float(values.min()), float(values.max()), float(values.sum(dtype=np.float64)))
    if before is None:
        return now
    return before[0] + now[0], min(before[1], now[1]), max(before[2], now[2]), before[3] + now[3]


def _count(counter: Counter[str], column: pa.Array) -> int:
    """Count the instructions of some rows; how many rows have one that is new and one too many."""
    left_out = 0
    for found in pc.value_counts(column.drop_null()).to_pylist():
        if found["values"] in counter or len(counter) < MAX_INSTRUCTIONS:
            counter[found["values"]] += found["counts"]
        else:
            left_out += found["counts"]
    return left_out


_QUERY, _POSITIVE, _NEGATIVE, _PAIR = 1, 2, 3, 4  # what a key is hashed as


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The texts of rows by their keys; see data/keys.py.

    Attributes:
        queries: int64 [R].
        positives: int64 [P].
        negatives: int64 [N].
        num_positives: int [R], of each row.
        num_negatives: int [R], likewise.
    """

    queries: NDArray[np.int64]
    positives: NDArray[np.int64]
    negatives: NDArray[np.int64]
    num_positives: NDArray[np.integer]
    num_negatives: NDArray[np.integer]

    @classmethod
    def joined(cls, parts: Sequence["RowKeys"]) -> "RowKeys":
        """The rows of several, one after the other."""
        names = ("queries", "positives", "negatives", "num_positives", "num_negatives")
        return (
            parts[0] if len(parts) == 1 else cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))
        )


@dataclass(frozen=True, slots=True)
class Repetition:
    """Of things that occur more than once: how many different ones, and in how many places."""

    different: int
    places: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """What stands in several rows.

    Attributes:
        queries: equal queries.
        positives: equal positives.
        documents: documents, positive or negative, that occur in several places.
        rows: rows whose texts are all equal, in whatever order the documents stand.
        both: documents that are a positive in one row and a negative in another.
        contradictions: pairs of query and document that are positive in one row and negative in another.
    """

    queries: Repetition
    positives: Repetition
    documents: Repetition
    rows: Repetition
    both: int
    contradictions: int


def duplicates_in(keys: RowKeys) -> Duplicates:
    """What stands in several of these rows."""
    return Duplicates(
        queries=_repeated(keys.queries),
        positives=_repeated(keys.positives),
        documents=_repeated(np.concatenate([keys.positives, keys.negatives])),
        rows=_repeated(_row_keys(keys)),
        both=_in_both(keys.positives, keys.negatives),
        contradictions=_in_both(
            _pairs(keys.queries, keys.positives, keys.num_positives),
            _pairs(keys.queries, keys.negatives, keys.num_negatives),
        ),
    )


def _repeated(keys: NDArray[np.generic]) -> Repetition:
    ordered = np.sort(keys)
    same = ordered[1:] == ordered[:-1]
    different = int(np.count_nonzero(same[1:] > same[:-1])) + int(bool(len(same) and same[0]))
    return Repetition(different, int(np.count_nonzero(same)) + different)


def _in_both(first: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    return len(np.intersect1d(first, other)) if len(first) and len(other) else 0


def _row_keys(keys: RowKeys) -> NDArray[np.uint64]:
    """A key of all texts of each row: a sum of hashes, so the order of a row's documents does not count."""
    return (
        random_bits(_QUERY, keys.queries)
        + _sums(random_bits(_POSITIVE, keys.positives), keys.num_positives)
        + _sums(random_bits(_NEGATIVE, keys.negatives), keys.num_negatives)
    )


def _sums(hashes: NDArray[np.uint64], counts: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The sum of each row's hashes, modulo 2^64."""
    running = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    ends = np.cumsum(counts, dtype=np.int64)
    sums: NDArray[np.uint64] = running[ends] - running[ends - counts]
    return sums


def _pairs(queries: NDArray[np.int64], documents: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.uint64]:
    """A key of each document together with its row's query."""
    return random_bits(_PAIR, np.repeat(queries, counts), documents)
