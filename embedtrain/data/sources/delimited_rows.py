"""Unchecked rows of CSV and TSV files: the delimiter and the use of quotation marks are detected from the beginning."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from embedtrain.data.sources.column_roles import has_role
from embedtrain.data.sources.files import MAX_LINE_BYTES, read_lines
from embedtrain.data.sources.text_rows import RawRow
from embedtrain.data.sources.values import MAX_COLUMNS, BadRow, not_utf8, shorten
from embedtrain.errors import DataError
from embedtrain.utils.formatting import format_bytes, format_count

DETECTION_BYTES = 1 << 16  # of a file that decide about its delimiter and quotation marks
_DELIMITERS = ",;\t|"
_MAX_NAME_WORDS = 6  # a longer cell of the first line is a text, not the name of a column
_MAX_NAME_LENGTH = 64
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]+')  # Excel's first line, before the header
_LINE_END = re.compile(rb"[\r\n]+")


class _Csv(csv.excel):
    """Comma-separated values, or with another delimiter: a cell in quotation marks may hold anything."""


class _PlainTsv(csv.excel_tab):
    """Tab-separated values as data sets publish them: a quotation mark is an ordinary character."""

    quoting = csv.QUOTE_NONE


def delimited_rows(
    path: Path | str, delimiter: str, columns: Sequence[str] | None = None, *, backslash_escapes: bool = False
) -> Iterator[RawRow]:
    """The rows of a CSV or TSV file with a header. An empty cell is None; a row's number is that of its first line.

    `delimiter` is what the file's name says; another of comma, semicolon, tab and vertical bar is used where the header
    has only that, or that of Excel's line `sep=;` before the header. Empty rows, and empty cells of columns without a
    name at the end, are left out. With `columns`, those that are used, cells without a name may hold anything. With
    `backslash_escapes`, a backslash takes its meaning from a quotation mark, a delimiter, a line break or a backslash
    after it. Raises DataError if the header is missing or has a repeated name, or if quotation marks do not match over
    several lines, since the rows between them would be lost.
    """
    # A long document exceeds the default limit of 128 KiB per cell. The setting is the process's, and harmless.
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(path)
    beginning = lines.beginning(DETECTION_BYTES)
    if separator := _SEPARATOR_LINE.match(beginning):
        delimiter, beginning = separator[1], beginning[separator.end() :]
        next(lines)
    dialect = detect_dialect(beginning, delimiter)
    reader = _cell_lists(lines, dialect, backslash_escapes=backslash_escapes)
    header: list[str] | None = None
    unnamed: list[int] = []
    while True:
        first = lines.begin_row()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = lines.unparsed(first, error) + lines.escape_hint(backslash_escapes=backslash_escapes)
            if lines.number > first or header is None:
                raise DataError(f"{path}:{first}: {problem}") from None
            yield first, BadRow(problem)
            continue
        encoding_problem = lines.take_encoding_problem()
        if not any(cells):
            continue
        if header is None:
            header = _check_header(f"{path}:{first}", cells, encoding_problem, dialect.delimiter)
            # The first column without a name is the index that pandas writes.
            unnamed = [] if columns is not None else [i for i, name in enumerate(header) if i and not name]
            continue
        if len(cells) != len(header):
            cells = _without_empty_ends(cells, header)
        if len(cells) != len(header):
            problem = f"{format_count(len(cells), 'cell')} where the header has {len(header)}"
            hint = lines.escape_hint(backslash_escapes=backslash_escapes)
            if lines.number > first:
                raise DataError(
                    f"{path}:{first}: lines {first} to {lines.number} make one row, since the text between quotation "
                    f"marks is one cell, and it has {problem}: correct the quotation marks{hint}"
                )
            yield first, BadRow(encoding_problem or f"{problem}: {shorten(cells)}{hint}")
        elif encoding_problem:
            yield first, BadRow(encoding_problem)
        elif unnamed and any(cells[i] for i in unnamed):
            number = next(i for i in unnamed if cells[i])
            yield (
                first,
                BadRow(
                    f"column {number + 1} of the header has no name, and this row has {shorten(cells[number])} there: "
                    "give the column a name, or remove it"
                ),
            )
        else:
            yield first, {name: cell or None for name, cell in zip(header, cells, strict=True) if name}


def _cell_lists(lines: Iterator[str], dialect: type[csv.Dialect], *, backslash_escapes: bool) -> Iterator[list[str]]:
    """The cells of each row."""
    if backslash_escapes:
        escaping = type("Escaping", (dialect,), {"escapechar": "\\"})
        return csv.reader(_with_literal_backslashes(lines, dialect.delimiter), escaping, strict=True)
    if dialect.quoting == csv.QUOTE_NONE:  # csv.reader refuses a carriage return within a text
        return (line.rstrip("\r\n").split(dialect.delimiter) for line in lines)
    return csv.reader(lines, dialect, strict=True)


def _with_literal_backslashes(lines: Iterator[str], delimiter: str) -> Iterator[str]:
    r"""Lines for csv.reader, which removes every backslash: Spark writes those of `C:\new` and `\alpha` as they are.

    MySQL's `\N`, a cell without a value, becomes an empty cell.
    """
    escape = re.compile(rf'\\([\\"\r\n{re.escape(delimiter)}])?')
    no_value = re.compile(rf"(^|{re.escape(delimiter)})\\N(?={re.escape(delimiter)}|[\r\n]|$)")
    for line in lines:
        yield escape.sub(lambda match: match[0] if match[1] else r"\\", no_value.sub(r"\1", line))


def _without_empty_ends(cells: list[str], header: Sequence[str]) -> list[str]:
    """The cells as many as the header's, where what differs is empty: spreadsheets write delimiters at the end."""
    if not any(cells[len(header) :]) and not any(header[len(cells) :]):
        return [*cells[: len(header)], *[""] * (len(header) - len(cells))]
    return cells


def detect_dialect(beginning: str, delimiter: str) -> type[csv.Dialect]:
    """The delimiter and the use of quotation marks, from the beginning of a file.

    The header decides about the delimiter: it holds names, and csv.Sniffer is often misled by the punctuation of texts.
    Quotation marks of a tab-separated file are those of a spreadsheet only where all of them match and enclose what
    needs them; otherwise they are characters of the text.
    """
    lines = beginning.splitlines(keepends=True)
    header = next((line for line in lines if line.strip()), "")
    if len(_cells(header, delimiter)) == 1:
        counts = {other: len(_cells(header, other)) for other in _DELIMITERS}
        best = max(_DELIMITERS, key=lambda other: (counts[other], _num_matching(lines, other, counts[other])))
        delimiter = best if counts[best] > 1 else delimiter
    if delimiter == "\t" and not _is_quoted_tsv(beginning, header):
        return _PlainTsv
    return type("Detected", (_Csv,), {"delimiter": delimiter})


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:
        return [""]


def _num_matching(lines: Sequence[str], delimiter: str, count: int) -> int:
    return sum(len(_cells(line, delimiter)) == count for line in lines[:100])


def _is_quoted_tsv(beginning: str, header: str) -> bool:
    if '"' not in beginning:
        return False
    rows: list[list[str]] = []
    try:
        rows += csv.reader(io.StringIO(beginning, newline=""), csv.excel_tab, strict=True)
    except csv.Error as error:
        if "unexpected end of data" not in str(error):  # the beginning may end within a cell
            return False
    rows = [row for row in rows if row]
    if any(len(row) != len(rows[0]) for row in rows[:-1]):
        return False
    names = header.rstrip("\r\n").split("\t")
    if len(names) > 1 and all(len(name) > 1 and name[0] == name[-1] == '"' for name in names):
        return True
    special = [cell for row in rows for cell in row if any(mark in cell for mark in '"\t\n')]
    return any('"' + cell.replace('"', '""') + '"' in beginning for cell in special)


class _Lines:
    """The lines of a file as text. `number` is that of the last line read."""

    def __init__(self, path: Path | str) -> None:
        self.number = 0
        self._path, self._first, self._row_bytes = path, 1, 0
        self._lines = read_lines(path)
        self._encoding_problem = ""
        self._is_exhausted = False
        self._quote_lines: list[int] = [0, 0]  # the last two lines on which a quoted cell may have begun
        self._has_escape = False  # the row has a backslash before a quotation mark

    def beginning(self, num_bytes: int) -> str:
        """About the first `num_bytes` of the file, in whole lines, which are read again afterwards."""
        read: list[tuple[int, bytes]] = []
        problem: DataError | None = None
        try:
            while num_bytes > 0 and (entry := next(self._lines, None)) is not None:
                read.append(entry)
                num_bytes -= len(entry[1])
        except DataError as error:  # raised again after the rows before it
            problem = error
        self._lines = _chained(read, self._lines, problem)
        beginning = b"".join(line for _, line in read)
        line_end = _LINE_END.search(beginning)
        if line_end is not None and b"\n" not in line_end[0]:  # Excel's "CSV (Macintosh)"
            self._lines = _at_carriage_returns(self._lines)
        return beginning.decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines, (0, b""))
        if not number:
            self._is_exhausted = True
            raise StopIteration
        self.number = number
        self._row_bytes += len(line)
        if self._row_bytes > MAX_LINE_BYTES:
            raise DataError(
                f"{self._path}:{self._first}: a row of more than {format_bytes(MAX_LINE_BYTES)} (up to line {number}) "
                "is not read: correct the quotation marks"
            )
        # Within a quoted cell two quotation marks are one character of it.
        if b'"' in line:
            self._has_escape = self._has_escape or b'\\"' in line
            if b'"' in line.replace(b'""', b""):
                self._quote_lines = [self._quote_lines[1], number]
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self._encoding_problem = self._encoding_problem or not_utf8(line, error.start)
            return line.decode("utf-8", "replace")

    def begin_row(self) -> int:
        """The number of the line on which the next row begins."""
        self._first, self._row_bytes = self.number + 1, 0
        self._has_escape = False
        return self._first

    def take_encoding_problem(self) -> str:
        """The problem with the bytes of the lines read since the last call; "" for none."""
        problem, self._encoding_problem = self._encoding_problem, ""
        return problem

    def escape_hint(self, *, backslash_escapes: bool) -> str:
        """The option to write where the row has a backslash before a quotation mark; "" elsewhere."""
        if backslash_escapes or not self._has_escape:
            return ""
        return f"; if backslashes escape quotation marks, write {{path: {self._path}, backslash_escapes: true}}"

    def unparsed(self, first: int, error: csv.Error) -> str:
        """The message about the row from line `first` to the last line read, whose cells cannot be parsed."""
        self.take_encoding_problem()
        last = self.number
        if "new-line character" in str(error):
            return (
                "broken CSV: a carriage return within a cell without quotation marks: put the cell in quotation marks, "
                "or remove the carriage return"
            )
        if not self._is_exhausted and last == first:
            return f"broken CSV: {error}"
        # Where the row breaks off at a mark in the middle of the file, an earlier mark opened the cell.
        last_mark, mark_before = self._quote_lines[1], self._quote_lines[0]
        opened = max(first, last_mark if self._is_exhausted or last_mark < last else mark_before)
        mark = f"a quotation mark that opens on line {opened}"
        if opened == last:
            return f"broken CSV: {error}: {mark} never closes"
        end = "never closes" if self._is_exhausted else f"closes in the middle of a cell on line {last}"
        return f"broken CSV: {mark} {end} (it swallows lines {opened} to {last})"


def _chained(
    first: Sequence[tuple[int, bytes]], rest: Iterator[tuple[int, bytes]], problem: DataError | None
) -> Iterator[tuple[int, bytes]]:
    yield from first
    if problem is not None:
        raise problem
    yield from rest


def _at_carriage_returns(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    return enumerate((part for _, line in lines for part in line.splitlines(keepends=True)), 1)


def _check_header(location: str, cells: list[str], encoding_problem: str, delimiter: str) -> list[str]:
    if encoding_problem:
        raise DataError(f"{location}: {encoding_problem}")
    if len(cells) > MAX_COLUMNS:
        raise DataError(f"{location}: {len(cells):,} columns; at most {MAX_COLUMNS:,} are read")
    if cells[0].startswith('{"') or cells[0].lstrip().startswith("{'"):
        raise DataError(f"{location}: this file holds JSON, not rows of cells: rename it to .jsonl")
    if (text := _text_in_header(cells)) is not None:
        names = delimiter.join(
            ["query", "positive", *(f"negative_{i}" for i in range(1, len(cells) - 1))][: len(cells)]
        )
        raise DataError(
            f"{location}: this file has no header, since its first line holds a text, {shorten(text)}: add a first "
            f"line with the names of the columns, such as {names!r}"
        )
    named = [name for name in cells if name]
    if len(set(named)) < len(named):
        raise DataError(f"{location}: the header names a column twice: {shorten(cells)}")
    return cells


def _text_in_header(cells: Sequence[str]) -> str | None:
    """A cell of the first line that is a text and not the name of a column; None where one has a known name."""
    if any(has_role(cell) for cell in cells if cell):
        return None
    for cell in cells:
        stripped = cell.strip()
        is_sentence = stripped.endswith((".", "?", "!", "。", "？", "！")) and (" " in stripped or not cell.isascii())
        if is_sentence or len(stripped) > _MAX_NAME_LENGTH or len(stripped.split()) > _MAX_NAME_WORDS:
            return cell
    return None
