"""Rows of tables, each with the place it came from, and the checks of a field.

A row is `(where, fields)`; `where` is `file:line`, counted from 1, and starts every message about the row.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.data.sources.files import raw_rows
from embedtrain.data.sources.json_lists import is_json_list
from embedtrain.data.sources.kinds import KIND_OF_SUFFIX, SUFFIXES_TOLD, Part, PartKind, suffix_of
from embedtrain.data.sources.problems import BadRow, not_utf8, shorten
from embedtrain.data.sources.streams import lines_of
from embedtrain.errors import DataError

Row = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be gone through as often as it is needed.

    Attributes:
        name: what messages call it: a path, or a Hub id with configuration and split.
        part: where its rows lie.
    """

    name: str
    part: Part

    def rows(self) -> Iterator[Row]:
        """Every row.

        Raises:
            DataError: the table cannot be read, or a row is not what the file's name claims.
        """
        # Data sets tell of their loading with bars, on every rank.
        with no_progress_bars() if self.part.kind is PartKind.hub else contextlib.nullcontext():
            raw = raw_rows(self.part, subset=None, split="train", columns=None)
        for number, fields in raw:
            where = f"{self.name}:{number}"
            if isinstance(fields, BadRow):
                raise DataError(f"{where}: {fields}")
            yield where, self.fields_of(fields)

    def fields_of(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a raw row of this table."""
        # A cell without a character is an empty text here: a document may be one.
        is_cells = self.part.kind in (PartKind.csv, PartKind.tsv)
        return {name: cell or "" for name, cell in raw.items()} if is_cells else raw

    def first(self) -> Row:
        """The first row.

        Raises:
            DataError: as `rows`; or there is none.
        """
        row = next(self.rows(), None)
        if row is None:
            raise DataError(f"{self.name} is empty")
        return row


def table_of(path: Path) -> Table:
    """The table that a file holds, by what its name ends in.

    Raises:
        DataError: another ending.
    """
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(f"{path} is no table this reads: its name must end in {SUFFIXES_TOLD}")
    is_list = suffix == ".json" and is_json_list(str(path))
    return Table(str(path), Part(str(path), PartKind.json if is_list else KIND_OF_SUFFIX[suffix]))


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not blank, with their places, without their ends.

    Raises:
        DataError: the file cannot be read, or a line is not UTF-8.
    """
    for number, line in lines_of(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: {not_utf8(line, error.start)}") from None
        if text.strip():
            yield f"{path}:{number}", text


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """`datasets` without progress bars; afterwards they are as before, since whether they are shown is the caller's."""
    import datasets  # takes a second, and most sets are plain files

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def text_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The text under the first of `names` that is there.

    Raises:
        DataError: none is there, or it holds no text.
    """
    name = name_of(fields, names, where)
    return text_of(fields[name], (name,), where)


def text_of(value: Any, names: Iterable[str], where: str) -> str:
    """A value that must be a text.

    Raises:
        DataError: it is none, with the names it stands under.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {'/'.join(names)} must be a text, not {shorten(value)}")
    return _encodable(value, where)


def id_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The id under the first of `names` that is there; whole numbers become text.

    Raises:
        DataError: none is there, or it is neither text nor a whole number.
    """
    return id_of(field_of(fields, names, where), names, where)


def id_of(value: Any, names: Iterable[str], where: str) -> str:
    """A value that must be an id.

    Raises:
        DataError: it is neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {'/'.join(names)} must be an id (a text or a whole number), not {shorten(value)}")
    return _encodable(str(value), where)


def number_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> float:
    """The finite number under the first of `names` that is there, also where it is written as text.

    Raises:
        DataError: none is there, or it is no finite number.
    """
    name = name_of(fields, names, where)
    value = fields[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {name} must be a number, not {shorten(value)}")
    return number


def field_of(fields: Mapping[str, Any], names: Iterable[str], where: str) -> Any:
    """The value under the first of `names` that is there, whatever it is.

    Raises:
        DataError: none is there; with what is.
    """
    return fields[name_of(fields, names, where)]


def name_of(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The first of `names` that is there.

    Raises:
        DataError: none is there; with what is.
    """
    for name in names:
        if name in fields:
            return name
    raise DataError(f"{where}: there is no {' or '.join(names)}, only {', '.join(map(str, fields)) or 'nothing'}")


def _encodable(text: str, where: str) -> str:
    # JSON can spell half of a surrogate pair; tokenizers fail on it with a message about their argument types.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair at character {error.start}, which is no text") from None
    return text
