"""Rows of tables with their locations and the checks of their values."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from embedtrain.data.sources import values
from embedtrain.data.sources.part_reader import raw_rows
from embedtrain.data.sources.parts import Part, PartKind
from embedtrain.data.sources.table_rows import no_progress_bars
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. Every method raises DataError with the location where a value is missing or wrong."""

    location: str  # `file:line`, which begins every message
    fields: Mapping[str, Any]

    def key(self, *names: str) -> str:
        """The first of these columns that exists."""
        for name in names:
            if name in self.fields:
                return name
        present = values.list_names(self.fields)
        raise self.error(f"there is no {' or '.join(names)}, only {present}")

    def has(self, *names: str) -> bool:
        """Whether one of these columns exists."""
        return any(name in self.fields for name in names)

    def text(self, *names: str) -> str:
        """The text of the first of these columns that exists; it may be empty."""
        key = self.key(*names)
        return self.check(values.string, self.fields[key], key)

    def id(self, *names: str) -> str:
        """The id of the first of these columns that exists."""
        key = self.key(*names)
        name = self.check(values.identifier, self.fields[key], key)
        if not name:
            raise self.error(f"{key} is empty and must be an id")
        return name

    def number(self, *names: str) -> float:
        """The number of the first of these columns that exists, which may be written as a text."""
        key = self.key(*names)
        return self.check(values.number, values.parse_cell(self.fields[key]), key)

    def check(self, check: Callable[[Any, str], T], value: object, name: str) -> T:
        """The value as a check of `data.sources.values` returns it."""
        try:
            return check(value, name)
        except BadRow as bad:
            raise self.error(str(bad)) from None

    def error(self, problem: str) -> DataError:
        """An error with the row's location."""
        return DataError(f"{self.location}: {problem}")


def table_name(part: Part) -> str:
    """A table's name in messages: a path, or a Hub id with configuration and split."""
    qualifiers = [name for name in (part.subset, part.split) if name is not None]
    return f"{part.name} ({', '.join(qualifiers)})" if qualifiers else part.name


def read_raw_rows(part: Part) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The unchecked rows of a table."""
    with no_progress_bars() if part.kind is PartKind.hub else contextlib.nullcontext():
        return raw_rows(part)


def read_rows(part: Part) -> Iterator[Row]:
    """The rows of a table. Raises DataError if the table or a row cannot be read."""
    name = table_name(part)
    has_cells = part.kind in (PartKind.csv, PartKind.tsv)
    for number, fields in read_raw_rows(part):
        location = f"{name}:{number}"
        if isinstance(fields, BadRow):
            raise DataError(f"{location}: {fields}")
        if not has_cells:
            yield Row(location, fields)
            continue
        row = Row(location, {key: cell or "" for key, cell in fields.items()})  # an empty cell is an empty text
        if any(cell.lstrip().startswith("[") for cell in row.fields.values()):
            row = Row(location, row.check(lambda cells, _: _with_lists(cells), row.fields, ""))
        yield row


def _with_lists(cells: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a row, those that hold a list of texts as lists."""
    return {key: values.list_in_cell(cell) for key, cell in cells.items()}


def first_rows(part: Part, count: int) -> list[Row]:
    """The first rows of a table. Raises DataError if the table cannot be read, or is empty."""
    rows = list(itertools.islice(read_rows(part), count))
    if not rows:
        raise DataError(f"{table_name(part)} is empty")
    return rows


def first_row(part: Part) -> Row:
    """The first row of a table. Raises DataError if the table cannot be read, or is empty."""
    return first_rows(part, 1)[0]


def nothing_left(source: str, left_out: Sequence[str], has: str) -> DataError:
    """The error about a table of which no row can be used; `left_out` are the locations of its rows."""
    return DataError(source + (f": none of its {len(left_out)} rows {has}" if left_out else " is empty"))


def left_out_notes(name: str, left_out: Sequence[str], which: str) -> list[str]:
    """The note about the rows of a set that are left out, if there are any."""
    return [f"{name}: {len(left_out)} rows {which} (the first: {left_out[0]})"] if left_out else []
