"""Unchecked rows of parts of any kind, and pieces of parts that can be read in parallel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from embedtrain.config.columns import DEFAULT_MAX_PIXELS
from embedtrain.data.sources.files import count_lines_before, file_digest, read_lines_between, splittable_size
from embedtrain.data.sources.parts import PartKind, SourcePart
from embedtrain.data.sources.pictures import PictureSink, RowPictures, is_flat, pictures_version
from embedtrain.data.sources.retrieval import judged_rows
from embedtrain.data.sources.table_rows import (
    arrow_rows,
    arrow_sizes,
    dataset_rows,
    open_dataset,
    parquet_rows,
    parquet_sizes,
)
from embedtrain.data.sources.tar_rows import tar_rows
from embedtrain.data.sources.text_rows import RawRow, delimited_rows, json_list_rows, json_rows, parse_json_row
from embedtrain.data.sources.values import MAX_DEPTH, BadRow, list_names
from embedtrain.errors import DataError

KINDS_WITH_SCHEMA = (PartKind.csv, PartKind.tsv, PartKind.parquet, PartKind.arrow, PartKind.hub)
# A line that names a picture is as much work as so many times its bytes of text: the file is opened and hashed.
_PICTURE_BYTES = 64
_NUM_FIRST_ROWS = 16  # which tell what a column of names of files has


def raw_rows(
    part: SourcePart, *, subset: str | None = None, split: str = "train", columns: list[str] | None = None
) -> Iterator[RawRow]:
    """Every row of a part: its line or row number from 1, and its values by column or key.

    `subset` and `split` are those of a Hub data set where the part has none. Raises DataError if the file as a whole
    cannot be read: missing, damaged, truncated, without a header.
    """
    match part.kind:
        case PartKind.jsonl:
            return json_rows(part.name)
        case PartKind.json:
            return json_list_rows(part.name)
        case PartKind.csv:
            return delimited_rows(part.name, ",", columns, backslash_escapes=part.backslash_escapes)
        case PartKind.tsv:
            return delimited_rows(part.name, "\t", columns, backslash_escapes=part.backslash_escapes)
        case PartKind.parquet:
            return parquet_rows(part.name, columns)
        case PartKind.arrow:
            return arrow_rows(part.name, columns)
        case PartKind.tar:
            return tar_rows(part.name)
        case PartKind.hub:
            return dataset_rows(open_dataset(part, subset, split), part.name, columns)
        case PartKind.beir:
            return judged_rows(part, lambda table: raw_rows(table, subset=subset, split=split))


@dataclass(frozen=True, slots=True)
class PartPiece:
    """A part of a source, or a range of one, that is read by itself."""

    part: SourcePart
    start: int = 0  # byte of JSONL, row group of Parquet, record batch of Arrow, row of a data set
    stop: int | None = None  # exclusive; None: the end of the part


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line or row as it is stored."""

    number: int  # from 1 within its piece
    row: dict[str, Any] | BadRow | None  # None for a blank line


class PartReader:
    """Reads the parts of one source. Every method raises DataError where a part is gone or cannot be read.

    `subset` and `split` are those of Hub data sets that have none.
    """

    def __init__(self, *, subset: str | None = None, split: str = "train", columns: list[str] | None = None) -> None:
        self._subset, self._split, self._columns = subset, split, columns
        self._datasets: dict[SourcePart, Any] = {}  # opened once, since that takes a second

    def split(self, part: SourcePart, piece_bytes: int) -> list[PartPiece]:
        """A part in pieces of about this size; in one piece where it can only be read from its beginning."""
        starts: Sequence[int]
        match part.kind:
            case PartKind.jsonl:
                if self.pictures_version(part) is not None:
                    piece_bytes = max(1, piece_bytes // _PICTURE_BYTES)
                starts = range(0, splittable_size(part.name) or 1, piece_bytes)
            case PartKind.parquet:
                starts = _starts(parquet_sizes(part.name), piece_bytes)
            case PartKind.arrow:
                starts = _starts(arrow_sizes(part.name), piece_bytes)
            case PartKind.hub:
                data = self._dataset(part)
                row_bytes = max(1, data.data.nbytes // max(1, len(data)))
                starts = range(0, len(data) or 1, max(1, piece_bytes // row_bytes))
            case _:
                starts = [0]
        return [PartPiece(part, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    def lines(self, piece: PartPiece, sink: PictureSink | None = None) -> Iterator[RawLine]:
        """The lines or rows of a piece, including blank ones, with their pictures as PictureValue.

        `sink` remembers the pictures that are used.
        """
        pictures = RowPictures(piece.part, sink, self._columns, partial(self.first_rows, piece.part))
        if piece.part.kind is PartKind.beir:  # whose queries are read as items when they are joined
            read = partial(self._table_rows, sink=sink)
            yield from (RawLine(number, row) for number, row in judged_rows(piece.part, read))
            return
        if piece.part.kind is PartKind.jsonl:
            for number, text in read_lines_between(piece.part.name, piece.start, piece.stop):
                row = parse_json_row(text) if text.strip() else None
                yield RawLine(number, pictures.row(row, is_flat=is_flat(text)) if isinstance(row, dict) else row)
            return
        for number, row in self._rows(piece):
            yield RawLine(number, pictures.row(row) if isinstance(row, dict) else row)

    def _table_rows(self, table: SourcePart, sink: PictureSink | None) -> Iterator[RawRow]:
        """The rows of a table of a BEIR folder with their pictures."""
        pictures = RowPictures(table, sink)
        for number, row in raw_rows(table, subset=self._subset, split=self._split):
            yield number, pictures.row(row) if isinstance(row, dict) else row

    def pictures_version(self, part: SourcePart) -> object:
        """`pictures_version` of the first rows of a part, and the options that decide which pictures are used."""
        part = part.tables[1] if part.tables else part  # the queries of a BEIR folder
        pictures = RowPictures(part, None, self._columns, partial(self.first_rows, part))
        try:
            version = pictures_version(pictures.row(row) for row in self.first_rows(part))
        except DataError:  # reported where the rows are read
            version = None
        limit = [] if part.max_image_pixels == DEFAULT_MAX_PIXELS else [part.max_image_pixels]
        options = [*part.image_columns, *limit]
        return [version, *options] if options else version

    def first_rows(self, part: SourcePart) -> list[dict[str, Any]]:
        """The first rows of a part as they are stored, without those that are no objects."""
        return [row for _, row in islice(self._rows(PartPiece(part)), _NUM_FIRST_ROWS) if isinstance(row, dict)]

    def lines_before(self, piece: PartPiece) -> int:
        """The number of lines or rows of the part before the piece."""
        if piece.start == 0:
            return 0
        match piece.part.kind:
            case PartKind.jsonl:
                return count_lines_before(piece.part.name, piece.start)
            case PartKind.parquet:
                return sum(rows for rows, _ in parquet_sizes(piece.part.name)[: piece.start])
            case PartKind.arrow:
                return sum(rows for rows, _ in arrow_sizes(piece.part.name)[: piece.start])
            case _:
                return piece.start

    def digests(self, part: SourcePart) -> list[str]:
        """The kind of a part, and digests of its files."""
        if part.tables:
            return [part.kind.name, *(digest for table in part.tables[:2] for digest in self.digests(table))]
        if part.kind is not PartKind.hub:
            return [part.kind.name, file_digest(part.name)]
        data = self._dataset(part)
        files = [file_digest(file["filename"]) for file in data.cache_files]
        return [part.kind.name, *(files or [str(data._fingerprint)])]

    def _rows(self, piece: PartPiece) -> Iterator[RawRow]:
        part, columns = piece.part, self._columns
        match part.kind:
            case PartKind.parquet:
                return parquet_rows(part.name, columns, piece.start, piece.stop)
            case PartKind.arrow:
                return arrow_rows(part.name, columns, piece.start, piece.stop)
            case PartKind.hub:
                return dataset_rows(self._dataset(part), part.name, columns, piece.start, piece.stop)
            case _:
                return raw_rows(part, subset=self._subset, split=self._split, columns=columns)

    def _dataset(self, part: SourcePart) -> Any:
        if part not in self._datasets:
            self._datasets[part] = open_dataset(part, self._subset, self._split)
        return self._datasets[part]


def require_image_columns(reader: PartReader, parts: Sequence[SourcePart]) -> None:
    """Raise a DataError for a column of `image_columns` that these tables, of the same rows, do not have.

    Its pictures would be texts. Rows of JSON may have it later, unless none of the first ones has any.
    """
    declared = list(dict.fromkeys(column for part in parts for column in part.image_columns))
    rows = [row for part in parts for row in reader.first_rows(part)] if declared else []
    missing = [column for column in declared if not any(_has_key(row, column) for row in rows)]
    if rows and missing and (len(missing) == len(declared) or parts[0].kind in KINDS_WITH_SCHEMA):
        present = list_names(dict.fromkeys(name for row in rows for name in row))
        raise DataError(f"{parts[0].name}: image_columns: there is no {missing[0]!r}, only {present}")


def _has_key(value: Any, key: str, depth: int = 0) -> bool:
    if depth == MAX_DEPTH or not isinstance(value, dict | list):
        return False
    elements = value.values() if isinstance(value, dict) else value
    return (isinstance(value, dict) and key in value) or any(_has_key(each, key, depth + 1) for each in elements)


def _starts(sizes: Sequence[tuple[int, int]], piece_bytes: int) -> list[int]:
    """The first blocks of pieces, from the (rows, bytes) of blocks that are not split."""
    starts, filled = [0], 0
    for i, (_, num_bytes) in enumerate(sizes):
        if filled and filled + num_bytes > piece_bytes:
            starts.append(i)
            filled = 0
        filled += num_bytes
    return starts
