"""Rows of the files that `data.files` reads, each with the place it came from, and the checks of a field.

A row is `(where, fields)`; `where` is `file:line`, counted from 1, and starts every message about the row.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embedtrain.data.formats.files import BadRow, lines_of, not_utf8, raw_rows, shortened
from embedtrain.data.formats.sources import KIND_OF_SUFFIX, SUFFIXES_TOLD, Kind, Part, suffix_of
from embedtrain.errors import DataError

Row = tuple[str, Mapping[str, Any]]


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of a file, by what its name ends in.

    Raises:
        DataError: another ending, a file that cannot be read, or a row that is not what the file's name claims.
    """
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(f"{path} is no table this reads: its name must end in {SUFFIXES_TOLD}")
    return _rows(Part(str(path), KIND_OF_SUFFIX[suffix]))


def _rows(part: Part) -> Iterator[Row]:
    has_cells = part.kind in (Kind.csv, Kind.tsv)
    for number, fields in raw_rows(part, subset=None, split="train", columns=None):
        where = f"{part.name}:{number}"
        if isinstance(fields, BadRow):
            raise DataError(f"{where}: {fields}")
        # A cell without a character is an empty text here: a document may be one.
        yield where, {name: cell or "" for name, cell in fields.items()} if has_cells else fields


def tsv_fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The fields of each line, cut at tabs, of a file that may lack a header. Quotation marks are text like any other.

    Raises:
        DataError: the file cannot be read, or a line is not UTF-8.
    """
    for number, line in lines_of(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: {not_utf8(line, error.start)}") from None
        if text.strip():
            yield f"{path}:{number}", text.split("\t")


def text_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The text under the first of `names` that is there.

    Raises:
        DataError: none is there, or it holds no text.
    """
    value = _field(fields, names, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {'/'.join(names)} must be a text, not {shortened(value)}")
    return _encodable(value, where)


def id_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The id under the first of `names` that is there; whole numbers become text.

    Raises:
        DataError: none is there, or it is neither text nor a whole number.
    """
    value = _field(fields, names, where)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {'/'.join(names)} must be an id (a text or a whole number), not {shortened(value)}")
    return _encodable(str(value), where)


def number_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> float:
    """The finite number under the first of `names` that is there, also where it is written as text.

    Raises:
        DataError: none is there, or it is no finite number.
    """
    value = _field(fields, names, where)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {'/'.join(names)} must be a number, not {shortened(value)}")
    return number


def _field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> Any:
    for name in names:
        if name in fields:
            return fields[name]
    raise DataError(f"{where}: there is no {' or '.join(names)}, only {', '.join(map(str, fields)) or 'nothing'}")


def _encodable(text: str, where: str) -> str:
    # JSON can spell half of a surrogate pair; tokenizers fail on it with a message about their argument types.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair at character {error.start}, which is no text") from None
    return text
