"""The rows of sources in the cache: read, checked and written piece by piece with a digest, then memory-mapped."""

import bisect
import collections
import copy
import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import (
    COMPLETE,
    FORMAT,
    JOINED,
    Build,
    Cache,
    Task,
    allow_open_files,
    build,
    concatenate_files,
    is_complete,
    json_digest,
    map_array,
    read_metadata,
    write_array,
    write_metadata,
)
from embedtrain.data.cache.document_store import MappedCorpus, documents_build, open_pictures
from embedtrain.data.cache.row_checks import RowCheck, RowStatistics, SourceReport, check_equal_counts, check_sources
from embedtrain.data.images.files import PictureTable, PictureWriter
from embedtrain.data.rows import Documents, Example, RowLocation
from embedtrain.data.sources.layouts import TEXTS_ONLY, DocumentLookup, RowLayout
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.pictures import picture_folder
from embedtrain.data.sources.reader import SourceReader, SourceVersion, open_sources
from embedtrain.data.sources.resolve import source_names
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import ConfigError, DataError

TEXTS = {
    "query": pa.string(),
    "positives": pa.list_(pa.string()),
    "negatives": pa.list_(pa.string()),
    "line": pa.int64(),  # line in the piece of the file
}
# Optional columns: a file has those that any of its rows has.
EXTRA_COLUMNS = {
    "positive_scores": pa.list_(pa.float32()),
    "negative_scores": pa.list_(pa.float32()),
    "positive_ids": pa.list_(pa.string()),
    "negative_ids": pa.list_(pa.string()),
    "label": pa.int64(),
    "vectors": pa.list_(pa.list_(pa.float32())),
    "instruction": pa.string(),
    "document_instruction": pa.string(),
    "max_negatives": pa.int32(),
    "origin": pa.string(),
}
# Names of columns in digests where they differ: with another digest, runs of earlier versions would not resume.
_DIGEST_NAMES = {"max_negatives": "most_negatives"}
MAX_OPEN_BATCHES = 4096  # their offsets in the map, not their rows
UNKNOWN_WRITER = "an unknown model"  # of rows that say `synthetic: true` alone
# One value or null per row.
SCALAR_COLUMNS = {"label", "instruction", "document_instruction", "max_negatives", "origin"}


_OF_DOCUMENTS = {"positives": "positives.texts", "negatives": "negatives.texts"} | {
    f"{kind}_{name}": f"{kind}s.{name}" for kind in ("positive", "negative") for name in ("scores", "ids")
}


def value_of(column: str) -> Callable[[Example], Any]:
    """What reads the value of a column in a row."""
    return attrgetter(_OF_DOCUMENTS.get(column, column))


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows from `start` to the next range come from this part of the source."""

    start: int
    part: int
    lines_before: int  # lines of the part before this range, from which line numbers count


@dataclass(frozen=True, slots=True)
class ArrowFile:
    """One file of rows: its path below the store's directory, and the rows and bytes of each of its batches."""

    path: str
    rows: tuple[int, ...]
    num_bytes: tuple[int, ...]


class ArrowRows:
    """Rows in memory-mapped Arrow files, which are in the order of their rows.

    Attributes:
        batch_starts: int64 [batches + 1], the first row of each batch, and the number of all rows.

    `owner` lives as long as the rows.
    """

    def __init__(self, directory: Path, files: Sequence[ArrowFile], owner: Any = None) -> None:
        self._owner = owner
        try:
            readers = [pa.ipc.open_file(pa.memory_map(str(directory / file.path))) for file in files]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{directory}: cached rows cannot be opened: {error}") from error
        # For each batch: its file and its index in the file; its first row; its size in bytes.
        numbers = [(i, j) for i, file in enumerate(files) for j in range(len(file.rows))]
        indices = np.array(numbers, dtype=np.int64).reshape(-1, 2)
        self.batch_starts = np.cumsum([0, *(rows for file in files for rows in file.rows)], dtype=np.int64)
        self.batch_bytes = np.array([size for file in files for size in file.num_bytes], dtype=np.int64)

        # Refers to no `self`: the rows, and their owner, are freed with their last user.
        def batch(number: int) -> pa.RecordBatch:
            """One batch: the columns of TEXTS, and the EXTRA_COLUMNS that its file has."""
            file, index = indices[number].tolist()
            return readers[file].get_batch(index)

        # Opening a batch makes the system read it ahead, which takes ten times as long as reading a row.
        self.batch = lru_cache(MAX_OPEN_BATCHES)(batch)

    def row(self, row: int) -> tuple[Example, int]:
        """The row without its location, and its line in its piece of the file."""
        number = int(self.batch_starts.searchsorted(row, side="right")) - 1
        index, batch = row - int(self.batch_starts[number]), self.batch(number)
        queries, positives, negatives, lines, *extra = batch.columns
        names = batch.schema.names[len(TEXTS) :]
        values = {name: _python_value(name, column[index]) for name, column in zip(names, extra, strict=True)}

        def documents(kind: str, texts: Any) -> Documents:
            scores, ids = values.pop(f"{kind}_scores", ()), values.pop(f"{kind}_ids", ())
            return Documents(tuple(texts[index].values.to_pylist()), scores, ids)

        of_row = documents("positive", positives), documents("negative", negatives)
        return Example(queries[index].as_py(), *of_row, **values), lines[index].as_py()


def _python_value(name: str, value: Any) -> Any:
    if name in SCALAR_COLUMNS:
        return value.as_py()
    if not value.is_valid:
        return ()
    if name == "vectors":
        return tuple(array("f", vector.values.to_numpy().tobytes()) for vector in value.values)
    return tuple(value.as_py())


@dataclass(frozen=True, eq=False)
class RowStore(Sequence[Example]):
    """The rows of one source; `store[i]` is row i as an Example, with its file and line.

    Attributes:
        key: a digest of the source's files and of all options that affect its rows.
        content: a digest of the rows in their order, independent of files and formats.
        source: index in `data.train`.
        extra_columns: the EXTRA_COLUMNS that any row has.
        num_positives: int32 [R]; 0 for rows of one text.
        num_negatives: int32 [R], hard negatives.
        max_negatives: int32 [R], maximal number of negatives that a step uses, -1 for all; None if no row has a limit.
    """

    key: str
    content: str
    source: int
    report: SourceReport
    row_ranges: Sequence[RowRange]
    rows: ArrowRows
    extra_columns: frozenset[str]
    num_positives: NDArray[np.int32]
    num_negatives: NDArray[np.int32]
    max_negatives: NDArray[np.int32] | None

    def __len__(self) -> int:
        return len(self.num_positives)

    def __getitem__(self, row: int) -> Example:  # type: ignore[override]  # slices would be lists of everything
        if not 0 <= row < len(self):
            raise IndexError(row)
        texts, line = self.rows.row(row)
        row_range = self.row_ranges[bisect.bisect_right(self.row_ranges, row, key=attrgetter("start")) - 1]
        file = self.report.files[row_range.part]
        return replace(texts, location=RowLocation(self.source, file, row_range.lines_before + line))

    def query_writers(self) -> dict[str, int]:
        """The language models that wrote queries, with the number of rows of each."""
        counts = collections.Counter[str]()
        for number in range(len(self.rows.batch_starts) - 1 if "origin" in self.extra_columns else 0):
            batch = self.rows.batch(number)
            if "origin" in batch.schema.names:
                for each in batch.column("origin").drop_null().value_counts().to_pylist():
                    counts[json.loads(each["values"]).get("synthetic_model", UNKNOWN_WRITER)] += each["counts"]
        return dict(counts)

    @property
    def num_bytes(self) -> int:
        """Size of the mapped rows in bytes."""
        counts = (self.num_positives, self.num_negatives, self.max_negatives)
        return int(np.sum(self.rows.batch_bytes)) + sum(count.nbytes for count in counts if count is not None)

    def texts(self) -> Iterator[str]:
        """All queries, positives and negatives of all rows, including duplicates, without prompts."""
        for i in range(len(self.rows.batch_starts) - 1):
            queries, positives, negatives = self.rows.batch(i).columns[:3]
            for texts in (queries, positives.flatten(), negatives.flatten()):
                yield from texts.to_pylist()


# A row's digest is a digit of a number in base _BASE modulo the prime _PRIME, as in Karp and Rabin, "Efficient
# randomized pattern-matching algorithms" (1987): the numbers of two pieces give that of both together.
_PRIME = (1 << 127) - 1
_BASE = int.from_bytes(b"a row at a time", "big")
_DIGIT_BYTES = 15  # below the prime


class RowDigest:
    """A digest of rows in their order; `value` has 127 bits and continues another digest's."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, texts: Sequence[pa.Array], extra_columns: Mapping[str, Sequence[Any]]) -> None:
        """Add the next rows; the number of rows per call makes no difference.

        Args:
            texts: columns: queries, lists of positives, lists of negatives.
            extra_columns: the values of each row, by the column's name in EXTRA_COLUMNS.
        """
        extra = [b""] * len(texts[0])
        for name, values in sorted(extra_columns.items()):
            extra = [before + _encode_extra(name, value) for before, value in zip(extra, values, strict=True)]
        value = self.value
        for row in zip(*_encode_texts(*texts), extra, strict=True):
            digit = hashlib.blake2b(b"".join(row), digest_size=_DIGIT_BYTES).digest()
            value = (value * _BASE + int.from_bytes(digit, "big")) % _PRIME
        self.value = value

    def join(self, after: "RowDigest", num_rows: int) -> None:
        """Add the `num_rows` rows of the next digest."""
        self.value = (self.value * pow(_BASE, num_rows, _PRIME) + after.value) % _PRIME

    def __str__(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.value:032x}"


def _encode_texts(queries: pa.Array, positives: pa.Array, negatives: pa.Array) -> list[list[bytes]]:
    """The bytes of each row's texts, preceded by the numbers of documents and the length of each text.

    They are cut out of the arrays: encoding each text separately takes several times as long.
    """
    starts = [np.arange(len(queries) + 1), *(lists.offsets.to_numpy() for lists in (positives, negatives))]
    texts = [queries, positives.values, negatives.values]
    offsets = [_offsets(column) for column in texts]
    counts = [np.diff(start) for start in starts]
    head_starts = np.concatenate([[0], np.cumsum(2 + sum(counts))])
    heads = np.empty(head_starts[-1], dtype="<i4")
    heads[head_starts[:-1]], heads[head_starts[:-1] + 1] = counts[1:]
    index = head_starts[:-1] + 2
    for start, count, offset in zip(starts, counts, offsets, strict=True):
        heads[np.repeat(index - start[:-1], count) + np.arange(start[-1])] = np.diff(offset)
        index += count
    cut = [_cut(heads.tobytes(), 4 * head_starts)]
    for column, start, offset in zip(texts, starts, offsets, strict=True):
        data = column.buffers()[2]
        cut.append(_cut(b"" if data is None else data.to_pybytes(), offset[start]))
    return cut


def _offsets(texts: pa.Array) -> NDArray[np.int32]:
    """The offset of each text in the bytes of all texts, and the end."""
    if not len(texts):
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(texts.buffers()[1], dtype=np.int32)[: len(texts) + 1]


def _cut(data: bytes, bounds: NDArray[Any]) -> list[bytes]:
    # Not slices of a memoryview: the garbage collector would track each of them.
    return [data[start:stop] for start, stop in pairwise(bounds.tolist())]


def _encode_extra(name: str, value: Any) -> bytes:
    """A value of an extra column with its length, so that values can be concatenated; empty if there is none."""
    if value is None or value == ():
        return b""
    if name in SCALAR_COLUMNS:
        parts = [str(value).encode("utf-8", "surrogatepass")]
    elif name.endswith("_ids"):
        parts = [text.encode("utf-8", "surrogatepass") for text in value]
    elif name == "vectors":  # in float32 as stored, like scores
        parts = [np.asarray(vector, dtype="<f4").tobytes() for vector in value]
    else:
        parts = [array("f", value).tobytes()]
    name = _DIGEST_NAMES.get(name, name)
    return b" ".join((name.encode(), *(b"%d %b" % (len(part), part) for part in parts), b"."))


# Small enough for 32-bit offsets, and for little memory while a batch is built.
ROWS_PER_BATCH = 4096
CHARACTERS_PER_BATCH = 1 << 24
COUNTS = ("num_positives", "num_negatives", "max_negatives")
TEXT_NAMES = ("query", "positives", "negatives")
_READERS = {name: value_of(name) for name in (*TEXT_NAMES, *EXTRA_COLUMNS)}
METADATA = "metadata.json"  # of a piece, and of all pieces


def write_piece(
    reading: SourceReader,
    layout: RowLayout,
    piece: PartPiece,
    documents: DocumentLookup | None,
    on_error: OnError,
    path: Path,
) -> None:
    """Read one piece, check its rows, and write them as a folder.

    Args:
        documents: the corpus, if rows name documents by id.
        on_error: stop at the first bad row (`path:line: problem`), or skip and count bad rows.
    """
    path.mkdir()
    part = reading.parts.index(piece.part)
    pictures = PictureWriter(path, 1 + part, picture_folder(piece.part))
    rows, check, statistics = reading.rows(piece, layout, documents, pictures), RowCheck(reading.needs), RowStatistics()
    with _Writer(path) as writer:
        for line, read in rows:
            try:
                if isinstance(read, BadRow):
                    raise read
                texts = check(read)
            except BadRow as bad:
                if on_error == OnError.stop:
                    location = piece.part.location(reading.lines_before(piece) + line)
                    # A row that the loss cannot use is intact, and others may do.
                    hint = "" if isinstance(read, BadRow) else "; data.on_error=skip leaves such rows out"
                    raise DataError(f"{location}: {bad}{hint}") from None
                statistics.skip(part, line, str(bad))
                continue
            if texts.vectors and statistics.width is None:
                statistics.width = (len(texts.vectors[0]), part, line)
            statistics.add(texts, scored=texts is not read)
            writer.add(texts, line)
    statistics.features, statistics.rows.ignored = list(rows.layout.features), list(rows.layout.ignored)
    statistics.rows.num_left_out, statistics.rows.num_animated = rows.left_out, pictures.num_animated
    pictures.close()
    metadata = {
        "part": part,
        "lines": rows.lines,
        "extra_columns": sorted(writer.extra_columns),
        "files": writer.files,
        "digest": writer.digest.value,
        "statistics": asdict(statistics),
    }
    write_metadata(path / METADATA, metadata)


class _Writer:
    """Collects rows and writes them in batches: to a new file if a batch has columns that the last file lacks."""

    def __init__(self, path: Path) -> None:
        self.extra_columns: set[str] = set()
        self.digest = RowDigest()
        self.files: list[tuple[str, list[int], list[int]]] = []  # name, rows and bytes of each batch
        self._path = path
        # Columns, not rows: the garbage collector would visit the objects of every pending row again and again.
        self._pending: dict[str, list[Any]] = {name: [] for name in _READERS}
        self._pending_lines: list[int] = []
        self._pending_characters = 0
        self._counts = {name: array("i") for name in COUNTS}
        self._file: pa.NativeFile | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._names: list[str] = []  # extra columns of the open file

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

    def add(self, texts: Example, line: int) -> None:
        """Add one row, with its line."""
        limit = -1 if texts.max_negatives is None else texts.max_negatives
        positives, negatives = texts.positives.texts, texts.negatives.texts
        for name, count in zip(COUNTS, (len(positives), len(negatives), limit), strict=True):
            self._counts[name].append(count)
        for name, values in self._pending.items():
            values.append(_READERS[name](texts))
        self._pending_lines.append(line)
        self._pending_characters += len(texts.query) + sum(map(len, positives)) + sum(map(len, negatives))
        self._pending_characters += 4 * sum(map(len, texts.vectors))
        if len(self._pending_lines) >= ROWS_PER_BATCH or self._pending_characters >= CHARACTERS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        lines, pending = self._pending_lines, self._pending
        if not lines:
            return
        extra = {
            name: pending[name]
            for name in EXTRA_COLUMNS
            if any(value is not None and value != () for value in pending[name])
        }
        self.extra_columns.update(extra)
        texts = [pa.array(pending[name], type=TEXTS[name]) for name in TEXT_NAMES]
        self.digest.add(texts, extra)
        if self._writer is None or not extra.keys() <= set(self._names):
            self._open(list(extra))
        arrays = [*texts, pa.array(lines, type=TEXTS["line"])]
        arrays += [_column(name, extra.get(name), len(lines)) for name in self._names]
        batch = pa.RecordBatch.from_arrays(arrays, names=[*TEXTS, *self._names])
        assert self._writer is not None
        self._writer.write_batch(batch)
        _, num_rows, num_bytes = self.files[-1]
        num_rows.append(batch.num_rows)
        num_bytes.append(batch.nbytes)
        self._pending, self._pending_lines, self._pending_characters = {name: [] for name in pending}, [], 0

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
    if name == "vectors":  # NumPy arrays are converted as a whole, other sequences number by number
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
    """Join the pieces in `directory`, the folders `names` in order: write the arrays and metadata of all rows.

    Raises:
        DataError: a part without rows, no row at all, or a teacher's vectors of several dimensions.
    """
    path.mkdir()
    statistics, extra_columns, digest = RowStatistics(), set[str](), RowDigest()
    row_ranges: list[RowRange] = []
    files: list[ArrowFile] = []
    pieces_of_part: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in reading.parts]
    for name in names:
        piece = read_metadata(directory / name / METADATA)
        pieces_of_part[piece["part"]].append((name, piece))
    for part, pieces in enumerate(pieces_of_part):
        lines, is_empty = 0, True
        for name, piece in pieces:
            of_piece = RowStatistics.of(piece["statistics"]).after(lines)
            is_empty &= not (of_piece.rows.num_rows or of_piece.rows.num_skipped or of_piece.rows.num_left_out)
            _check_width(reading, statistics, of_piece)
            if of_piece.rows.num_rows:
                row_ranges.append(RowRange(statistics.rows.num_rows, part, lines))
                files += [ArrowFile(f"{name}/{file}", *counts) for file, *counts in piece["files"]]
                extra_columns.update(piece["extra_columns"])
            statistics.join(of_piece)
            digest.join(RowDigest(piece["digest"]), of_piece.rows.num_rows)
            lines += piece["lines"]
        if is_empty:
            if on_error == OnError.stop:
                raise DataError(f"{reading.parts[part].name}: holds no rows")
            statistics.skip(part, 0, "holds no rows")
    if not statistics.rows.num_rows:
        first = statistics.report(reading.name, "", reading.parts, None, cached=False).problems
        skipped = f" ({statistics.rows.num_skipped:,} skipped, the first: {first[0]})" if first else ""
        where = f"; where={reading.source.where} leaves out {statistics.rows.num_left_out:,}"
        raise DataError(
            f"{reading.source.path}: no row that can be trained on{skipped}{where * (statistics.rows.num_left_out > 0)}"
        )
    for array_name in COUNTS[: 3 if "max_negatives" in extra_columns else 2]:
        concatenate_files((directory / name / f"{array_name}.bin" for name in names), path / f"{array_name}.bin")
    described = copy.deepcopy(layout)
    described.features.update(dict.fromkeys(statistics.features))
    metadata = {
        "layout": described.describe(),
        "row_ranges": [astuple(row_range) for row_range in row_ranges],
        "files": [astuple(file) for file in files],
        "extra_columns": sorted(extra_columns),
        "content": str(digest),
        "statistics": asdict(statistics),
    }
    write_metadata(path / METADATA, metadata)
    PictureTable.join([directory / name for name in names], path)


def _check_width(reading: SourceReader, before: RowStatistics, new: RowStatistics) -> None:
    if before.width and new.width and before.width[0] != new.width[0]:
        width, part, line = new.width
        location = reading.parts[part].location(line)
        raise DataError(f"{location}: a vector of {width} numbers, where those before have {before.width[0]}")


PIECE_BYTES = 64 << 20
MAX_PIECES = 1024  # of a source: each is a file that stays open
# Of `CachedRows.key`. Mined folders keep this key: another format of the cache must not make them those of other rows.
_KEY_VERSION = 6


class CachedRows:
    """One source's rows in the cache.

    Attributes:
        key: a digest of everything that determines the rows.
        documents: the build of the corpus, if rows name documents by id.

    Raises:
        DataError: a file of the source is missing or cannot be read.
    """

    def __init__(self, reading: SourceReader, on_error: OnError, cache: Cache) -> None:
        self._reading, self._on_error = reading, on_error
        self._version = SourceVersion(reading)
        self.key = json_digest([_KEY_VERSION, self._version.content, on_error.value])
        self.directory = cache.directory / f"rows-{json_digest([FORMAT, self.key])}"
        self.documents = None
        if reading.documents is not None:
            digests = self._version.content["documents"]
            self.documents = documents_build(reading.documents, on_error, cache, digests)
        self.build = Build(
            self.directory, self._tasks, self._join, progress=partial(cache.progress, f"reading {reading.name}")
        )
        self._layout: RowLayout | None = None
        self._names: list[str] = []

    def open(self, number: int, owner: Any, *, cached: bool) -> RowStore:
        """The rows after they are built, as those of source `number`; `owner` lives as long as they do.

        Raises:
            DataError: they are missing, or all pairs would be alike to the loss.
        """
        metadata = self._metadata(f"{JOINED}/{METADATA}")
        extra_columns = frozenset(metadata["extra_columns"])
        return RowStore(
            key=self.key,
            content=metadata["content"],
            source=number,
            report=self._report(metadata, cached=cached, num_pictures=self._open_pictures()),
            row_ranges=[RowRange(*row_range) for row_range in metadata["row_ranges"]],
            rows=ArrowRows(self.directory, [ArrowFile(*file) for file in metadata["files"]], owner),
            extra_columns=extra_columns,
            num_positives=self._array("num_positives"),
            num_negatives=self._array("num_negatives"),
            max_negatives=self._array("max_negatives") if "max_negatives" in extra_columns else None,
        )

    @property
    def needs_documents(self) -> bool:
        """Whether the corpus must be in the cache although the rows are: it has pictures."""
        return self._reading.documents is not None and self._reading.documents.pictures() is not None

    def _open_pictures(self) -> int:
        """Make the pictures of the rows and of their corpus known to this process; returns how many there are."""
        count = open_pictures(self._reading, self.directory)
        if self._reading.documents is not None and self.documents is not None:
            count += open_pictures(self._reading.documents, self.documents.directory)
        return count

    def num_files(self) -> int:
        """How many files an open store holds open."""
        return len(self._metadata(COMPLETE)["files"])

    def first_vector(self) -> tuple[int, str] | None:
        """The dimension and location of the first vector."""
        width = RowStatistics.of(self._metadata(f"{JOINED}/{METADATA}")["statistics"]).width
        return width and (width[0], self._reading.parts[width[1]].location(width[2]))

    def _tasks(self) -> Mapping[str, Task]:
        reading = self._reading
        documents = None
        if self.documents is not None:
            build([self.documents])
            assert reading.documents is not None
            documents = MappedCorpus(self.documents.directory, reading.documents)
        with self._version.during(reading.parts):  # processes must agree on the pieces
            layout = self._layout = reading.detect_layout(self._on_error)
            pieces = reading.pieces(PIECE_BYTES)
            if len(pieces) > MAX_PIECES:
                pieces = reading.pieces(PIECE_BYTES * -(-len(pieces) // MAX_PIECES))

        def task(piece: PartPiece) -> Task:
            def write(path: Path) -> None:
                with self._version.during([piece.part]):
                    write_piece(reading, layout, piece, documents, self._on_error, path)

            return write

        tasks = {f"rows-{number:05}": task(piece) for number, piece in enumerate(pieces)}
        self._names = list(tasks)
        return tasks

    def _join(self, path: Path) -> None:
        assert self._layout is not None
        self._version.require(self.directory, self._names)
        join_pieces(self._reading, self._layout, self.directory, self._names, self._on_error, path)

    def _report(self, metadata: dict[str, Any], *, cached: bool, num_pictures: int) -> SourceReport:
        reading = self._reading
        report = RowStatistics.of(metadata["statistics"]).report(
            reading.name, metadata["layout"], reading.parts, reading.source.negatives, cached=cached
        )
        report.left_out, report.num_pictures = reading.left_out, num_pictures
        has_negatives = report.negative_counts().most > 0 or reading.needs.batch_negatives > 0
        if report.rows.num_unscored == report.rows.num_rows and not has_negatives:
            named = "" if reading.source.columns is None else " that columns names too"
            raise DataError(
                f"{reading.source.path}: there are neither scores nor hard negatives to use, so all pairs would be "
                f"alike to loss={reading.needs.loss}: add scores, such as a column named score{named}, or negatives"
            )
        return report

    def _array(self, name: str) -> NDArray[np.int32]:
        try:
            return map_array(self.directory / JOINED / f"{name}.bin", np.int32)
        except OSError as error:
            raise self._missing_error(error) from error

    def _metadata(self, name: str) -> Any:
        try:
            return read_metadata(self.directory / name)
        except OSError as error:
            raise self._missing_error(error) from error

    def _missing_error(self, error: OSError) -> DataError:
        return DataError(
            f"{self.directory}: cached rows cannot be opened ({error.strerror or error}): start again, and let "
            "nothing clean up this folder meanwhile"
        )


def read_sources(
    sources: Sequence[TrainSource],
    on_error: OnError,
    needs: RowRequirements | Sequence[RowRequirements] = TEXTS_ONLY,
    cache: Cache | None = None,
    *,
    losses: Sequence[int] | None = None,
) -> list[RowStore]:
    """Read every row of every source, so that all errors in the data are found before training.

    Sources in the cache are not read again. All processes that call this with the same arguments share the work.

    Args:
        sources: `data.train`.
        on_error: stop at the first invalid row, or skip and count invalid rows.
        needs: what the loss requires of every row, for all sources or per source.
        cache: default: a temporary directory that lasts as long as the stores.
        losses: a number per source, equal for sources with the same loss; default: one loss.

    Raises:
        DataError: an invalid row (`path:line: problem`), a file that cannot be read at all, a source without a valid
            row, or a cache that cannot be written.
        ConfigError: no source, or options of a source that contradict each other or the loss.
    """
    if not sources:
        raise ConfigError("data.train is empty: name at least one file, folder or Hub data set to train on")
    source_needs = [needs] * len(sources) if isinstance(needs, RowRequirements) else list(needs)
    check_sources(sources, source_needs)
    temporary = None
    if cache is None:
        temporary = tempfile.TemporaryDirectory(prefix="embedtrain-", ignore_cleanup_errors=True)
        cache = Cache(directory=Path(temporary.name))
    readings = open_sources(sources, source_names(sources), source_needs)
    entries = [CachedRows(reading, on_error, cache) for reading in readings]
    missing = [entry for entry in entries if not is_complete(entry.directory)]
    corpora = [entry for entry in entries if entry in missing or entry.needs_documents]
    build([entry.documents for entry in corpora if entry.documents is not None])
    build([entry.build for entry in missing])
    for entry in entries:
        if entry not in missing:
            cache.verification.add(entry.directory)
    allow_open_files(sum(entry.num_files() for entry in entries))
    stores = [entry.open(number, temporary, cached=entry not in missing) for number, entry in enumerate(entries)]
    for loss in dict.fromkeys(losses or [0]):
        _check_widths([entry.first_vector() for i, entry in enumerate(entries) if not losses or losses[i] == loss])
    for requirements in dict.fromkeys(source_needs):
        of_loss = [store for store, needs in zip(stores, source_needs, strict=True) if needs == requirements]
        check_equal_counts(requirements, [store.report.negative_counts() for store in of_loss])
    return stores


def _check_widths(vectors: Sequence[tuple[int, str] | None]) -> None:
    """Require one dimension of the teacher's vectors in all sources of a loss."""
    first, *others = [vector for vector in vectors if vector is not None] or [(0, "")]
    for width, location in others:
        if width != first[0]:
            raise DataError(f"{location}: a vector of {width} numbers, where those before have {first[0]}")
