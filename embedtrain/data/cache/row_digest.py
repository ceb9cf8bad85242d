"""A digest of rows themselves, piece by piece: the same however they are stored, cut into pieces, or kept."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.row_table import SCALAR_COLUMNS

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
