"""Readers of a training source and of a corpus: parts, layout, rows piece by piece, and changes of their files."""

import copy
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from embedtrain.config.columns import parse_columns, parse_condition
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.rows import Example
from embedtrain.data.sources import values
from embedtrain.data.sources.column_layouts import choose_layout
from embedtrain.data.sources.column_roles import is_id, normalized
from embedtrain.data.sources.files import file_changed_error, file_version
from embedtrain.data.sources.layouts import DocumentLookup, RowLayout
from embedtrain.data.sources.part_reader import KINDS_WITH_SCHEMA, PartPiece, PartReader, require_image_columns
from embedtrain.data.sources.parts import PartKind, SourcePart
from embedtrain.data.sources.pictures import PictureSink
from embedtrain.data.sources.resolve import find_parts
from embedtrain.data.sources.values import BadRow, list_names
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.utils.formatting import format_count

_ID_KEYS = ("docid", "_id", "id", "corpus_id", "corpus-id", "doc_id", "document_id", "pid")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored. Title and text may be empty."""

    id: str  # "" for none
    title: str
    text: str
    pictures: str = ""  # the item of these
    group: str = ""  # of documents that belong together; "" for none

    @property
    def full_text(self) -> str:
        """The title and the text, joined as BEIR, mteb and Tevatron do, after the pictures."""
        return self.pictures + f"{self.title} {self.text}".strip()


def parse_document(row: dict[str, Any], *, id_required: bool = True, group_column: str | None = None) -> Document:
    """The document of a row with an id, a text or `chunks`, and perhaps a title. Raises BadRow if it lacks one."""
    group = ""
    if group_column is not None:
        if group_column not in row:
            raise BadRow(f'no "{group_column}" in this document, which exclude_same names; it has: {list_names(row)}')
        if row[group_column] is not None:
            group = values.identifier(row[group_column], f'"{group_column}"')
    id_key = next((key for key in _ID_KEYS if key in row), None) or next(filter(is_id, row), None)
    if id_key is None and id_required:
        raise BadRow(f'a document needs an id ("docid" or "_id"), and this one has: {list_names(row)}')
    name = "" if id_key is None else values.identifier(row[id_key], f'"{id_key}"')
    if not name and id_required:
        raise BadRow(f'"{id_key}" is empty, and a document needs an id')
    if values.is_chunked(row):
        return Document(name, "", values.text_of(row, "the document"), "", group)
    text_key = next((key for key in values.TEXT_KEYS if key in row), None)
    text_key = text_key or next((key for key in row if normalized(key) in values.TEXT_KEYS), None)
    title_key = next((key for key in row if key.lower() == "title"), "title")
    pictures = values.pictures_beside(row, (text_key, title_key))
    if text_key is None and title_key not in row and not pictures:
        raise BadRow(f'a document needs a "text" or an "image", and this one has: {list_names(row)}')
    title = values.optional_string(row.get(title_key), f'"{title_key}"')
    text = values.optional_string(row.get(text_key or "text"), f'"{text_key}"')
    return Document(name, title, text, values.read_pictures(pictures), group)


class DocumentReader:
    """Reads the documents of a corpus. Every method raises DataError where a part is gone or cannot be read."""

    document_parts: Sequence[SourcePart] = ()  # a corpus has no corpus

    def __init__(
        self, parts: Sequence[SourcePart], name: str, *, ids_required: bool = True, group_column: str | None = None
    ) -> None:
        self.parts, self.name = parts, name
        self._ids_required, self._group_column = ids_required, group_column
        self._reader = PartReader()

    def content(self) -> dict[str, Any]:
        """Digests of the parts."""
        return {"parts": [self._reader.digests(part) for part in self.parts], "documents": []}

    def pictures(self) -> object:
        """What caches of the documents depend on because of their pictures, as JSON; None without pictures."""
        return self._reader.pictures_version(self.parts[0])

    def pieces(self, piece_bytes: int) -> list[PartPiece]:
        """All parts in order, in pieces of about this size."""
        return [piece for part in self.parts for piece in self._reader.split(part, piece_bytes)]

    def documents(self, piece: PartPiece, sink: PictureSink | None = None) -> Iterator[tuple[int, Document | BadRow]]:
        """The documents of a piece with their line or row numbers within it; `sink` remembers their pictures."""
        for line in self._reader.lines(piece, sink):
            if line.row is None:
                continue
            try:
                if isinstance(line.row, BadRow):
                    raise line.row
                document = parse_document(line.row, id_required=self._ids_required, group_column=self._group_column)
                yield line.number, document
            except BadRow as bad:
                yield line.number, bad

    def location(self, piece: PartPiece, line: int) -> str:
        """A document's location for messages, by its line or row number within the piece."""
        return piece.part.location(self._reader.lines_before(piece) + line)


FORMAT_VERSION = 4  # of the rows that readers return; a new one invalidates every cache
_NUM_INSPECTED_ROWS = 16
_LocatedRow: TypeAlias = tuple[SourcePart, int, dict[str, Any] | BadRow]


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
        piece: PartPiece,
        layout: RowLayout,
        documents: DocumentLookup | None,
        source: TrainSource,
        sink: PictureSink | None = None,
    ) -> None:
        self.piece, self.layout, self.lines, self.left_out = piece, layout, 0, 0
        self._reader, self._documents, self._score_scale, self._sink = reader, documents, source.score_scale, sink
        self._condition = None if source.where is None else RowCondition(source.where, piece.part.kind)

    def __iter__(self) -> Iterator[tuple[int, Example | BadRow]]:
        for line in self._reader.lines(self.piece, self._sink):
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

    def _texts(self, row: dict[str, Any]) -> Example | None:
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
    def document_parts(self) -> Sequence[SourcePart]:
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
        needs["lists"] = needs.pop("other_positives")  # mined folders of earlier versions have the digest of this name
        # Layouts and checks ask whether there are any; how many does not matter here.
        needs["batch_negatives"] = self.needs.batch_negatives > 0
        pictures = [self._reader.pictures_version(self.parts[0]), self.documents and self.documents.pictures()]
        return {
            "version": FORMAT_VERSION,
            "format": source.format.value,
            "columns": source.columns,
            "subset": source.subset,
            "split": source.split,
            "score_scale": source.score_scale,
            **({"backslash_escapes": True} if source.backslash_escapes else {}),
            **({"text_as_positive": True} if source.text_as_positive else {}),
            **({} if source.where is None else {"where": list(map(astuple, parse_condition(source.where)))}),
            "parts": [self._reader.digests(part) for part in self.parts],
            **({"pictures": pictures} if any(pictures) else {}),
            "documents": self.documents.content()["parts"] if self.documents else [],
            "needs": needs,
        }

    def detect_layout(self, on_error: OnError) -> RowLayout:
        """The layout that the options name, or that the first usable row has.

        With `on_error=skip`, unusable rows before it are passed over; reading the rows finds them again. Raises
        DataError if no row can be used.
        """
        require_image_columns(self._reader, [*self.parts[:1], *self.document_parts[:1]])
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
                fails_everywhere = part.kind in KINDS_WITH_SCHEMA and not isinstance(row, BadRow)
                if on_error == OnError.stop or fails_everywhere:
                    raise
                num_rows, num_empty, first = num_rows + (line > 0), num_empty + (line == 0), first or str(error)
        skipped = " and ".join(
            format_count(count, noun) for count, noun in ((num_rows, "row"), (num_empty, "empty file")) if count
        )
        raise DataError(f"{self.source.path}: no row that can be trained on ({skipped} skipped, the first: {first})")

    def pieces(self, piece_bytes: int) -> list[PartPiece]:
        """All parts in order, in pieces of about this size where they can be split."""
        return [piece for part in self.parts for piece in self._reader.split(part, piece_bytes)]

    def rows(
        self,
        piece: PartPiece,
        layout: RowLayout,
        documents: DocumentLookup | None = None,
        sink: PictureSink | None = None,
    ) -> PieceRows:
        """The rows of one piece. The layout, as `detect_layout` returned it, is copied.

        `sink` remembers the pictures that are read; default: this process, as long as it runs.
        """
        return PieceRows(self._reader, piece, copy.deepcopy(layout), documents, self.source, sink)

    def lines_before(self, piece: PartPiece) -> int:
        """The number of lines or rows of the part before the piece."""
        return self._reader.lines_before(piece)

    def _rows_and_empty_parts(self) -> Iterator[_LocatedRow]:
        for part in self.parts:
            is_empty = True
            for line in self._reader.lines(PartPiece(part)):
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


class SourceVersion:
    """The content of a source's files, from which its key is computed, and their versions at that time.

    Raises:
        DataError: a file of the source is missing or cannot be read.
    """

    def __init__(self, reading: SourceReader | DocumentReader, content: Mapping[str, Any] | None = None) -> None:
        self._reading = reading
        self._versions = self._all_versions()  # before the content, so that a change in between is detected
        self.content = reading.content() if content is None else content

    @contextmanager
    def during(self, parts: Sequence[SourcePart]) -> Iterator[None]:
        """Raise a DataError if one of the parts, read in the block, has changed since the key, or changes meanwhile.

        Only local files are checked, by size and time: cheap, and detects nearly every change.
        """
        before = [self._version(part) for part in parts]
        try:
            yield
        except EmbedtrainError as error:  # the cause may be a file that is being written
            _require_equal(parts, before, error)
            raise
        _require_equal(parts, before)

    def require(self, directory: Path, names: Sequence[str]) -> None:
        """Compare the content of all files; if it differs, remove the results `names` in `directory`.

        Raises:
            DataError: a file was changed, or is missing.
        """
        try:
            self._require_content()
        except EmbedtrainError:
            for name in names:
                shutil.rmtree(directory / name, ignore_errors=True)
            raise

    def _version(self, part: SourcePart) -> object:
        """The current version of a part, which has the same content as when the key was computed."""
        version = _version_of(part)
        if version != self._versions[part]:
            versions = self._all_versions()
            self._require_content()
            self._versions = versions  # the bytes are the same
            version = versions[part]
        return version

    def _all_versions(self) -> dict[SourcePart, object]:
        return {part: _version_of(part) for part in (*self._reading.parts, *self._reading.document_parts)}

    def _require_content(self) -> None:
        now = self._reading.content()
        for key, parts in (("parts", self._reading.parts), ("documents", self._reading.document_parts)):
            for part, old, new in zip(parts, self.content[key], now[key], strict=True):
                if new != old:
                    raise file_changed_error(part.name)


def _require_equal(parts: Sequence[SourcePart], versions: Sequence[object], error: Exception | None = None) -> None:
    for part, version in zip(parts, versions, strict=True):
        if _version_of(part) != version:
            raise file_changed_error(part.name) from error


def _version_of(part: SourcePart) -> object:
    """A value that changes when a local file of the part is written."""
    # The time of a folder changes with any file in it, such as a lock.
    return None if part.kind is PartKind.hub else [file_version(file.name) for file in part.tables or (part,)]
