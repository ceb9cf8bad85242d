"""The rows of one source on disk, as memory-mapped Arrow files."""

import bisect
import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.source_report import SourceReport
from embedtrain.data.texts import Texts
from embedtrain.data.types import Example
from embedtrain.errors import DataError

TEXTS = {
    "query": pa.string(),
    "positives": pa.list_(pa.string()),
    "negatives": pa.list_(pa.string()),
    "line": pa.int64(),  # line in the piece of the file
}
MAX_NEGATIVES = "most_negatives"  # the column of `Example.max_negatives`; the name is part of the cache's format
# Optional columns: a file has those that any of its rows has.
EXTRA_COLUMNS = {
    "positive_scores": pa.list_(pa.float32()),
    "negative_scores": pa.list_(pa.float32()),
    "positive_ids": pa.list_(pa.string()),
    "negative_ids": pa.list_(pa.string()),
    "label": pa.int64(),
    "vectors": pa.list_(pa.list_(pa.float32())),
    "instruction": pa.string(),
    "document_instruction": pa.string(),
    MAX_NEGATIVES: pa.int32(),
}
MAX_OPEN_BATCHES = 4096  # their offsets in the map, not their rows
SCALAR_COLUMNS = {"label", "instruction", "document_instruction", MAX_NEGATIVES}  # one value or null per row


def field_name(column: str) -> str:
    """The field of Example that holds an optional column."""
    return "max_negatives" if column == MAX_NEGATIVES else column


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows from `start` to the next range come from this part of the source."""

    start: int
    part: int
    lines_before: int  # lines of the part before this range, from which line numbers count


@dataclass(frozen=True, slots=True)
class ArrowFile:
    """One file of rows: its path below the store's directory, and the rows and bytes of each of its batches."""

    path: str
    rows: tuple[int, ...]
    num_bytes: tuple[int, ...]


class ArrowRows:
    """Rows in memory-mapped Arrow files, which are in the order of their rows.

    Attributes:
        batch_starts: int64 [batches + 1], the first row of each batch, and the number of all rows.
    """

    def __init__(self, directory: Path, files: Sequence[ArrowFile]) -> None:
        try:
            self._readers = [pa.ipc.open_file(pa.memory_map(str(directory / file.path))) for file in files]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{directory}: cached rows cannot be opened: {error}") from error
        # For each batch: its file and its index in the file; its first row; its size in bytes.
        numbers = [(i, j) for i, file in enumerate(files) for j in range(len(file.rows))]
        self._indices = np.array(numbers, dtype=np.int64).reshape(-1, 2)
        self.batch_starts = np.cumsum([0, *(rows for file in files for rows in file.rows)], dtype=np.int64)
        self.batch_bytes = np.array([size for file in files for size in file.num_bytes], dtype=np.int64)
        # Opening a batch makes the system read it ahead, which takes ten times as long as reading a row.
        self.batch = functools.lru_cache(MAX_OPEN_BATCHES)(self._batch)

    def _batch(self, batch: int) -> pa.RecordBatch:
        """One batch: the columns of TEXTS, and the EXTRA_COLUMNS that its file has."""
        file, index = self._indices[batch].tolist()
        return self._readers[file].get_batch(index)

    def row(self, row: int) -> tuple[Texts, int]:
        """The row, and its line in its piece of the file."""
        number = int(self.batch_starts.searchsorted(row, side="right")) - 1
        index, batch = row - int(self.batch_starts[number]), self.batch(number)
        queries, positives, negatives, lines, *extra = batch.columns
        names = batch.schema.names[len(TEXTS) :]
        texts = Texts(
            queries[index].as_py(),
            tuple(positives[index].values.to_pylist()),
            tuple(negatives[index].values.to_pylist()),
            0,
            **{field_name(name): _python_value(name, column[index]) for name, column in zip(names, extra, strict=True)},
        )
        return texts, lines[index].as_py()


def _python_value(name: str, value: Any) -> Any:
    if name in SCALAR_COLUMNS:
        return value.as_py()
    if not value.is_valid:
        return ()
    if name == "vectors":
        return tuple(array("f", vector.values.to_numpy().tobytes()) for vector in value.values)
    return tuple(value.as_py())


@dataclass(frozen=True, eq=False)
class RowStore(Sequence[Example]):
    """The rows of one source; `store[i]` is row i as an Example, with its file and line.

    Attributes:
        key: a digest of the source's files and of all options that affect its rows.
        content: a digest of the rows in their order, independent of files and formats.
        source: index in `data.train`.
        files: names of the source's parts for messages.
        extra_columns: the EXTRA_COLUMNS that any row has.
        num_positives: int32 [R]; 0 for rows of one text.
        num_negatives: int32 [R], hard negatives.
        max_negatives: int32 [R], maximal number of negatives that a step uses, -1 for all; None if no row has a limit.
    """

    directory: Path
    key: str
    content: str
    source: int
    report: SourceReport
    files: Sequence[str]
    row_ranges: Sequence[RowRange]
    rows: ArrowRows
    extra_columns: frozenset[str]
    num_positives: NDArray[np.int32]
    num_negatives: NDArray[np.int32]
    max_negatives: NDArray[np.int32] | None
    owner: Any = field(default=None, repr=False)  # must live as long as the store

    def __len__(self) -> int:
        return len(self.num_positives)

    def __getitem__(self, row: int) -> Example:  # type: ignore[override]  # slices would be lists of everything
        if not 0 <= row < len(self):
            raise IndexError(row)
        texts, line = self.rows.row(row)
        row_range = self.row_ranges[bisect.bisect_right(self.row_ranges, row, key=attrgetter("start")) - 1]
        return Example(
            texts.query,
            texts.positives,
            texts.negatives,
            source=self.source,
            file=self.files[row_range.part],
            line=row_range.lines_before + line,
            **{field_name(name): getattr(texts, field_name(name)) for name in self.extra_columns},
        )

    @property
    def num_bytes(self) -> int:
        """Size of the mapped rows in bytes."""
        counts = (self.num_positives, self.num_negatives, self.max_negatives)
        return int(np.sum(self.rows.batch_bytes)) + sum(count.nbytes for count in counts if count is not None)

    def texts(self) -> Iterator[str]:
        """All queries, positives and negatives of all rows, including duplicates, without prompts."""
        for i in range(len(self.rows.batch_starts) - 1):
            queries, positives, negatives = self.rows.batch(i).columns[:3]
            for texts in (queries, positives.flatten(), negatives.flatten()):
                yield from texts.to_pylist()
