"""Documents that have an id, noted while all documents pass: which they are, what they are called, and by whom.

T documents as often as they stand somewhere, I of them with an id.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.keys import text_keys
from embedtrain.mine.documents import NO_SOURCE, DocumentBatch

IntArray = NDArray[np.int64]


class DocumentIdCollector:
    """Ids as Arrow arrays: millions of Python strings and numbers would take ten times the memory."""

    def __init__(self) -> None:
        self._places: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._keys: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._names: dict[int, list[pa.Array]] = {}
        self._places_of: dict[int, list[IntArray]] = {}

    def seen(self, documents: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
        """The documents, noted as they pass."""
        start = 0
        for some in documents:
            if some.source != NO_SOURCE:
                self._note(some, start)
            start += len(some.texts)
            yield some

    def _note(self, some: DocumentBatch, start: int) -> None:
        at = [place for place, name in enumerate(some.ids) if name]
        if not at:
            return
        names = [some.ids[place] for place in at]
        places: IntArray = start + np.array(at, dtype=np.int64)
        self._places.append(places)
        # An id is a source's own: another's "7" is another document.
        self._keys.append(text_keys([f"{some.source} {name}" for name in names]).numpy())
        self._names.setdefault(some.source, []).append(pa.array(names, pa.large_string()))
        self._places_of.setdefault(some.source, []).append(places)

    def places(self) -> IntArray:
        """Which of the T documents they are, ascending: int64 [I]."""
        return np.concatenate(self._places)

    def keys(self) -> IntArray:
        """The key of each one's id and of whose it is: int64 [I]."""
        return np.concatenate(self._keys)

    def write(self, directory: Path, numbers: IntArray) -> None:
        """Write for each source that names documents the first id that it has for each.

        Args:
            directory: where.
            numbers: int64 [T], which distinct document each of the T is.
        """
        for source, names in self._names.items():
            distinct, first = np.unique(numbers[np.concatenate(self._places_of[source])], return_index=True)
            table = pa.table({"number": distinct, "id": pa.chunked_array(names).take(pa.array(first))})
            path = str(directory / f"ids-{source}.arrow")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
