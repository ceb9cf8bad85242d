"""A corpus that rows name documents of, kept on disk: each text found by its id without holding ids in memory."""

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embedtrain.config.recipe import OnError
from embedtrain.data.cache.cache import FORMAT, Cache, json_digest, mapped, read_metadata, write_array, write_metadata
from embedtrain.data.cache.file_changes import SourceVersion
from embedtrain.data.cache.shared_build import JOINED, Build, Task
from embedtrain.data.keys import text_key
from embedtrain.data.sources.kinds import Part
from embedtrain.data.sources.problems import BadRow, shorten
from embedtrain.data.sources.reading import SourceReader
from embedtrain.errors import DataError

DOCUMENTS_A_BATCH = 4096
CHARACTERS_PER_BATCH = 1 << 24
_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("line", pa.int64())])


def documents_build(
    reading: SourceReader, content: SourceVersion | Mapping[str, Any], on_error: OnError, cache: Cache
) -> Build:
    """How the corpus of a source is brought into the cache.

    Args:
        reading: the source, with `document_parts`.
        content: what `reading.content` says, or what guards that it stays so.
        on_error: stop at a document that cannot be read, or leave it out: rows that name it tell.
        cache: where it is kept.

    The tasks raise DataError: a document that cannot be read, two of one id, with their lines, or a file that is
    changed meanwhile.
    """
    unchanged = content if isinstance(content, SourceVersion) else SourceVersion(reading, content)
    directory = cache.directory / f"documents-{json_digest([FORMAT, unchanged.content['documents'], on_error.value])}"
    tasks: dict[str, Task] = {
        f"part-{number:05}": partial(_write_part, reading, part, on_error, unchanged)
        for number, part in enumerate(reading.document_parts)
    }
    return Build(
        directory,
        lambda: tasks,
        partial(_join, directory, list(tasks), reading.document_parts, unchanged),
        progress=partial(cache.progress, f"reading documents of {reading.name}"),
    )


def _write_part(reading: SourceReader, part: Part, on_error: OnError, unchanged: SourceVersion, path: Path) -> None:
    path.mkdir()
    with unchanged.during([part]):
        _write_documents(reading, part, on_error, path)


def _write_documents(reading: SourceReader, part: Part, on_error: OnError, path: Path) -> None:
    keys, rows = array("q"), list[int]()
    pending: list[tuple[str, str, int]] = []
    characters = 0
    with pa.OSFile(str(path / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:

        def flush() -> None:
            columns = [list(column) for column in zip(*pending, strict=True)]
            arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            rows.append(len(pending))
            pending.clear()

        for line, document in reading.document_rows(part):
            if isinstance(document, BadRow):
                if on_error == OnError.stop:
                    raise DataError(f"{part.location(line)}: {document}")
                continue
            pending.append((*document, line))
            keys.append(text_key(document[0]))
            characters += len(document[1])
            if len(pending) >= DOCUMENTS_A_BATCH or characters >= CHARACTERS_PER_BATCH:
                flush()
                characters = 0
        if pending:
            flush()
    write_array(path / "keys.bin", np.frombuffer(keys, dtype=np.int64))
    write_metadata(path / "facts.json", rows)


def _join(directory: Path, names: Sequence[str], parts: Sequence[Part], unchanged: SourceVersion, path: Path) -> None:
    """Sort the keys of all ids, with the documents' numbers beside them, and refuse an id that stands twice."""
    unchanged.require(directory, names)
    path.mkdir()
    keys = np.concatenate([mapped(directory / name / "keys.bin", np.int64) for name in names])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    write_array(path / "keys.bin", keys)
    write_array(path / "places.bin", order)
    write_metadata(path / "facts.json", [(name, read_metadata(directory / name / "facts.json")) for name in names])
    same = np.flatnonzero(keys[1:] == keys[:-1])
    if not len(same):
        return
    store = DocumentStore(directory, path)
    # Of equal keys the order is that of the documents, so a pair further apart shows as two neighbours.
    for at in same[np.argsort(order[same + 1])].tolist():
        (one, part, line), (other, other_part, other_line) = (store.document(int(order[i])) for i in (at, at + 1))
        if one == other:
            first, second = parts[part].location(line), parts[other_part].location(other_line)
            raise DataError(f"{second}: the document id {shorten(one)} stands there already in {first}")


class DocumentStore:
    """Texts by the ids that rows name them by, mapped into memory.

    Args:
        directory: what was built.
        joined: the folder of what joins its parts, where it has not got its name yet.
    """

    def __init__(self, directory: Path, joined: Path | None = None) -> None:
        joined = joined or directory / JOINED
        facts = [(str(name), list(map(int, rows))) for name, rows in read_metadata(joined / "facts.json")]
        self._keys, self._places = (mapped(joined / f"{name}.bin", np.int64) for name in ("keys", "places"))
        self._readers = [
            pa.ipc.open_file(pa.memory_map(str(directory / name / "documents.arrow"))) for name, _ in facts
        ]
        batches = [(i, j) for i, (_, rows) in enumerate(facts) for j in range(len(rows))]
        self._batches = np.array(batches, dtype=np.int64).reshape(-1, 2)
        self._starts = np.cumsum([0, *(count for _, rows in facts for count in rows)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def text(self, name: str) -> str | None:
        """The document's text, its title first; None where there is no such document."""
        key = text_key(name)
        at = int(self._keys.searchsorted(key))
        while at < len(self._keys) and self._keys[at] == key:
            batch, row = self._find(int(self._places[at]))
            if batch.column(0)[row].as_py() == name:
                text: str = batch.column(1)[row].as_py()
                return text
            at += 1
        return None

    def document(self, number: int) -> tuple[str, int, int]:
        """The id of a document by its number, the part of the corpus it stands in, and its line there."""
        batch, row = self._find(number)
        part = int(self._batches[int(self._starts.searchsorted(number, side="right")) - 1, 0])
        return batch.column(0)[row].as_py(), part, batch.column(2)[row].as_py()

    def _find(self, number: int) -> tuple[pa.RecordBatch, int]:
        at = int(self._starts.searchsorted(number, side="right")) - 1
        reader, batch = self._batches[at].tolist()
        return self._readers[reader].get_batch(batch), number - int(self._starts[at])
