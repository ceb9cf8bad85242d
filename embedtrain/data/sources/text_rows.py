"""Unchecked rows of JSONL and JSON files, as (line, row or problem)."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from embedtrain.data.sources.files import read_lines
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

RawRow: TypeAlias = tuple[int, dict[str, Any] | BadRow]

MAX_JSON_BYTES = 1 << 30  # a file of one JSON value is held in memory
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
    first = next((line.strip() for _, line in read_lines(name, MAX_JSON_BYTES) if line.strip()), b"")
    if first.startswith(b"[") or re.match(rb'\{\s*"data"\s*:\s*\[', first):
        return True
    try:
        json.loads(first.decode("utf-8"))
    except UnicodeDecodeError:
        return False
    except json.JSONDecodeError as error:  # an object that continues on the next line
        return first.startswith(b"{") and error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def json_list_rows(name: str) -> Iterator[RawRow]:
    """The elements of the list that a file of at most 1 GiB holds, or of its `data`, numbered from 1."""
    text = read_json_text(name)
    offset = _skip_space(text, _list_start(name, text) + 1)
    number = 0
    while text[offset : offset + 1] != "]":
        number += 1
        try:
            row, offset = _DECODER.raw_decode(text, offset)
        except BadRow as bad:
            yield number, bad
            # Only a second reading, without that check, tells where the row ends.
            _, offset = json.JSONDecoder().raw_decode(text, offset)
        except (ValueError, RecursionError) as error:
            raise _broken_json_error(name, text, error, offset) from error
        else:
            if isinstance(row, dict) and len(row) > MAX_COLUMNS:
                row = _too_many_keys(row)
            problem = None if isinstance(row, dict | BadRow) else describe_value(row)
            yield number, BadRow(f"a row must be a JSON object {{...}}, not {problem}") if problem else row
        offset = _skip_space(text, offset)
        if text[offset : offset + 1] == ",":
            offset = _skip_space(text, offset + 1)
        elif text[offset : offset + 1] != "]":
            raise _broken_json_error(name, text, ValueError("a comma or ] is missing"), offset)


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


def _list_start(name: str, text: str) -> int:
    """The offset of the list of rows: the value itself, or the one under `data`."""
    offset = _skip_space(text, 0)
    if text[offset] == "[":
        return offset
    offset = _skip_space(text, offset + 1)
    keys: list[str] = []
    try:
        while text[offset : offset + 1] == '"':
            key, offset = _DECODER.raw_decode(text, offset)
            offset = _skip_space(text, offset)
            if text[offset : offset + 1] != ":":
                raise ValueError("a colon is missing")
            offset = _skip_space(text, offset + 1)
            if key == "data" and text[offset : offset + 1] == "[":
                return offset
            keys.append(key)
            _, offset = _DECODER.raw_decode(text, offset)
            offset = _skip_space(text, offset)
            if text[offset : offset + 1] != ",":
                break
            offset = _skip_space(text, offset + 1)
    except (ValueError, RecursionError, BadRow) as error:
        raise _broken_json_error(name, text, error, offset) from error
    raise DataError(
        f'{name}: is one JSON object without a list of rows under "data" (it has: {list_names(keys)}): '
        "write one object per line (.jsonl), or a list of objects"
    )


def _skip_space(text: str, offset: int) -> int:
    match = _SPACE.match(text, offset)
    assert match is not None
    return match.end()


def _broken_json_error(name: str, text: str, error: Exception, offset: int) -> DataError:
    at = error.pos if isinstance(error, json.JSONDecodeError) else offset
    problem = json_problem(error) if isinstance(error, json.JSONDecodeError) else str(error)
    line = text.count("\n", 0, at) + 1
    return DataError(f"{name}:{line}: broken JSON: {problem}: {shorten(text[max(0, at - 20) : at + 20])}")
