"""A training source as it is read: found, recognised, and its rows piece by piece, each checked by itself."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.sources.corpora import document_rows
from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.layouts.choose import choose_layout
from embedtrain.data.sources.layouts.layout import DocumentLookup, RowLayout
from embedtrain.data.sources.pieces import PartReader, Piece
from embedtrain.data.sources.problems import BadRow, counted
from embedtrain.data.sources.sources import find_parts
from embedtrain.data.types import Texts
from embedtrain.errors import DataError

__all__ = ["DocumentLookup", "Piece", "PieceRows", "SourceReader", "open_sources"]

FORMAT_VERSION = 2  # of what readers make of files; another one makes every cache be built anew
_WITH_SCHEMA = (PartKind.csv, PartKind.tsv, PartKind.parquet, PartKind.arrow, PartKind.hub)


class PieceRows:
    """The rows of one piece, in order: iterate once, then look at `lines` and `layout`.

    Yields pairs (line, texts): a line or row number counted from 1 within the piece, and the row or what is
    wrong with it. Iterating raises DataError where the piece cannot be read as a whole.

    Attributes:
        lines: lines (of JSONL, CSV, TSV) or rows that the piece has, blank ones too; known at the end.
        layout: of these rows alone: its `found` and `ignored` are what these rows showed.
    """

    def __init__(
        self, parts: PartReader, piece: Piece, layout: RowLayout, documents: DocumentLookup | None, score_scale: float
    ) -> None:
        self.piece, self.layout, self.lines = piece, layout, 0
        self._parts, self._documents, self._score_scale = parts, documents, score_scale

    def __iter__(self) -> Iterator[tuple[int, Texts | BadRow]]:
        for line in self._parts.lines(self.piece):
            self.lines = line.number
            if line.row is None:
                continue
            if isinstance(line.row, BadRow):
                yield line.number, line.row
                continue
            try:
                texts = self.layout.texts(line.row, self._documents).scaled(self._score_scale)
            except BadRow as bad:
                yield line.number, bad
                continue
            yield line.number, texts


class SourceReader:
    """One source of training rows, found, but not read yet.

    Args:
        source: an element of `data.train`.
        name: its name in messages.
        needs: what the loss asks of every row.

    Attributes:
        parts: the files or the data set that hold its rows, in order.
        document_parts: of the corpus, where rows name documents by id; else none.

    Raises:
        DataError: nothing is there, or nothing that can be read.
        ConfigError: options of the source that contradict each other.
    """

    def __init__(self, source: TrainSource, name: str, needs: RowRequirements) -> None:
        self.source, self.name, self.needs = source, name, needs
        found = find_parts(source)
        self.parts, self.document_parts = found.parts, found.document_parts
        self._opened = PartReader(source)

    def content(self) -> dict[str, Any]:
        """What decides which rows come out, as JSON: digests of the parts, and the options that readers look at.

        Paths are not in it, so a folder that was moved is the same. Nor is the loss's name, so losses that ask
        the same of rows share them.

        Raises:
            DataError: a part is gone or cannot be read.
        """
        source, needs = self.source, self.needs
        return {
            "version": FORMAT_VERSION,
            "format": source.format.value,
            "columns": source.columns,
            "subset": source.subset,
            "split": source.split,
            "score_scale": source.score_scale,
            "parts": [self._opened.digests(part) for part in self.parts],
            "documents": [self._opened.digests(part) for part in self.document_parts],
            "needs": {
                "documents": needs.documents,
                "negatives": needs.negatives,
                "scores": needs.scores.value,
                "range": repr(needs.range),
                "label": needs.label,
                "vectors": needs.vectors,
                "even": needs.same_num_documents,
            },
        }

    def detect_layout(self, on_error: OnError) -> RowLayout:
        """The layout that the options ask for, or else the one that the first usable row shows.

        Where `on_error` is skip, unusable rows before it are passed over: whoever reads the rows meets them again.

        Raises:
            DataError: the first row cannot be used and `on_error` is stop, or no row can.
            ConfigError: options that do not fit the layout.
        """
        num_rows, num_empty, first = 0, 0, ""
        for part, line, row in self._rows_and_empty_parts():
            try:
                if isinstance(row, BadRow):
                    raise DataError(f"{part.location(line) if line else part.name}: {row}")
                return choose_layout(self.source, part.kind, row, self.needs)
            except DataError as error:
                all_alike = part.kind in _WITH_SCHEMA and not isinstance(row, BadRow)
                if on_error == OnError.stop or all_alike:
                    raise
                num_rows, num_empty, first = num_rows + (line > 0), num_empty + (line == 0), first or str(error)
        skipped = " and ".join(
            counted(number, what) for number, what in ((num_rows, "row"), (num_empty, "empty file")) if number
        )
        raise DataError(f"{self.source.path}: no row that can be trained on ({skipped} skipped, the first: {first})")

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """All parts in order, cut into pieces of about so many bytes where they can be cut.

        Raises:
            DataError: a part is gone or cannot be read.
        """
        return [piece for part in self.parts for piece in self._opened.cut(part, piece_bytes)]

    def rows(self, piece: Piece, layout: RowLayout, documents: DocumentLookup | None = None) -> PieceRows:
        """The rows of one piece.

        Args:
            piece: one of `pieces`.
            layout: what `detect_layout` returned; it stays as it is.
            documents: those of `document_parts`, where there are any.
        """
        return PieceRows(self._opened, piece, copy.deepcopy(layout), documents, self.source.score_scale)

    def lines_before(self, piece: Piece) -> int:
        """Lines or rows of the part that come before the piece: what its line numbers count from.

        Raises:
            DataError: the part is gone or cannot be read.
        """
        return self._opened.lines_before(piece)

    def document_rows(self, part: Part) -> Iterator[tuple[int, tuple[str, str] | BadRow]]:
        """The corpus's documents in one of `document_parts`: (line, (id, text)).

        Raises:
            DataError: the part cannot be read as a whole.
        """
        return document_rows(part)

    def _rows_and_empty_parts(self) -> Iterator[tuple[Part, int, dict[str, Any] | BadRow]]:
        for part in self.parts:
            is_empty = True
            for line in self._opened.lines(Piece(part)):
                if line.row is not None:
                    is_empty = False
                    yield part, line.number, line.row
            if is_empty:
                yield part, 0, BadRow("holds no rows")


def open_sources(
    sources: Sequence[TrainSource], names: Sequence[str], needs: Sequence[RowRequirements]
) -> list[SourceReader]:
    """All sources, found.

    Raises:
        DataError: as Reading.
        ConfigError: as Reading.
    """
    return [SourceReader(*each) for each in zip(sources, names, needs, strict=True)]
