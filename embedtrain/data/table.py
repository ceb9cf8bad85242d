"""All training rows in memory as Arrow arrays: about the bytes of their texts, not Python objects."""

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from embedtrain.data.types import Example, Texts

# Small enough that offsets of 32 bits always do and that little is held twice while a batch is built.
ROWS_A_BATCH = 4096
CHARACTERS_A_BATCH = 1 << 24
SCHEMA = pa.schema(
    [
        ("query", pa.string()),
        ("positives", pa.list_(pa.string())),
        ("negatives", pa.list_(pa.string())),
        ("line", pa.int64()),
    ]
)
# What only some losses need: a batch has those of these columns that any of its rows has.
BESIDES = {
    "positive_scores": pa.list_(pa.float32()),
    "negative_scores": pa.list_(pa.float32()),
    "positive_ids": pa.list_(pa.string()),
    "negative_ids": pa.list_(pa.string()),
    "label": pa.int64(),
    "vectors": pa.list_(pa.list_(pa.float32())),
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows from `start` on come from this file of this source, until the next stretch."""

    start: int
    source: int
    file: str


class ExampleTable(Sequence[Example]):
    """The rows of all sources, source after source; `table[i]` makes an Example of row i.

    Args:
        batches: record batches of SCHEMA, then any of BESIDES.
        stretches: which rows come from which file, in order.
        source_sizes: rows of each source.
    """

    def __init__(self, batches: list[pa.RecordBatch], stretches: list[Stretch], source_sizes: list[int]) -> None:
        self.source_sizes = source_sizes
        self._columns = [batch.columns[: len(SCHEMA)] for batch in batches]
        self._besides = [
            dict(zip(batch.schema.names[len(SCHEMA) :], batch.columns[len(SCHEMA) :], strict=True)) for batch in batches
        ]
        self._stretches = stretches
        self._stretch_starts = [stretch.start for stretch in stretches]
        self._batch_starts: list[int] = []
        self._size = 0
        for batch in batches:
            self._batch_starts.append(self._size)
            self._size += batch.num_rows

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Example:  # type: ignore[override]  # slices would be lists of everything
        if not 0 <= row < self._size:
            raise IndexError(row)
        batch = bisect.bisect_right(self._batch_starts, row) - 1
        at = row - self._batch_starts[batch]
        queries, positives, negatives, lines = self._columns[batch]
        stretch = self._stretches[bisect.bisect_right(self._stretch_starts, row) - 1]
        return Example(
            query=queries[at].as_py(),
            positives=tuple(positives[at].values.to_pylist()),
            negatives=tuple(negatives[at].values.to_pylist()),
            source=stretch.source,
            file=stretch.file,
            line=lines[at].as_py(),
            **{name: _python_value(name, column[at]) for name, column in self._besides[batch].items()},
        )

    def texts(self) -> Iterator[str]:
        """All queries, positives and negatives, as often as they stand in rows, without prompts."""
        for queries, positives, negatives, _ in self._columns:
            for texts in (queries, positives.flatten(), negatives.flatten()):
                yield from texts.to_pylist()

    @property
    def num_bytes(self) -> int:
        """Bytes the rows take in memory."""
        of_batches = (
            [*columns, *besides.values()] for columns, besides in zip(self._columns, self._besides, strict=True)
        )
        return sum(column.nbytes for columns in of_batches for column in columns)


def _python_value(name: str, value: Any) -> Any:
    if name == "label":
        return value.as_py()
    if name == "vectors":
        return tuple(array("f", vector.values.to_numpy().tobytes()) for vector in value.values)
    return tuple(value.as_py())


def _arrow_column(name: str, values: list[Any]) -> pa.Array:
    if name == "vectors":  # numpy's arrays are converted whole, others number by number
        values = [[np.asarray(vector, dtype=np.float32) for vector in vectors] for vectors in values]
    return pa.array(values, type=BESIDES[name])


class TableBuilder:
    """Collects rows into an ExampleTable, batch by batch."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._stretches: list[Stretch] = []
        self._source_sizes: list[int] = []
        self._pending: list[tuple[Texts, int]] = []
        self._pending_characters = 0
        self._size = 0

    def start_source(self) -> None:
        """What follows are rows of the next source."""
        self._source_sizes.append(0)

    def start_file(self, file: str) -> None:
        """What follows are rows of this file of the source."""
        self._stretches.append(Stretch(self._size, len(self._source_sizes) - 1, file))

    def add(self, texts: Texts, line: int) -> None:
        """Add one row of the current file."""
        self._pending.append((texts, line))
        self._pending_characters += len(texts.query) + sum(map(len, texts.positives + texts.negatives))
        self._pending_characters += 4 * sum(map(len, texts.vectors))
        self._size += 1
        self._source_sizes[-1] += 1
        if len(self._pending) >= ROWS_A_BATCH or self._pending_characters >= CHARACTERS_A_BATCH:
            self._flush()

    def finish(self) -> ExampleTable:
        """The table of all rows added."""
        self._flush()
        return ExampleTable(self._batches, self._stretches, self._source_sizes)

    def _flush(self) -> None:
        if not self._pending:
            return
        columns = [
            [texts.query for texts, _ in self._pending],
            [texts.positives for texts, _ in self._pending],
            [texts.negatives for texts, _ in self._pending],
            [line for _, line in self._pending],
        ]
        arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, SCHEMA, strict=True)]
        names = list(SCHEMA.names)
        for name in BESIDES:
            values = [getattr(texts, name) for texts, _ in self._pending]
            if any(value is not None and value != () for value in values):
                names.append(name)
                arrays.append(_arrow_column(name, values))
        self._batches.append(pa.RecordBatch.from_arrays(arrays, names=names))
        self._pending, self._pending_characters = [], 0
