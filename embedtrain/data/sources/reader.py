"""Reads a training source: finds its parts, detects the layout of its rows, and checks the rows piece by piece."""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from itertools import islice
from typing import Any, TypeAlias

from embedtrain.config.columns import parse_columns
from embedtrain.config.conditions import parse_condition
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.sources import values
from embedtrain.data.sources.documents import DocumentReader
from embedtrain.data.sources.layouts import DocumentLookup, RowLayout, choose_layout
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.parts import Part, PartKind
from embedtrain.data.sources.resolve import find_parts
from embedtrain.data.sources.values import BadRow, list_names
from embedtrain.data.texts import Texts
from embedtrain.errors import DataError
from embedtrain.utils.formatting import format_count

FORMAT_VERSION = 4  # of the rows that readers return; a new one invalidates every cache
_NUM_INSPECTED_ROWS = 16
_LocatedRow: TypeAlias = tuple[Part, int, dict[str, Any] | BadRow]
_KINDS_WITH_SCHEMA = (PartKind.csv, PartKind.tsv, PartKind.parquet, PartKind.arrow, PartKind.hub)


class PieceRows:
    """The rows of one piece, in order: iterate once, then read `lines`, `left_out` and `layout`.

    Yields pairs (line, texts): the line or row number within the piece from 1, and the row or its problem. At the end,
    `lines` is the number of lines or rows of the piece, including blank ones, `left_out` that of rows for which `where`
    does not hold, and `layout` has the `features` and `ignored` of these rows. Iterating raises DataError where the
    piece cannot be read as a whole.
    """

    def __init__(
        self,
        reader: PartReader,
        piece: Piece,
        layout: RowLayout,
        documents: DocumentLookup | None,
        source: TrainSource,
    ) -> None:
        self.piece, self.layout, self.lines, self.left_out = piece, layout, 0, 0
        self._reader, self._documents, self._score_scale = reader, documents, source.score_scale
        self._condition = None if source.where is None else RowCondition(source.where, piece.part.kind)

    def __iter__(self) -> Iterator[tuple[int, Texts | BadRow]]:
        for line in self._reader.lines(self.piece):
            self.lines = line.number
            if line.row is None:
                continue
            if isinstance(line.row, BadRow):
                yield line.number, line.row
                continue
            try:
                texts = self._texts(line.row)
            except BadRow as bad:
                yield line.number, bad
                continue
            if texts is None:
                self.left_out += 1
            else:
                yield line.number, texts
        for column in () if self._condition is None else self._condition.columns:
            self.layout.ignored.pop(column, None)

    def _texts(self, row: dict[str, Any]) -> Texts | None:
        """The texts of a row; None if it is left out."""
        holds = None if self._condition is None else self._condition.holds(row)
        if holds is not None and not any(holds):
            return None
        texts = self.layout.texts(row, self._documents).scaled(self._score_scale)
        if holds is None or all(holds):
            return texts
        if len(holds) != len(texts.positives):
            raise BadRow(
                f"the columns of where={self._condition} have {len(holds)} numbers, and the row has "
                f"{format_count(len(texts.positives), 'positive')}"
            )
        return texts.with_positives(holds)


class RowCondition:
    """`where` of a source."""

    def __init__(self, text: str, kind: PartKind) -> None:
        self._text, self._comparisons = text, parse_condition(text)
        self._is_cells = kind in (PartKind.csv, PartKind.tsv)  # in which numbers are texts

    def __str__(self) -> str:
        return self._text

    @property
    def columns(self) -> list[str]:
        """The columns that it compares."""
        return [comparison.column for comparison in self._comparisons]

    def holds(self, row: dict[str, Any]) -> list[bool]:
        """Whether it holds: for the row, or for each of its positives if a column has a number for each.

        Raises BadRow for a missing column, and a value that is not a number or a list of numbers.
        """
        holds = [True]
        for comparison in self._comparisons:
            column = comparison.column
            if column not in row:
                raise BadRow(f'no "{column}" in this row, which where={self._text} compares; it has: {list_names(row)}')
            value = values.parse_cell(row[column]) if self._is_cells else row[column]
            elements = value if isinstance(value, list) else [value]
            of_column = [comparison.holds(values.number(element, f'column "{column}"')) for element in elements]
            if len(of_column) != len(holds) and 1 not in (len(of_column), len(holds)):
                raise BadRow(f"the columns of where={self._text} have {len(holds)} and {len(of_column)} numbers")
            count = max(len(holds), len(of_column)) if of_column else 0
            holds = [holds[i % len(holds)] and of_column[i % len(of_column)] for i in range(count)]
        return holds


class SourceReader:
    """Reads one source of training rows: `parts` hold its rows, and `documents` the corpus that rows refer to by id.

    Every method raises DataError where a part is gone or cannot be read. Creating a reader raises DataError if nothing
    readable exists at the path, and ConfigError if options of the source contradict each other. `left_out` are files of
    a folder that are of another split; with `every_split` there are none.
    """

    def __init__(self, source: TrainSource, name: str, needs: RowRequirements, *, every_split: bool = False) -> None:
        self.source, self.name, self.needs = source, name, needs
        source_parts = find_parts(source, every_split=every_split)
        self.parts, self.left_out = source_parts.parts, source_parts.left_out
        self.documents: DocumentReader | None = None
        if source_parts.document_parts:
            self.documents = DocumentReader(source_parts.document_parts, f"documents of {name}")
        named = parse_columns(source.columns)
        columns = None if named is None else named.names
        if columns is not None and source.where is not None:
            compared = [comparison.column for comparison in parse_condition(source.where)]
            columns = list(dict.fromkeys([*columns, *compared]))
        self._reader = PartReader(subset=source.subset, split=source.split, columns=columns)

    @property
    def document_parts(self) -> Sequence[Part]:
        """The parts of the corpus."""
        return self.documents.parts if self.documents else ()

    def content(self) -> dict[str, Any]:
        """What determines the rows, as JSON: digests of the parts, and the options that readers use.

        Paths are left out, so that a folder may be moved, and so is the name of the loss, so that losses with the same
        needs share their rows.
        """
        source, needs = self.source, asdict(self.needs)
        for name in ("loss", "without_negatives"):  # only in messages
            del needs[name]
        # Layouts and checks ask whether there are any; how many does not matter here.
        needs["batch_negatives"] = self.needs.batch_negatives > 0
        return {
            "version": FORMAT_VERSION,
            "format": source.format.value,
            "columns": source.columns,
            "subset": source.subset,
            "split": source.split,
            "score_scale": source.score_scale,
            **({"backslash_escapes": True} if source.backslash_escapes else {}),
            **({} if source.where is None else {"where": list(map(astuple, parse_condition(source.where)))}),
            "parts": [self._reader.digests(part) for part in self.parts],
            "documents": self.documents.content()["parts"] if self.documents else [],
            "needs": needs,
        }

    def detect_layout(self, on_error: OnError) -> RowLayout:
        """The layout that the options name, or that the first usable row has.

        With `on_error=skip`, unusable rows before it are passed over; reading the rows finds them again. Raises
        DataError if no row can be used.
        """
        num_rows, num_empty, first = 0, 0, ""
        rows = self._rows_and_empty_parts()
        # A column whose first value is missing or a number may hold texts.
        ahead: deque[_LocatedRow] = deque(islice(rows, _NUM_INSPECTED_ROWS))
        while ahead:
            part, line, row = ahead.popleft()
            ahead.extend(islice(rows, 1))
            try:
                if isinstance(row, BadRow):
                    raise DataError(f"{part.location(line) if line else part.name}: {row}")
                others = [other for of_part, _, other in ahead if of_part == part and not isinstance(other, BadRow)]
                return choose_layout(self.source, part.kind, row, self.needs, others)
            except DataError as error:
                fails_everywhere = part.kind in _KINDS_WITH_SCHEMA and not isinstance(row, BadRow)
                if on_error == OnError.stop or fails_everywhere:
                    raise
                num_rows, num_empty, first = num_rows + (line > 0), num_empty + (line == 0), first or str(error)
        skipped = " and ".join(
            format_count(count, noun) for count, noun in ((num_rows, "row"), (num_empty, "empty file")) if count
        )
        raise DataError(f"{self.source.path}: no row that can be trained on ({skipped} skipped, the first: {first})")

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """All parts in order, in pieces of about this size where they can be split."""
        return [piece for part in self.parts for piece in self._reader.split(part, piece_bytes)]

    def rows(self, piece: Piece, layout: RowLayout, documents: DocumentLookup | None = None) -> PieceRows:
        """The rows of one piece. The layout, as `detect_layout` returned it, is copied."""
        return PieceRows(self._reader, piece, copy.deepcopy(layout), documents, self.source)

    def lines_before(self, piece: Piece) -> int:
        """The number of lines or rows of the part before the piece."""
        return self._reader.lines_before(piece)

    def _rows_and_empty_parts(self) -> Iterator[_LocatedRow]:
        for part in self.parts:
            is_empty = True
            for line in self._reader.lines(Piece(part)):
                if line.row is not None:
                    is_empty = False
                    yield part, line.number, line.row
            if is_empty:
                yield part, 0, BadRow("holds no rows")


def open_sources(
    sources: Sequence[TrainSource], names: Sequence[str], needs: Sequence[RowRequirements]
) -> list[SourceReader]:
    """A reader for each source."""
    return [SourceReader(*args) for args in zip(sources, names, needs, strict=True)]
