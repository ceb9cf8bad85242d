"""Pairs (key, item) on disk: the items of a key, for many keys at a time.

P pairs, A distinct keys.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.cache import mapped, write_array

IntArray = NDArray[np.int64]


class Multimap:
    """What `write_multimap` wrote, mapped into memory.

    Args:
        directory: where.
        name: which.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._keys, self._starts, self._items = (
            mapped(directory / f"{name}-{part}.bin", np.int64) for part in ("keys", "starts", "items")
        )

    def of(self, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The items of some keys.

        Returns:
            Two int64 of one length: the place of a key in `keys`, ascending, and an item of it, ascending too.
        """
        if not len(self._keys):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        starts = self._starts[at]
        counts = np.where(self._keys[at] == keys, self._starts[at + 1] - starts, 0)
        owners = np.repeat(np.arange(len(keys)), counts)
        return owners, self._items[starts[owners] + positions_within(counts)]


def write_multimap(directory: Path, name: str, keys: IntArray, items: IntArray) -> None:
    """Write pairs; any that stands twice is written once.

    Args:
        directory: where.
        name: under which.
        keys: int64 [P].
        items: int64 [P].
    """
    keys, items = distinct_pairs(keys, items)
    distinct, starts = np.unique(keys, return_index=True)
    for part, values in (("keys", distinct), ("starts", np.append(starts, len(keys))), ("items", items)):
        write_array(directory / f"{name}-{part}.bin", values.astype(np.int64))


def distinct_pairs(keys: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """Each pair once, ascending by key, then by item."""
    order = np.lexsort((items, keys))
    keys, items = keys[order], items[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]) | (items[1:] != items[:-1])
    return keys[new], items[new]


def joined(keys: IntArray, links: IntArray, linked: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (key, item) that a link leads to: (key, link) of the first two, (link, item) of the others."""
    # What many rows repeat counts once, or the pairs would be as many as its repetitions squared.
    (keys, links), (linked, items) = distinct_pairs(keys, links), distinct_pairs(linked, items)
    starts = np.searchsorted(linked, links, side="left")
    counts = np.searchsorted(linked, links, side="right") - starts
    owners = np.repeat(np.arange(len(links)), counts)
    return keys[owners], items[starts[owners] + positions_within(counts)]


def positions_within(counts: IntArray) -> IntArray:
    """0, 1, ... for each count: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
