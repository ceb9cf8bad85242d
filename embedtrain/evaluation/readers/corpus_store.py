"""A large corpus in the cache: ids and texts as Arrow files that all processes build side by side, and then map."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import FORMAT, Cache, json_digest, mapped, read_metadata, write_array, write_metadata
from embedtrain.data.cache.shared_build import JOINED, Build, Task, build
from embedtrain.data.keys import text_keys
from embedtrain.data.sources.pieces import PartReader, Piece
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.sources.streams import file_changed_error, file_version
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.mapped_texts import MappedTexts
from embedtrain.evaluation.readers.rows import Table
from embedtrain.evaluation.types import Corpus

PIECE_BYTES = 1 << 26  # of the table that one process reads at a time
_DOCUMENTS_A_BATCH = 4096
_CHARACTERS_A_BATCH = 1 << 24
_SCHEMA = pa.schema([("id", pa.large_string()), ("text", pa.large_string()), ("line", pa.int64())])

DocumentOf = Callable[[Mapping[str, Any], str], tuple[str, str]]


def stored_corpus(table: Table, document_of: DocumentOf, cache: Cache) -> Corpus:
    """Documents mapped from the cache, which is filled first, together with all processes that want the same.

    Args:
        table: the corpus.
        document_of: makes id and text of a row that stands at a place.
        cache: where documents are kept, under a digest of what the table holds.

    Raises:
        DataError: as `read_documents`; or the cache cannot be written, or the table is changed meanwhile.
    """
    part = table.part
    parts = PartReader(TrainSource(path=part.name, subset=part.subset, split=part.split or "train"))
    version = file_version(part.name)
    told = [FORMAT, "corpus", part.subset, part.split, PIECE_BYTES, parts.digests(part)]
    directory = cache.directory / f"corpus-{json_digest(told)}"
    names: list[str] = []

    def tasks() -> Mapping[str, Task]:
        pieces = parts.cut(part, PIECE_BYTES)
        names[:] = [f"part-{number:05}" for number in range(len(pieces))]
        return {
            name: partial(_write_piece, table, parts, piece, document_of, version)
            for name, piece in zip(names, pieces, strict=True)
        }

    def join(path: Path) -> None:
        _join(directory, names, table, version, path)

    build([Build(directory, tasks, join, progress=partial(cache.progress, f"reading {table.name}"))])
    return _opened(directory)


def _write_piece(
    table: Table, parts: PartReader, piece: Piece, document_of: DocumentOf, version: object, path: Path
) -> None:
    path.mkdir()
    before = parts.lines_before(piece)
    pending: list[tuple[str, str, int]] = []
    keys: list[NDArray[np.int64]] = []
    characters = 0
    with pa.OSFile(str(path / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:

        def flush() -> None:
            arrays = [
                pa.array(list(column), type=field.type)
                for column, field in zip(zip(*pending, strict=True), _SCHEMA, strict=True)
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            keys.append(text_keys([key for key, _, _ in pending]).numpy())
            pending.clear()

        for line in parts.lines(piece):
            if line.row is None:
                continue
            where = f"{table.name}:{before + line.number}"
            if isinstance(line.row, BadRow):
                raise DataError(f"{where}: {line.row}")
            key, text = document_of(table.fields_of(line.row), where)
            pending.append((key, text, before + line.number))
            characters += len(text)
            if len(pending) >= _DOCUMENTS_A_BATCH or characters >= _CHARACTERS_A_BATCH:
                flush()
                characters = 0
        if pending:
            flush()
    _require_unchanged(table, version)
    write_array(path / "keys.bin", np.concatenate([np.empty(0, dtype=np.int64), *keys]))


def _join(directory: Path, names: Sequence[str], table: Table, version: object, path: Path) -> None:
    """Find ids that stand there again: with the same text they are dropped, with another one refused."""
    _require_unchanged(table, version)
    path.mkdir()
    keys = np.concatenate([mapped(directory / name / "keys.bin", np.int64) for name in names])
    if not len(keys):
        raise DataError(f"{table.name} is empty")
    columns = _columns(directory, names)
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    again: list[int] = []
    # Runs of equal keys; two ids of one key are as good as impossible, but they are compared nevertheless.
    for start in np.flatnonzero(same & ~np.concatenate([[False], same[:-1]])).tolist():
        stop = start + 1
        while stop <= len(same) and same[stop - 1]:
            stop += 1
        first: dict[str, int] = {}
        for number in order[start:stop].tolist():
            name = columns["id"][number].as_py()
            earlier = first.setdefault(name, number)
            if earlier == number:
                continue
            if columns["text"][number].as_py() != columns["text"][earlier].as_py():
                line = columns["line"][number].as_py()
                raise DataError(f"{table.name}:{line}: the id {name} stands for another text before")
            again.append(number)
    write_array(path / "again.bin", np.array(sorted(again), dtype=np.int64))
    write_metadata(path / "facts.json", list(names))


def _opened(directory: Path) -> Corpus:
    joined = directory / JOINED
    columns = _columns(directory, [str(name) for name in read_metadata(joined / "facts.json")])
    again = mapped(joined / "again.bin", np.int64)
    rows = np.delete(np.arange(len(columns["id"]), dtype=np.int64), again) if len(again) else None
    return Corpus(MappedTexts(columns["id"], rows), MappedTexts(columns["text"], rows))


def _columns(directory: Path, names: Sequence[str]) -> pa.Table:
    return pa.concat_tables(
        [pa.ipc.open_file(pa.memory_map(str(directory / name / "documents.arrow"))).read_all() for name in names]
    )


def _require_unchanged(table: Table, version: object) -> None:
    if file_version(table.part.name) != version:
        raise file_changed_error(table.part.name)
