"""JSON files that hold one value: a list of rows, or an object whose `data` is one -> (number, row or problem)."""

import json
import re
from collections.abc import Iterator
from typing import Any

from embedtrain.data.sources.problems import BadRow, json_problem, not_utf8, shorten, told
from embedtrain.data.sources.streams import lines_of
from embedtrain.errors import DataError

MOST_BYTES = 1 << 30  # such a file is held in memory whole
_SPACE = re.compile(r"[ \t\r\n]*")


def is_json_list(name: str) -> bool:
    """Whether a file begins as one value over several lines, or as a list: then it is no JSONL.

    Raises:
        DataError: it cannot be read.
    """
    first = next((line.strip() for _, line in lines_of(name) if line.strip()), b"")
    if first.startswith(b"[") or re.match(rb'\{\s*"data"\s*:\s*\[', first):
        return True
    try:
        json.loads(first.decode("utf-8"))
    except UnicodeDecodeError:
        return False
    except json.JSONDecodeError as error:  # an object that goes on in the next line
        return first.startswith(b"{") and error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def json_list_rows(name: str, decoder: json.JSONDecoder) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The elements of the list, numbered from 1: written without line ends, all of them stand on one line.

    Args:
        name: path or URL.
        decoder: reads one row.

    Raises:
        DataError: the file is larger than 1 GiB, is broken JSON, or holds no list of rows.
    """
    text = _text(name)
    place = _list_start(name, text, decoder)
    number = 0
    place = _after_space(text, place + 1)
    while text[place : place + 1] != "]":
        number += 1
        try:
            row, place = decoder.raw_decode(text, place)
        except BadRow as bad:
            # Where the row ends is not known: read it again, without that check.
            yield number, bad
            _, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _broken(name, text, error, place) from error
        else:
            is_row = isinstance(row, dict)
            yield number, row if is_row else BadRow(f"a row must be a JSON object {{...}}, not {told(row)}")
        place = _after_space(text, place)
        if text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif text[place : place + 1] != "]":
            raise _broken(name, text, ValueError("a comma or ] is missing"), place)


def _text(name: str) -> str:
    lines, num_bytes = [], 0
    for number, line in lines_of(name):
        num_bytes += len(line)
        if num_bytes > MOST_BYTES:
            raise DataError(f"{name}: one JSON value of more than 1 GiB is not read: write one object a line (.jsonl)")
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number}: {not_utf8(line, error.start)}") from error
    return "".join(lines)


def _list_start(name: str, text: str, decoder: json.JSONDecoder) -> int:
    """Where the list of rows begins: the value itself, or that under `data`."""
    place = _after_space(text, 0)
    if text[place] == "[":
        return place
    place = _after_space(text, place + 1)
    keys: list[str] = []
    try:
        while text[place : place + 1] == '"':
            key, place = decoder.raw_decode(text, place)
            place = _after_space(text, place)
            if text[place : place + 1] != ":":
                raise ValueError("a colon is missing")
            place = _after_space(text, place + 1)
            if key == "data" and text[place : place + 1] == "[":
                return place
            keys.append(key)
            _, place = decoder.raw_decode(text, place)
            place = _after_space(text, place)
            if text[place : place + 1] != ",":
                break
            place = _after_space(text, place + 1)
    except (ValueError, RecursionError, BadRow) as error:
        raise _broken(name, text, error, place) from error
    raise DataError(
        f'{name}: is one JSON object without a list of rows under "data" (it has: {", ".join(keys) or "nothing"}): '
        "write one object a line (.jsonl), or a list of objects"
    )


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _broken(name: str, text: str, error: Exception, place: int) -> DataError:
    at = error.pos if isinstance(error, json.JSONDecodeError) else place
    what = json_problem(error) if isinstance(error, json.JSONDecodeError) else str(error)
    line = text.count("\n", 0, at) + 1
    return DataError(f"{name}:{line}: broken JSON: {what}: {shorten(text[max(0, at - 20) : at + 20])}")
