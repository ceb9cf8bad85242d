"""The pool: every distinct document that may become a negative, on disk and mapped into memory.

N documents, numbered in the order in which they were first met.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.cache import mapped, write_array
from embedtrain.data.keys import text_keys
from embedtrain.mine.documents import DocumentBatch

_BATCHES_AT_HAND = 4096  # their places in the map, not their texts
_DOCUMENTS_A_BATCH = 1024
_SCHEMA = pa.schema([("text", pa.large_string())])


class DocumentPool(Sequence[str]):
    """Texts by their numbers, and numbers by the keys of texts.

    Args:
        directory: what `write_pool` wrote.

    Attributes:
        keys: int64 [N], of each text; see `text_keys`.
        stripped_keys: int64 [N], of each text without blanks at its ends; see `stripped_keys`.
    """

    def __init__(self, directory: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(directory / "documents.arrow")))
        self.keys = mapped(directory / "keys.bin", np.int64)
        self.stripped_keys = mapped(directory / "bare-keys.bin", np.int64)
        self._order = mapped(directory / "order.bin", np.int64)
        self._sorted = mapped(directory / "sorted.bin", np.int64)
        # Looking up a batch takes ten times as long as a text of it.
        self._batch = functools.lru_cache(_BATCHES_AT_HAND)(lambda number: self._reader.get_batch(number).column(0))

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        batch, row = divmod(range(len(self))[number], _DOCUMENTS_A_BATCH)
        text: str = self._batch(batch)[row].as_py()
        return text

    def numbers(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the document of each key, -1 where there is none: int64 [n]."""
        at = np.minimum(self._sorted.searchsorted(keys), max(0, len(self) - 1))
        return np.where(self._sorted[at] == keys, self._order[at], -1)

    def formatted(self, wording: Callable[[str], str]) -> Sequence[str]:
        """All texts as a model sees them, made when they are asked for."""
        return _FormattedTexts(self, wording)


class _FormattedTexts(Sequence[str]):
    def __init__(self, pool: DocumentPool, wording: Callable[[str], str]) -> None:
        self._pool, self._wording = pool, wording

    def __len__(self) -> int:
        return len(self._pool)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self._wording(text) for text in self._pool[number]]
        return self._wording(self._pool[number])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _DOCUMENTS_A_BATCH):
            yield from self[start : start + _DOCUMENTS_A_BATCH]


def stripped_keys(texts: Iterable[str]) -> NDArray[np.int64]:
    """The key of each text without blanks at its ends, int64 [n]: those are no difference that a reader would see."""
    return text_keys([text.strip() for text in texts]).numpy()


def number_documents(documents: Iterable[DocumentBatch]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number distinct texts as they come.

    Returns:
        int64 [T], the number of each of the T texts; and int64 [N], which of the T is the first of each.
    """
    keys = np.concatenate([np.empty(0, dtype=np.int64), *(text_keys(some.texts).numpy() for some in documents)])
    _, first, kinds = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[kinds], first[order]


def write_pool(directory: Path, documents: Iterable[DocumentBatch], first: NDArray[np.int64]) -> None:
    """Write the distinct texts.

    Args:
        directory: an empty folder.
        documents: those that `number_documents` saw, once more.
        first: what it returned.
    """
    keys: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    bare: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    with pa.OSFile(str(directory / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for texts in _batches(_firsts(documents, first)):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(texts, pa.large_string())], schema=_SCHEMA))
            keys.append(text_keys(texts).numpy())
            bare.append(stripped_keys(texts))
    whole = np.concatenate(keys)
    order = np.argsort(whole, kind="stable")
    write_array(directory / "keys.bin", whole)
    write_array(directory / "bare-keys.bin", np.concatenate(bare))
    write_array(directory / "order.bin", order)
    write_array(directory / "sorted.bin", whole[order])


def _firsts(documents: Iterable[DocumentBatch], first: NDArray[np.int64]) -> Iterator[str]:
    start = 0
    for some in documents:
        left, right = np.searchsorted(first, [start, start + len(some.texts)])
        yield from (some.texts[place - start] for place in first[left:right].tolist())
        start += len(some.texts)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _DOCUMENTS_A_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
