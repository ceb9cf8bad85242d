"""The distinct documents that negatives are chosen from, and their ids: on disk and memory-mapped.

T is the number of documents with duplicates, N of distinct ones (numbered in the order of their first occurrence), I of
documents with an id.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.cache import map_array, write_array
from embedtrain.data.cache.documents import MappedTexts
from embedtrain.data.text_format import text_keys
from embedtrain.mining.sources import NO_SOURCE, DocumentBatch

IntArray = NDArray[np.int64]
_DOCUMENTS_PER_BATCH = 1024
_SCHEMA = pa.schema([("text", pa.large_string())])


class DocumentPool(Sequence[str]):
    """Texts by document number, and document numbers by text key; reads what `write_pool` wrote."""

    def __init__(self, directory: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(directory / "documents.arrow"))).read_all()
        self._texts = MappedTexts(table["text"])
        self.keys = map_array(directory / "keys.bin", np.int64)  # [N], `text_keys` of the documents
        self.stripped_keys = map_array(directory / "bare-keys.bin", np.int64)  # [N], `stripped_keys` of the documents
        self._order = map_array(directory / "order.bin", np.int64)
        self._sorted = map_array(directory / "sorted.bin", np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: Any) -> Any:  # an int: nothing here needs slices
        return self._texts[number]

    def numbers(self, keys: IntArray) -> IntArray:
        """The document number of each key, -1 for an unknown key: int64 [n]."""
        at = np.minimum(self._sorted.searchsorted(keys), max(0, len(self) - 1))
        return np.where(self._sorted[at] == keys, self._order[at], -1)

    def formatted(self, document_format: Callable[[str], str], documents: IntArray | None = None) -> Sequence[str]:
        """All texts, or those of these documents, as the model sees them, formatted on access."""
        return _FormattedTexts(self, document_format, documents)


class _FormattedTexts(Sequence[str]):
    def __init__(self, pool: DocumentPool, document_format: Callable[[str], str], documents: IntArray | None) -> None:
        self._pool, self._format, self._documents = pool, document_format, documents

    def __len__(self) -> int:
        return len(self._pool if self._documents is None else self._documents)

    def __getitem__(self, number: Any) -> Any:
        return self._format(self._pool[number if self._documents is None else int(self._documents[number])])


def stripped_keys(texts: Iterable[str]) -> IntArray:
    """Keys, int64 [n], that are equal for texts that differ in leading and trailing whitespace only."""
    return text_keys([text.strip() for text in texts]).numpy()


def number_documents(batches: Iterable[DocumentBatch]) -> tuple[IntArray, IntArray]:
    """Number distinct texts in the order of their first occurrence.

    Returns the number of each document, int64 [T], and the index of the first occurrence of each number, int64 [N].
    """
    keys = np.concatenate([np.empty(0, dtype=np.int64), *(text_keys(batch.texts).numpy() for batch in batches)])
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def write_pool(directory: Path, batches: Iterable[DocumentBatch], first: IntArray) -> None:
    """Write the distinct texts to an existing, empty directory.

    `batches` are those that `number_documents` read, in a second pass; `first`, int64 [N], is from there.
    """
    keys: list[IntArray] = [np.empty(0, dtype=np.int64)]
    stripped: list[IntArray] = [np.empty(0, dtype=np.int64)]
    with pa.OSFile(str(directory / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        remaining = _first_occurrences(batches, first)
        while texts := list(itertools.islice(remaining, _DOCUMENTS_PER_BATCH)):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(texts, pa.large_string())], schema=_SCHEMA))
            keys.append(text_keys(texts).numpy())
            stripped.append(stripped_keys(texts))
    all_keys = np.concatenate(keys)
    order = np.argsort(all_keys, kind="stable")
    write_array(directory / "keys.bin", all_keys)
    write_array(directory / "bare-keys.bin", np.concatenate(stripped))
    write_array(directory / "order.bin", order)
    write_array(directory / "sorted.bin", all_keys[order])


def _first_occurrences(batches: Iterable[DocumentBatch], first: IntArray) -> Iterator[str]:
    start = 0
    for batch in batches:
        left, right = np.searchsorted(first, [start, start + len(batch.texts)])
        yield from (batch.texts[index - start] for index in first[left:right].tolist())
        start += len(batch.texts)


class DocumentIdCollector:
    """Collects the ids of documents while they are read.

    As Arrow arrays: millions of Python strings and integers would take ten times the memory.
    """

    def __init__(self) -> None:
        self._indices: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._keys: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._ids_by_source: dict[int, list[pa.Array]] = {}
        self._indices_by_source: dict[int, list[IntArray]] = {}

    def collect(self, batches: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
        """Pass the documents on, and record their ids."""
        start = 0
        for batch in batches:
            if batch.source != NO_SOURCE:
                self._record(batch, start)
            start += len(batch.texts)
            yield batch

    def _record(self, batch: DocumentBatch, start: int) -> None:
        with_id = [index for index, document_id in enumerate(batch.ids) if document_id]
        if not with_id:
            return
        ids = [batch.ids[index] for index in with_id]
        indices: IntArray = start + np.array(with_id, dtype=np.int64)
        self._indices.append(indices)
        # Ids are local to a source: "7" of another source is another document.
        self._keys.append(text_keys([f"{batch.source} {document_id}" for document_id in ids]).numpy())
        self._ids_by_source.setdefault(batch.source, []).append(pa.array(ids, pa.large_string()))
        self._indices_by_source.setdefault(batch.source, []).append(indices)

    def indices(self) -> IntArray:
        """Which of the T documents have an id, ascending: int64 [I]."""
        return np.concatenate(self._indices)

    def keys(self) -> IntArray:
        """The key of each document's source and id: int64 [I]."""
        return np.concatenate(self._keys)

    def write(self, directory: Path, numbers: IntArray) -> None:
        """Write, for each source with ids, the first id of each distinct document; `numbers` is int64 [T]."""
        for source, ids in self._ids_by_source.items():
            distinct, first = np.unique(numbers[np.concatenate(self._indices_by_source[source])], return_index=True)
            table = pa.table({"number": distinct, "id": pa.chunked_array(ids).take(pa.array(first))})
            path = str(directory / f"ids-{source}.arrow")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


class SourceDocumentIds:
    """The ids that one source has for documents of the pool."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._numbers = table.column("number").to_numpy()
        self._ids = table.column("id")

    def get(self, number: int) -> str:
        """The id of a document, "" for a document without one."""
        at = int(self._numbers.searchsorted(number))
        has_id = at < len(self._numbers) and self._numbers[at] == number
        return str(self._ids[at].as_py()) if has_id else ""
