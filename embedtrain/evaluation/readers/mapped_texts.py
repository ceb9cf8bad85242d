"""Texts that lie in Arrow files mapped into memory: a sequence like any other, of which no process holds a copy."""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# Texts made Python objects at a time while all are gone through.
_AT_ONCE = 1024


class MappedTexts(Sequence[str]):
    """Texts of a column, or of some of its rows.

    Args:
        column: texts without nulls; what is mapped stays mapped.
        rows: int64 [n], which rows are meant, in which order; None: all.
    """

    def __init__(self, column: pa.ChunkedArray, rows: NDArray[np.int64] | None = None) -> None:
        self._column = column
        self._rows = rows
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = [0, *np.cumsum([len(chunk) for chunk in self._chunks]).tolist()]

    def __len__(self) -> int:
        return len(self._column) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        row = number if self._rows is None else int(self._rows[number])
        chunk = bisect_right(self._starts, row) - 1
        text: str = self._chunks[chunk][row - self._starts[chunk]].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        if self._rows is not None:
            return (self[number] for number in range(len(self._rows)))
        return (
            text
            for chunk in self._chunks
            for start in range(0, len(chunk), _AT_ONCE)
            for text in chunk.slice(start, _AT_ONCE).to_pylist()
        )

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.ChunkedArray:
        """What `pyarrow.array` makes of it: the column itself where all of it is meant."""
        if self._rows is not None:
            return pa.chunked_array([pa.array(list(self), type or self._column.type)])
        return self._column if type is None else self._column.cast(type)

    def __reduce__(self) -> Any:
        raise TypeError("texts of a mapped file are not sent to other processes, which map it themselves")

    def select_texts(self, rows: NDArray[np.int64]) -> "MappedTexts":
        """Some of the texts, int64 [m] of their numbers, without reading them."""
        return MappedTexts(self._column, rows if self._rows is None else self._rows[rows])


def select_texts(texts: Sequence[str], rows: Sequence[int]) -> Sequence[str]:
    """Some of the texts, by their numbers: those that are mapped stay so."""
    if isinstance(texts, MappedTexts):
        return texts.select_texts(np.asarray(rows, dtype=np.int64))
    return [texts[row] for row in rows]
