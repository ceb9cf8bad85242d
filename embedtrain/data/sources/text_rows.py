"""Unchecked rows of text files, as (line, row or problem): JSON Lines and JSON, then CSV and TSV."""

import codecs
import contextlib
import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from embedtrain.data.sources.column_roles import has_role
from embedtrain.data.sources.files import MAX_LINE_BYTES, read_blocks, read_lines
from embedtrain.data.sources.values import (
    MAX_COLUMNS,
    BadRow,
    describe_value,
    json_problem,
    list_names,
    not_utf8,
    shorten,
)
from embedtrain.errors import DataError
from embedtrain.utils.formatting import format_bytes, format_count

RawRow: TypeAlias = tuple[int, dict[str, Any] | BadRow]

MAX_JSON_BYTES = 1 << 30  # a file of one JSON value that is held in memory
_TOKEN_LENGTH = 16  # at least that of the longest token besides texts and numbers: -Infinity, an escape
_SPACE = re.compile(r"[ \t\r\n]*")


# JSONL.


def json_rows(path: Path | str) -> Iterator[RawRow]:
    """The rows of a JSONL file. Blank lines are skipped, but counted."""
    for number, line in read_lines(path):
        if line.strip():
            yield number, parse_json_row(line)


def parse_json_row(line: bytes) -> dict[str, Any] | BadRow:
    """The row of a line, or its problem."""
    try:
        row = _DECODER.decode(line.decode("utf-8").rstrip())  # the message about a truncated text would show its \n
    except BadRow as bad:
        return bad
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(line, error.start))
    except json.JSONDecodeError as error:
        if "\r" in error.doc[: error.pos] and error.msg == "Extra data":
            return BadRow("lines that end with a carriage return alone are not read: tr '\\r' '\\n' < FILE > OTHER")
        return BadRow(f"broken JSON: {json_problem(error)} at column {error.colno}: {shorten(error.doc)}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return BadRow(f"JSON that cannot be read ({error})")
    if isinstance(row, dict):
        return row if len(row) <= MAX_COLUMNS else _too_many_keys(row)
    hint = ": write one object per line, not one array per file" if isinstance(row, list) else ""
    return BadRow(f"a row must be a JSON object {{...}}, not {describe_value(row)}{hint}")


def _too_many_keys(row: dict[str, Any]) -> BadRow:
    return BadRow(f"a row with {len(row):,} keys, and at most {MAX_COLUMNS:,} are read")


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):  # the parser would silently keep the last value
        counts = Counter(name for name, _ in pairs)
        raise BadRow(f'this row has "{next(name for name in counts if counts[name] > 1)}" twice')
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_reject_repeated_keys)


# Files of one JSON value.


def is_json_list(name: str) -> bool:
    """Whether a file holds one JSON value over several lines, or a list, and is therefore not JSONL."""
    text = _JsonText(name)
    first = text.next_character()
    if first != "{":
        return first == "["
    if text.begins_with_data():
        return True
    line = text.line
    with contextlib.suppress(BadRow):
        try:
            text.read_value()
        except _BrokenJson as error:
            return error.line > line or error.is_too_long
    return text.line > line


def json_list_rows(name: str) -> Iterator[RawRow]:
    """The elements of the list that a file holds, or of its `data`, numbered from 1; one of them is held in memory."""
    text, number = _JsonText(name), 0
    _enter_list(name, text)
    while text.next_character() != "]":
        number += 1
        try:
            row = text.read_value()
        except BadRow as bad:
            row = bad
        if isinstance(row, dict) and len(row) > MAX_COLUMNS:
            row = _too_many_keys(row)
        problem = None if isinstance(row, dict | BadRow) else describe_value(row)
        yield number, BadRow(f"a row must be a JSON object {{...}}, not {problem}") if problem else row
        if text.next_character() == ",":
            text.skip()
        elif text.next_character() != "]":
            raise text.broken("a comma or ] is missing")


def read_json_text(name: str) -> str:
    """A file of one JSON value as text. Raises DataError if it is larger than 1 GiB or not UTF-8."""
    lines, num_bytes = [], 0
    for number, line in read_lines(name, MAX_JSON_BYTES):
        num_bytes += len(line)
        if num_bytes > MAX_JSON_BYTES:
            raise DataError(
                f"{name}: one JSON value of more than 1 GiB is not read: write one object per line (.jsonl)"
            )
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number}: {not_utf8(line, error.start)}") from error
    return "".join(lines)


def _enter_list(name: str, text: "_JsonText") -> None:
    """Read up to the first element of the list of rows: the value itself, or the one under `data`."""
    if text.next_character() == "[":
        text.skip()
        return
    text.skip()
    keys: list[str] = []
    while text.next_character() == '"':
        try:
            key = text.read_value()
            if text.next_character() != ":":
                raise text.broken("a colon is missing")
            text.skip()
            if text.next_character() == "[" and key == "data":
                text.skip()
                return
            keys.append(key)
            text.read_value()
        except BadRow as error:
            raise text.broken(str(error)) from None
        if text.next_character() != "," or len(keys) > MAX_COLUMNS:
            break
        text.skip()
    raise DataError(
        f'{name}: is one JSON object without a list of rows under "data" (it has: {list_names(keys)}): '
        "write one object per line (.jsonl), or a list of objects"
    )


class _BrokenJson(DataError):
    """A file is not JSON, or a value is too long."""

    def __init__(self, name: str, line: int, problem: str, *, is_too_long: bool = False) -> None:
        super().__init__(f"{name}:{line}: {problem}")
        self.line, self.is_too_long = line, is_too_long


class _JsonText:
    """A file of one JSON value, read from its beginning. Memory holds the current row, not the file."""

    def __init__(self, name: str) -> None:
        self._name, self._blocks = name, read_blocks(name)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._offset = "", 0
        self._first_line = 1  # of the text in memory
        self._is_complete = False

    @property
    def line(self) -> int:
        """The number of the current line."""
        return self._line_at(self._offset)

    def next_character(self) -> str:
        """The next character after whitespace, which is skipped; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._offset)
            assert match is not None
            self._offset = match.end()
            if self._offset < len(self._text) or not self._read():
                return self._text[self._offset : self._offset + 1]

    def skip(self) -> None:
        """Skip the next character."""
        self._offset += 1

    def begins_with_data(self) -> bool:
        """Whether the next value is an object whose first key is `data`, with a list."""
        return re.compile(r'\{\s*"data"\s*:\s*\[').match(self._text, self._offset) is not None

    def read_value(self) -> Any:
        """The next value. Raises BadRow, after the value, if it is an object with repeated keys, else _BrokenJson."""
        decoder, bad = _DECODER, None
        while True:
            problem: Exception | None = None
            end = len(self._text)
            try:
                value, end = decoder.raw_decode(self._text, self._offset)
            except BadRow as error:
                # Only a second reading, without that check, shows where the value ends.
                decoder, bad = json.JSONDecoder(), error
                continue
            except (ValueError, RecursionError) as error:
                problem = error
            may_continue = not self._is_complete and end == len(self._text)
            if problem is not None and not (may_continue and _is_at_end(problem, end)):
                raise self._broken_value(problem)
            if not may_continue:
                self._offset = end
                if bad is not None:
                    raise bad
                return value
            length = end - self._offset
            if length > MAX_LINE_BYTES:
                limit = format_bytes(MAX_LINE_BYTES)
                raise _BrokenJson(self._name, self.line, f"a value of more than {limit} is not read", is_too_long=True)
            self._read(min(length, MAX_LINE_BYTES - length))

    def broken(self, problem: str, offset: int | None = None) -> _BrokenJson:
        """The error about the text at the current character, or at another one in memory."""
        offset = self._offset if offset is None else offset
        excerpt = shorten(self._text[max(0, offset - 20) : offset + 20])
        return _BrokenJson(self._name, self._line_at(offset), f"broken JSON: {problem}: {excerpt}")

    def _broken_value(self, error: Exception) -> _BrokenJson:
        if isinstance(error, json.JSONDecodeError):
            return self.broken(json_problem(error), error.pos)
        return self.broken(str(error))

    def _line_at(self, offset: int) -> int:
        return self._first_line + self._text.count("\n", 0, offset)

    def _read(self, num_characters: int = 0) -> bool:
        """Forget what was read before the current character, and read about this many more; False at the end."""
        self._first_line = self.line
        texts = [self._text[self._offset :]]
        self._offset, length = 0, 0
        while not self._is_complete and length <= num_characters:
            block = next(self._blocks, b"")
            self._is_complete = not block
            try:
                texts.append(self._decoder.decode(block, final=not block))
            except UnicodeDecodeError as error:
                line = self._first_line + sum(text.count("\n") for text in texts)
                line += bytes(error.object[: error.start]).count(b"\n")
                raise DataError(f"{self._name}:{line}: {not_utf8(error.object, error.start)}") from error
            length += len(texts[-1])
        self._text = "".join(texts)
        return length > 0


def _is_at_end(error: Exception, end: int) -> bool:
    """Whether a value may be correct that is broken at the end of the text in memory, and continues in the file."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= end - _TOKEN_LENGTH


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
