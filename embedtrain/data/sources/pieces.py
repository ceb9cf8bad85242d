"""The parts of a source, cut into pieces that can be read side by side, and the raw rows of each piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.data.sources.digests import file_digest
from embedtrain.data.sources.files import json_row, raw_rows
from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.sources.streams import lines_before, lines_between, size_to_cut
from embedtrain.data.sources.tables import (
    arrow_rows,
    arrow_sizes,
    dataset_rows,
    open_dataset,
    parquet_rows,
    parquet_sizes,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source, or a stretch of one, that is read by itself.

    Attributes:
        part: the file or data set.
        start: where it begins: a byte of JSONL, a row group of Parquet, a record batch of Arrow, a row of a data set.
        stop: where it ends, likewise; None: with the part.
    """

    part: Part
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line or row as it is stored.

    Attributes:
        number: from 1 within its piece.
        row: its values by column or key, or what is wrong with it; None for a blank line.
    """

    number: int
    row: dict[str, Any] | BadRow | None


class PartReader:
    """The parts of one source, opened as its options say.

    Args:
        source: an element of `data.train`.
    """

    def __init__(self, source: TrainSource) -> None:
        self._source = source
        self._datasets: dict[Part, Any] = {}  # opened once, since that takes a second

    def cut(self, part: Part, piece_bytes: int) -> list[Piece]:
        """A part in pieces of about so many bytes, or whole where it can only be read from its beginning.

        Raises:
            DataError: the part is gone or cannot be read.
        """
        starts: Sequence[int]
        match part.kind:
            case PartKind.jsonl:
                starts = range(0, size_to_cut(part.name) or 1, piece_bytes)
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
        return [Piece(part, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    def lines(self, piece: Piece) -> Iterator[RawLine]:
        """The lines or rows of a piece, blank ones too.

        Raises:
            DataError: the piece cannot be read as a whole.
        """
        part = piece.part
        if part.kind is not PartKind.jsonl:
            yield from (RawLine(number, row) for number, row in self._rows(piece))
            return
        for number, line in lines_between(part.name, piece.start, piece.stop):
            yield RawLine(number, json_row(line) if line.strip() else None)

    def lines_before(self, piece: Piece) -> int:
        """Lines or rows of the part that come before the piece.

        Raises:
            DataError: the part is gone or cannot be read.
        """
        if piece.start == 0:
            return 0
        match piece.part.kind:
            case PartKind.jsonl:
                return lines_before(piece.part.name, piece.start)
            case PartKind.parquet:
                return sum(rows for rows, _ in parquet_sizes(piece.part.name)[: piece.start])
            case PartKind.arrow:
                return sum(rows for rows, _ in arrow_sizes(piece.part.name)[: piece.start])
            case _:
                return piece.start

    def digests(self, part: Part) -> list[str]:
        """The kind of a part, and digests of the files that hold it.

        Raises:
            DataError: the part is gone or cannot be read.
        """
        if part.tables:
            return [part.kind.name, *(digest for table in part.tables[:2] for digest in self.digests(table))]
        if part.kind is not PartKind.hub:
            return [part.kind.name, file_digest(part.name)]
        data = self._dataset(part)
        files = [file_digest(file["filename"]) for file in data.cache_files]
        return [part.kind.name, *(files or [str(data._fingerprint)])]

    def _rows(self, piece: Piece) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
        part, source = piece.part, self._source
        match part.kind:
            case PartKind.parquet:
                return parquet_rows(part.name, source.columns, piece.start, piece.stop)
            case PartKind.arrow:
                return arrow_rows(part.name, source.columns, piece.start, piece.stop)
            case PartKind.hub:
                return dataset_rows(self._dataset(part), part.name, source.columns, piece.start, piece.stop)
            case _:
                return raw_rows(part, subset=source.subset, split=source.split, columns=source.columns)

    def _dataset(self, part: Part) -> Any:
        if part not in self._datasets:
            self._datasets[part] = open_dataset(part, self._source.subset, self._source.split)
        return self._datasets[part]


def _starts(sizes: Sequence[tuple[int, int]], piece_bytes: int) -> list[int]:
    """Where pieces begin, of blocks of (rows, bytes) that are not cut themselves."""
    starts, filled = [0], 0
    for i, (_, num_bytes) in enumerate(sizes):
        if filled and filled + num_bytes > piece_bytes:
            starts.append(i)
            filled = 0
        filled += num_bytes
    return starts
