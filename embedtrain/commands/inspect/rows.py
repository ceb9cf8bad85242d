"""Extra columns and duplicates of training rows.

R: rows; P, N: positives and negatives of all rows, row by row.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.data.cache.row_store import EXTRA_COLUMNS, RowStore
from embedtrain.data.sampling.permutation import random_bits

MAX_INSTRUCTIONS = 1_000  # distinct instructions that are counted


@dataclass(slots=True)
class ExtraColumns:
    """Statistics of the extra columns of a source."""

    scores: tuple[int, float, float, float] | None = None  # number, minimum, maximum, sum
    labels: Counter[int] = field(default_factory=Counter)  # rows of each class
    instructions: Counter[str] = field(default_factory=Counter)  # rows with each instruction for queries
    document_instructions: Counter[str] = field(default_factory=Counter)
    more_instructions: int = 0  # rows with further instructions, beyond MAX_INSTRUCTIONS
    width: int | None = None  # dimension of a teacher's vectors


def summarise_extra_columns(store: RowStore) -> ExtraColumns:
    """Statistics of the extra columns of a source."""
    extra = ExtraColumns()
    if "vectors" in store.extra_columns:
        vectors = store[0].vectors
        extra.width = len(vectors[0]) if vectors else None
    if not store.extra_columns & (EXTRA_COLUMNS.keys() - {"vectors", "max_negatives"}):
        return extra
    for batch in batches_of(store):
        names = set(batch.schema.names)
        if "positive_scores" in names:
            parts = [batch.column(name).flatten() for name in ("positive_scores", "negative_scores") if name in names]
            values = np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])
            extra.scores = _scores(extra.scores, values)
        if "label" in names:
            extra.labels.update(batch.column("label").drop_null().to_pylist())
        for name, counter in (
            ("instruction", extra.instructions),
            ("document_instruction", extra.document_instructions),
        ):
            if name in names:
                extra.more_instructions += _count(counter, batch.column(name))
    return extra


def batches_of(store: RowStore) -> Iterator[pa.RecordBatch]:
    """All rows in batches of columns."""
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
    """Count the instructions of some rows; returns the number of rows with an instruction beyond the limit."""
    left_out = 0
    for item in pc.value_counts(column.drop_null()).to_pylist():
        if item["values"] in counter or len(counter) < MAX_INSTRUCTIONS:
            counter[item["values"]] += item["counts"]
        else:
            left_out += item["counts"]
    return left_out


_QUERY, _POSITIVE, _NEGATIVE, _PAIR = 1, 2, 3, 4  # kinds of keys, hashed with them


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of the texts of rows; see data/keys.py."""

    queries: NDArray[np.int64]  # [R]
    positives: NDArray[np.int64]  # [P]
    negatives: NDArray[np.int64]  # [N]
    num_positives: NDArray[np.integer]  # [R]
    num_negatives: NDArray[np.integer]  # [R]

    @classmethod
    def join(cls, parts: Sequence["RowKeys"]) -> "RowKeys":
        """The concatenated rows of several sources."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, key.name) for part in parts]) for key in fields(cls)))


@dataclass(frozen=True, slots=True)
class Repetition:
    """Items that occur more than once: the number of distinct items, and of their occurrences."""

    distinct: int
    occurrences: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Texts and rows that occur several times."""

    queries: Repetition
    positives: Repetition
    documents: Repetition  # positives and negatives
    rows: Repetition  # with all texts equal, in any order of documents
    both: int  # documents that are a positive in one row and a negative in another
    contradictions: int  # pairs of query and document that are positive in one row and negative in another


def duplicates_in(keys: RowKeys) -> Duplicates:
    """Texts and rows that occur several times in these rows."""
    return Duplicates(
        queries=_count_repetitions(keys.queries),
        positives=_count_repetitions(keys.positives),
        documents=_count_repetitions(np.concatenate([keys.positives, keys.negatives])),
        rows=_count_repetitions(_row_keys(keys)),
        both=_in_both(keys.positives, keys.negatives),
        contradictions=_in_both(
            _pairs(keys.queries, keys.positives, keys.num_positives),
            _pairs(keys.queries, keys.negatives, keys.num_negatives),
        ),
    )


def _count_repetitions(keys: NDArray[np.generic]) -> Repetition:
    ordered = np.sort(keys)
    same = ordered[1:] == ordered[:-1]
    distinct = int(np.count_nonzero(same[1:] > same[:-1])) + int(bool(len(same) and same[0]))
    return Repetition(distinct, int(np.count_nonzero(same)) + distinct)


def _in_both(first: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    return len(np.intersect1d(first, other)) if len(first) and len(other) else 0


def _row_keys(keys: RowKeys) -> NDArray[np.uint64]:
    """A key of all texts of each row: a sum of hashes, so the order of a row's documents does not matter."""
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
