"""A corpus on disk: ids and texts in Arrow files that all processes build together and map into memory."""

import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.config.recipe import OnError
from embedtrain.data.cache.cache import (
    FORMAT,
    JOINED,
    Build,
    Cache,
    Task,
    allow_open_files,
    build,
    json_digest,
    map_array,
    read_metadata,
    write_array,
    write_metadata,
)
from embedtrain.data.images.files import PICTURES, TABLE, PictureTable, PictureWriter
from embedtrain.data.rows import text_key
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.pictures import picture_folder
from embedtrain.data.sources.reader import DocumentReader, SourceReader, SourceVersion
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.errors import DataError

PIECE_BYTES = 1 << 26  # of a part that one process reads at a time
MAX_PIECES = 1024  # of a corpus: each is a file that stays open
DOCUMENTS_PER_BATCH = 4096
CHARACTERS_PER_BATCH = 1 << 24
_TEXTS_PER_SLICE = 1024  # converted to Python objects at a time in an iteration
_SCHEMA = pa.schema([("id", pa.large_string()), ("text", pa.large_string()), ("line", pa.int64())])


def documents_build(
    reader: DocumentReader, on_error: OnError, cache: Cache, digests: Sequence[Sequence[str]] | None = None
) -> Build:
    """The build of a corpus in the cache; MappedCorpus opens it.

    With `on_error=skip`, documents that cannot be read are left out, and rows that refer to them are bad. `digests` are
    those of the parts, where they have been computed. The tasks raise DataError if a document cannot be read, an id has
    two texts, or a file changes meanwhile.
    """
    version = SourceVersion(reader, None if digests is None else {"parts": digests, "documents": []})
    key = [FORMAT, version.content["parts"], on_error.value, PIECE_BYTES]
    if (pictures := reader.pictures()) is not None:
        key.append(pictures)
    directory = cache.directory / f"documents-{json_digest(key)}"
    pieces: dict[str, PartPiece] = {}

    def tasks() -> Mapping[str, Task]:
        with version.during(reader.parts):  # processes must agree on the pieces
            pieces_of_part = reader.pieces(PIECE_BYTES)
            if len(pieces_of_part) > MAX_PIECES:
                pieces_of_part = reader.pieces(PIECE_BYTES * -(-len(pieces_of_part) // MAX_PIECES))
        pieces.update((f"part-{number:05}", piece) for number, piece in enumerate(pieces_of_part))
        return {name: partial(_write_piece, reader, piece, on_error, version) for name, piece in pieces.items()}

    def join(path: Path) -> None:
        version.require(directory, list(pieces))
        _join(reader, pieces, directory, path)

    return Build(directory, tasks, join, progress=partial(cache.progress, f"reading {reader.name}"))


def _write_piece(
    reader: DocumentReader, piece: PartPiece, on_error: OnError, version: SourceVersion, path: Path
) -> None:
    path.mkdir()
    with version.during([piece.part]):
        _write_documents(reader, piece, on_error, path)


def open_pictures(reader: SourceReader | DocumentReader, directory: Path) -> int:
    """Make the pictures of a folder in the cache known to this process; returns how many it has."""
    table = directory / JOINED / TABLE
    if not table.is_dir():
        return 0
    return len(PICTURES.add_table(table, [str(directory), *(picture_folder(part) or "" for part in reader.parts)]))


def know_pictures(readers: Sequence[DocumentReader], cache: Cache) -> None:
    """Make the pictures of corpora known to this process, of which another one may read the documents."""
    with_pictures = [reader for reader in readers if reader.pictures() is not None]
    builds = [documents_build(reader, OnError.stop, cache) for reader in with_pictures]
    build(builds)
    for reader, built in zip(with_pictures, builds, strict=True):
        open_pictures(reader, built.directory)


def _write_documents(reader: DocumentReader, piece: PartPiece, on_error: OnError, path: Path) -> None:
    pictures = PictureWriter(path, 1 + reader.parts.index(piece.part), picture_folder(piece.part))
    keys = array("q")
    pending: list[tuple[str, str, int]] = []
    characters = 0
    with pa.OSFile(str(path / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:

        def flush() -> None:
            columns = [list(column) for column in zip(*pending, strict=True)]
            arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            pending.clear()

        for line, document in reader.documents(piece, pictures):
            if isinstance(document, BadRow):
                if on_error == OnError.stop:
                    raise DataError(f"{reader.location(piece, line)}: {document}")
                continue
            text = document.full_text
            pending.append((document.id, text, line))
            keys.append(text_key(document.id))
            characters += len(text)
            if len(pending) >= DOCUMENTS_PER_BATCH or characters >= CHARACTERS_PER_BATCH:
                flush()
                characters = 0
        if pending:
            flush()
    write_array(path / "keys.bin", np.frombuffer(keys, dtype=np.int64))
    pictures.close()


def _join(reader: DocumentReader, pieces: Mapping[str, PartPiece], directory: Path, path: Path) -> None:
    """Sort the keys of all ids, and find repeated ones: with the same text they are ignored, with another rejected."""
    path.mkdir()
    counts = [len(map_array(directory / name / "keys.bin", np.int64)) for name in pieces]
    keys = np.concatenate(
        [np.empty(0, dtype=np.int64), *(map_array(directory / name / "keys.bin", np.int64) for name in pieces)]
    )
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    write_array(path / "keys.bin", keys)
    write_array(path / "order.bin", order)
    write_metadata(path / "metadata.json", list(pieces))
    PictureTable.join([directory / name for name in pieces], path)
    ids, texts, lines = _columns(directory, list(pieces))
    starts = np.cumsum([0, *counts])

    def location(number: int) -> str:
        index = int(starts.searchsorted(number, side="right")) - 1
        return reader.location(list(pieces.values())[index], lines[number].as_py())

    is_equal = keys[1:] == keys[:-1]
    repeated: list[int] = []
    # Runs of equal keys. Two ids with one key are practically impossible, but they are compared nevertheless.
    for start in np.flatnonzero(is_equal & ~np.concatenate([[False], is_equal[:-1]])).tolist():
        stop = start + 1
        while stop <= len(is_equal) and is_equal[stop - 1]:
            stop += 1
        first: dict[str, int] = {}
        for number in order[start:stop].tolist():
            name = ids[number]
            earlier = first.setdefault(name, number)
            if earlier == number:
                continue
            if texts[number] != texts[earlier]:
                raise DataError(
                    f"{location(number)}: the id {shorten(name)} has another text already in {location(earlier)}"
                )
            repeated.append(number)
    write_array(path / "repeated.bin", np.array(sorted(repeated), dtype=np.int64))


class MappedCorpus:
    """A corpus mapped into memory: texts by id, or all ids and texts in their order.

    `reader` is that of the build of `directory`.
    """

    def __init__(self, directory: Path, reader: DocumentReader) -> None:
        open_pictures(reader, directory)
        joined = directory / JOINED
        names = [str(name) for name in read_metadata(joined / "metadata.json")]
        allow_open_files(len(names))
        self._keys = map_array(joined / "keys.bin", np.int64)
        self._order = map_array(joined / "order.bin", np.int64)
        self._repeated = map_array(joined / "repeated.bin", np.int64)
        self._ids, self._texts, _ = _columns(directory, names)

    def text(self, name: str) -> str | None:
        """The document's title and text; None where there is no such document."""
        key = text_key(name)
        index = int(self._keys.searchsorted(key))
        while index < len(self._keys) and self._keys[index] == key:
            number = int(self._order[index])
            if self._ids[number] == name:
                return self._texts[number]
            index += 1
        return None

    def unique(self) -> tuple["MappedTexts", "MappedTexts"]:
        """Ids and texts without repeated documents."""
        if not len(self._repeated):
            return self._ids, self._texts
        rows = np.delete(np.arange(len(self._ids), dtype=np.int64), self._repeated)
        return self._ids.select(rows), self._texts.select(rows)


def _columns(directory: Path, names: Sequence[str]) -> tuple["MappedTexts", "MappedTexts", pa.ChunkedArray]:
    """Ids, texts and lines of all documents."""
    files = [pa.memory_map(str(directory / name / "documents.arrow")) for name in names]
    table = pa.concat_tables([_SCHEMA.empty_table(), *(pa.ipc.open_file(file).read_all() for file in files)])
    return MappedTexts(table["id"]), MappedTexts(table["text"]), table["line"]


class MappedTexts(Sequence[str]):
    """Texts in Arrow files mapped into memory, as a sequence of which no process holds a copy.

    `rows`, int64 [n], are the selected rows in their order; None: all.
    """

    def __init__(self, column: pa.ChunkedArray, rows: NDArray[np.int64] | None = None) -> None:
        self._column = column
        self._rows = rows
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = [0, *np.cumsum([len(chunk) for chunk in self._chunks]).tolist()]

    def __len__(self) -> int:
        return len(self._column) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        row = number if self._rows is None else int(self._rows[number])
        chunk = bisect_right(self._starts, row) - 1
        text: str = self._chunks[chunk][row - self._starts[chunk]].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        if self._rows is not None:
            return (self[number] for number in range(len(self._rows)))
        return (
            text
            for chunk in self._chunks
            for start in range(0, len(chunk), _TEXTS_PER_SLICE)
            for text in chunk.slice(start, _TEXTS_PER_SLICE).to_pylist()
        )

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.ChunkedArray:
        """What `pyarrow.array` returns: the column itself where all rows are selected."""
        if self._rows is not None:
            return pa.chunked_array([pa.array(list(self), type or self._column.type)])
        return self._column if type is None else self._column.cast(type)

    def __reduce__(self) -> Any:
        raise TypeError("mapped texts are not sent to other processes, which map the files themselves")

    def select(self, rows: NDArray[np.int64]) -> "MappedTexts":
        """The texts with these numbers, int64 [m], without reading them."""
        return MappedTexts(self._column, rows if self._rows is None else self._rows[rows])


def select_texts(texts: Sequence[str], rows: Sequence[int]) -> Sequence[str]:
    """The texts with these numbers; mapped texts stay mapped."""
    if isinstance(texts, MappedTexts):
        return texts.select(np.asarray(rows, dtype=np.int64))
    return [texts[row] for row in rows]
