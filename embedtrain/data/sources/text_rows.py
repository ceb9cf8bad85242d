"""Unchecked rows of JSONL and JSON files, as (line, row or problem)."""

import codecs
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

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
from embedtrain.utils.formatting import format_bytes

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
