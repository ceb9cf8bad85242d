"""Pieces of a source -> files of checked rows with a digest, and the summary of all pieces."""

import copy
import hashlib
import shutil
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.config.recipe import OnError
from embedtrain.data.cache.cache import read_metadata, write_array, write_metadata
from embedtrain.data.cache.row_store import EXTRA_COLUMNS, SCALAR_COLUMNS, TEXTS, ArrowFile, RowRange
from embedtrain.data.cache.source_report import RowCheck, RowStatistics
from embedtrain.data.sources.layouts import DocumentLookup, RowLayout
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.values import BadRow
from embedtrain.data.types import Texts
from embedtrain.errors import DataError

# A row's digest is a digit of a number in base _BASE modulo the prime _PRIME, as in Karp and Rabin, "Efficient
# randomized pattern-matching algorithms" (1987): the numbers of two pieces give that of both together.
_PRIME = (1 << 127) - 1
_BASE = int.from_bytes(b"a row at a time", "big")
_DIGIT_BYTES = 15  # below the prime


class RowDigest:
    """A digest of rows in their order.

    Args:
        value: what another one's `value` was.

    Attributes:
        value: 127 bits, of all rows added so far.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, texts: Sequence[pa.Array], besides: Mapping[str, Sequence[Any]]) -> None:
        """Add the rows that come next; how many at once makes no difference.

        Args:
            texts: as they are kept: the query of each row, the list of its positives, that of its negatives.
            besides: what lies beside the texts of any of these rows, by its name in BESIDES, for each row.
        """
        beside = [b""] * len(texts[0])
        for name, values in sorted(besides.items()):
            beside = [so_far + _beside(name, value) for so_far, value in zip(beside, values, strict=True)]
        parts = (*_texts(*texts), beside)
        value = self.value
        for row in zip(*parts, strict=True):
            digit = hashlib.blake2b(b"".join(row), digest_size=_DIGIT_BYTES).digest()
            value = (value * _BASE + int.from_bytes(digit, "big")) % _PRIME
        self.value = value

    def join(self, after: "RowDigest", num_rows: int) -> None:
        """Add the `num_rows` rows of the digest that comes next."""
        self.value = (self.value * pow(_BASE, num_rows, _PRIME) + after.value) % _PRIME

    def __str__(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.value:032x}"


def _texts(queries: pa.Array, positives: pa.Array, negatives: pa.Array) -> list[list[bytes]]:
    """The bytes of each row's query, positives and negatives; before them how many there are, and the length of each.

    They are cut out of the arrays: to encode each text by itself takes several times as long.
    """
    starts = [np.arange(len(queries) + 1), *(lists.offsets.to_numpy() for lists in (positives, negatives))]
    texts = [queries, positives.values, negatives.values]
    offsets = [_offsets(column) for column in texts]
    counts = [np.diff(start) for start in starts]
    head_starts = np.concatenate([[0], np.cumsum(2 + sum(counts))])
    heads = np.empty(head_starts[-1], dtype="<i4")
    heads[head_starts[:-1]], heads[head_starts[:-1] + 1] = counts[1:]
    place = head_starts[:-1] + 2
    for start, count, offset in zip(starts, counts, offsets, strict=True):
        heads[np.repeat(place - start[:-1], count) + np.arange(start[-1])] = np.diff(offset)
        place += count
    cut = [_cut(heads.tobytes(), 4 * head_starts)]
    for column, start, offset in zip(texts, starts, offsets, strict=True):
        data = column.buffers()[2]
        cut.append(_cut(b"" if data is None else data.to_pybytes(), offset[start]))
    return cut


def _offsets(texts: pa.Array) -> NDArray[np.int32]:
    """Where each text begins among the bytes of all, and at last where they end."""
    if not len(texts):
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(texts.buffers()[1], dtype=np.int32)[: len(texts) + 1]


def _cut(data: bytes, bounds: NDArray[Any]) -> list[bytes]:
    # Not of a memoryview, of which the garbage collector would follow every piece.
    return [data[start:stop] for start, stop in pairwise(bounds.tolist())]


def _beside(name: str, value: Any) -> bytes:
    """One more value of a row, that says by itself where it ends; nothing where the row has none."""
    if value is None or value == ():
        return b""
    if name in SCALAR_COLUMNS:
        parts = [str(value).encode("utf-8", "surrogatepass")]
    elif name.endswith("_ids"):
        parts = [text.encode("utf-8", "surrogatepass") for text in value]
    elif name == "vectors":  # as scores, in float32, which they are kept in
        parts = [np.asarray(vector, dtype="<f4").tobytes() for vector in value]
    else:
        parts = [array("f", value).tobytes()]
    return b" ".join((name.encode(), *(b"%d %b" % (len(part), part) for part in parts), b"."))


# Small enough that offsets of 32 bits always do and that little is held while a batch is built.
ROWS_PER_BATCH = 4096
CHARACTERS_PER_BATCH = 1 << 24
COUNTS = ("num_positives", "num_negatives", "most_negatives")
TEXT_NAMES = ("query", "positives", "negatives")


def write_piece(
    reading: SourceReader,
    layout: RowLayout,
    piece: Piece,
    documents: DocumentLookup | None,
    on_error: OnError,
    path: Path,
) -> None:
    """Read one piece, check its rows, and write them as a folder.

    Args:
        reading: the source.
        layout: what its rows are.
        piece: what is read of it.
        documents: those that rows name by id.
        on_error: stop at the first bad row, or pass over it and count it.
        path: the folder.

    Raises:
        DataError: a bad row, as `path:line: what is wrong`; or the piece cannot be read as a whole.
    """
    path.mkdir()
    rows, check, findings = reading.rows(piece, layout, documents), RowCheck(reading.needs), RowStatistics()
    part = reading.parts.index(piece.part)
    with _Writer(path) as writer:
        for line, read in rows:
            try:
                if isinstance(read, BadRow):
                    raise read
                texts = check(read)
            except BadRow as bad:
                if on_error == OnError.stop:
                    location = piece.part.location(reading.lines_before(piece) + line)
                    raise DataError(f"{location}: {bad}") from None
                findings.skip(part, line, str(bad))
                continue
            if texts.vectors and findings.width is None:
                findings.width = (len(texts.vectors[0]), part, line)
            findings.add(texts, scored=texts is not read)
            writer.add(texts, line)
    findings.found, findings.ignored = list(rows.layout.features), list(rows.layout.ignored)
    facts = {"part": part, "lines": rows.lines, "beside": sorted(writer.beside), "files": writer.files}
    write_metadata(path / "facts.json", facts | {"digest": writer.digest.value, "findings": asdict(findings)})


class _Writer:
    """Collects rows and writes them batch by batch: a new file where a batch has columns that the last has not."""

    def __init__(self, path: Path) -> None:
        self.beside: set[str] = set()
        self.digest = RowDigest()
        self.files: list[tuple[str, list[int], list[int]]] = []  # name, rows and bytes of each batch
        self._path = path
        self._pending: list[tuple[Texts, int]] = []
        self._pending_characters = 0
        self._counts = {name: array("i") for name in COUNTS}
        self._file: pa.NativeFile | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._names: list[str] = []  # of BESIDES, in the file

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(Exception):  # the disk may be full
                self._close()
            return
        self._flush()
        self._close()
        for name, values in self._counts.items():
            write_array(self._path / f"{name}.bin", np.frombuffer(values, dtype=values.typecode))

    def add(self, texts: Texts, line: int) -> None:
        """Add one row, with its line."""
        most = -1 if texts.most_negatives is None else texts.most_negatives
        for name, count in zip(COUNTS, (len(texts.positives), len(texts.negatives), most), strict=True):
            self._counts[name].append(count)
        self._pending.append((texts, line))
        self._pending_characters += len(texts.query) + sum(map(len, texts.positives + texts.negatives))
        self._pending_characters += 4 * sum(map(len, texts.vectors))
        if len(self._pending) >= ROWS_PER_BATCH or self._pending_characters >= CHARACTERS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        besides = {}
        for name in EXTRA_COLUMNS:
            values = [getattr(texts, name) for texts, _ in self._pending]
            if any(value is not None and value != () for value in values):
                besides[name] = values
        self.beside.update(besides)
        texts = [pa.array([getattr(row, name) for row, _ in self._pending], type=TEXTS[name]) for name in TEXT_NAMES]
        self.digest.add(texts, besides)
        self._write_batch(texts, besides)
        self._pending, self._pending_characters = [], 0

    def _write_batch(self, texts: list[pa.Array], besides: dict[str, list[Any]]) -> None:
        if self._writer is None or not besides.keys() <= set(self._names):
            self._open(list(besides))
        arrays = [*texts, pa.array([line for _, line in self._pending], type=TEXTS["line"])]
        arrays += [_column(name, besides.get(name), len(self._pending)) for name in self._names]
        batch = pa.RecordBatch.from_arrays(arrays, names=[*TEXTS, *self._names])
        assert self._writer is not None
        self._writer.write_batch(batch)
        _, rows, num_bytes = self.files[-1]
        rows.append(batch.num_rows)
        num_bytes.append(batch.nbytes)

    def _open(self, names: list[str]) -> None:
        self._close()
        self._names = names
        name = f"{len(self.files)}.arrow"
        self.files.append((name, [], []))
        self._file = pa.OSFile(str(self._path / name), "wb")
        self._writer = pa.ipc.new_file(self._file, pa.schema([*TEXTS.items(), *((n, EXTRA_COLUMNS[n]) for n in names)]))

    def _close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._file is not None:
                self._file.close()
            self._writer = self._file = None


def _column(name: str, values: list[Any] | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, EXTRA_COLUMNS[name])
    if name == "vectors":  # numpy's arrays are converted whole, others number by number
        values = [[np.asarray(vector, dtype=np.float32) for vector in vectors] for vectors in values]
    return pa.array(values, type=EXTRA_COLUMNS[name])


def join_pieces(
    reading: SourceReader,
    layout: RowLayout,
    directory: Path,
    names: Sequence[str],
    on_error: OnError,
    path: Path,
) -> None:
    """Write what is known of all rows, when all pieces are there, as a folder.

    Args:
        reading: the source.
        layout: what its rows are.
        directory: where the pieces' folders lie.
        names: of these folders, in order.
        on_error: what to do with a part that holds no rows.
        path: the folder.

    Raises:
        DataError: a part without rows, no row at all, or a teacher's vectors of several widths.
    """
    path.mkdir()
    findings, beside, digest = RowStatistics(), set[str](), RowDigest()
    row_ranges: list[RowRange] = []
    files: list[ArrowFile] = []
    pieces: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in reading.parts]
    for name in names:
        piece = read_metadata(directory / name / "facts.json")
        pieces[piece["part"]].append((name, piece))
    for part, its_pieces in enumerate(pieces):
        lines, empty = 0, True
        for name, piece in its_pieces:
            one = RowStatistics.of(piece["findings"]).after(lines)
            empty &= not (one.num_rows or one.num_skipped)
            _check_width(reading, findings, one)
            if one.num_rows:
                row_ranges.append(RowRange(findings.num_rows, part, lines))
                files += [ArrowFile(f"{name}/{file}", *counts) for file, *counts in piece["files"]]
                beside.update(piece["beside"])
            findings.join(one)
            digest.join(RowDigest(piece["digest"]), one.num_rows)
            lines += piece["lines"]
        if empty:
            if on_error == OnError.stop:
                raise DataError(f"{reading.parts[part].name}: holds no rows")
            findings.skip(part, 0, "holds no rows")
    if not findings.num_rows:
        first = findings.report(reading.name, "", reading.parts, None, cached=False).problems
        skipped = f" ({findings.num_skipped:,} skipped, the first: {first[0]})" if first else ""
        raise DataError(f"{reading.source.path}: no row that can be trained on{skipped}")
    for array_name in COUNTS[: 3 if "most_negatives" in beside else 2]:
        with (path / f"{array_name}.bin").open("wb") as joined:
            for name in names:
                with (directory / name / f"{array_name}.bin").open("rb") as piece_array:
                    shutil.copyfileobj(piece_array, joined, 1 << 20)
    described = copy.deepcopy(layout)
    described.features.update(dict.fromkeys(findings.found))
    facts = {
        "layout": described.describe(),
        "stretches": [astuple(stretch) for stretch in row_ranges],
        "files": [astuple(file) for file in files],
        "beside": sorted(beside),
        "content": str(digest),
        "findings": asdict(findings),
    }
    write_metadata(path / "facts.json", facts)


def _check_width(reading: SourceReader, before: RowStatistics, one: RowStatistics) -> None:
    if before.width and one.width and before.width[0] != one.width[0]:
        width, part, line = one.width
        location = reading.parts[part].location(line)
        raise DataError(f"{location}: a vector of {width} numbers, where those before have {before.width[0]}")
