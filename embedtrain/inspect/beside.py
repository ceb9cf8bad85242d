"""What lies beside the texts of a source's rows, in figures: scores, classes, vectors, instructions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.data.cache.row_table import EXTRA_COLUMNS, RowStore

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
    if "vectors" in store.beside:
        vectors = store[0].vectors
        found.width = len(vectors[0]) if vectors else None
    if not store.beside & (EXTRA_COLUMNS.keys() - {"vectors", "most_negatives"}):
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
