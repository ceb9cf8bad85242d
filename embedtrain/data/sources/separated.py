"""Rows of CSV and TSV files, unchecked -> (line, row or problem); none is lost to a stray quotation mark unsaid."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedtrain.data.sources.problems import BadRow, counted, not_utf8, shorten
from embedtrain.data.sources.streams import lines_of
from embedtrain.errors import DataError


class PlainTsv(csv.excel_tab):
    """Tab-separated values as data sets publish them: a quotation mark is a character like any other."""

    quoting = csv.QUOTE_NONE


def table_rows(path: Path | str, dialect: type[csv.Dialect]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a CSV or TSV file with a header. An empty cell is None; a row's number is its first line's.

    Raises:
        DataError: no header, or a header with a name that is empty or given twice; or quotation marks that do not
            fit together over several lines, since the rows between them would be lost.
    """
    # The default limit of 128 KiB a cell is less than a long document. It is the process's, and harmless.
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(path)
    reader = csv.reader(lines, dialect, strict=True)
    header: list[str] | None = None
    while True:
        first = lines.number + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = lines.quotes_astray(first, error)
            if lines.number > first or header is None:
                raise DataError(f"{path}:{first}: {problem}") from None
            yield first, BadRow(problem)
            continue
        wrong = lines.wrong_bytes()
        if not cells:
            continue
        if header is None:
            header = _header(path, cells, wrong)
        elif len(cells) != len(header):
            problem = f"{counted(len(cells), 'cell')} where the header has {len(header)}"
            if lines.number > first:
                raise DataError(
                    f"{path}:{first}: lines {first} to {lines.number} make one row, for what lies between quotation "
                    f"marks is one cell, and it has {problem}: mend the quotation marks"
                )
            yield first, BadRow(wrong or f"{problem}: {shorten(cells)}")
        elif wrong:
            yield first, BadRow(wrong)
        else:
            yield first, {name: cell or None for name, cell in zip(header, cells, strict=True)}


class _Lines:
    """A file's lines as text, and what is known of those that were read.

    Attributes:
        number: of the last line that was read.
    """

    def __init__(self, path: Path | str) -> None:
        self.number = 0
        self._lines = lines_of(path)
        self._wrong = ""
        self._is_over = False
        self._opened: list[int] = [0, 0]  # the last two lines on which a quoted cell may have begun

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines, (0, b""))
        if not number:
            self._is_over = True
            raise StopIteration
        self.number = number
        # Within a quoted cell two marks are one character of it.
        if b'"' in line and b'"' in line.replace(b'""', b""):
            self._opened = [self._opened[1], number]
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self._wrong = self._wrong or not_utf8(line, error.start)
            return line.decode("utf-8", "replace")

    def wrong_bytes(self) -> str:
        """What is wrong with the bytes of the lines that were read since this was asked last; "" for nothing."""
        wrong, self._wrong = self._wrong, ""
        return wrong

    def quotes_astray(self, first: int, error: csv.Error) -> str:
        """The sentence about a row, from line `first` to the last that was read, whose cells cannot be told apart."""
        self.wrong_bytes()
        last = self.number
        if not self._is_over and last == first:
            return f"broken CSV: {error}"
        # Where the row breaks off at a mark in the middle of the file, it is an earlier one that opened the cell.
        opened = self._opened[1] if self._is_over or self._opened[1] < last else self._opened[0]
        opened = max(opened, first)
        mark = f"a quotation mark that opens on line {opened}"
        if opened == last:
            return f"broken CSV: {error}: {mark} never closes"
        ends = "never closes" if self._is_over else f"closes in the middle of a cell on line {last}"
        return f"broken CSV: {mark} {ends} (it swallows lines {opened} to {last})"


def _header(path: Path | str, cells: list[str], problem: str) -> list[str]:
    if problem:
        raise DataError(f"{path}:1: {problem}")
    if len(set(cells)) < len(cells):
        raise DataError(f"{path}:1: the header names a column twice: {shorten(cells)}")
    if "" in cells:
        raise DataError(
            f"{path}:1: column {cells.index('') + 1} of the header has no name: "
            "leave the column out (pandas: to_csv(..., index=False)) or give it a name"
        )
    return cells
