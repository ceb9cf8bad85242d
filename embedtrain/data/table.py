"""All training rows in memory as Arrow arrays: about the bytes of their texts, not Python objects."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from embedtrain.data.layouts import Texts
from embedtrain.data.types import Example

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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows from `start` on come from this file of this source, until the next stretch."""

    start: int
    source: int
    file: str


class ExampleTable(Sequence[Example]):
    """The rows of all sources, source after source; `table[i]` makes an Example of row i.

    Args:
        batches: record batches of SCHEMA.
        stretches: which rows come from which file, in order.
        source_sizes: rows of each source.
    """

    def __init__(self, batches: list[pa.RecordBatch], stretches: list[Stretch], source_sizes: list[int]) -> None:
        self.source_sizes = source_sizes
        self._columns = [batch.columns for batch in batches]
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
        )

    def texts(self) -> Iterator[str]:
        """All queries, positives and negatives, as often as they stand in rows, without prompts."""
        for queries, positives, negatives, _ in self._columns:
            for array in (queries, positives.flatten(), negatives.flatten()):
                yield from array.to_pylist()

    @property
    def num_bytes(self) -> int:
        """Bytes the texts take in memory."""
        return sum(column.nbytes for columns in self._columns for column in columns)


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
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        self._pending, self._pending_characters = [], 0
