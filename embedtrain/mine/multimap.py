"""Pairs (key, item) of integers: on disk as a multimap, and joined in memory.

P is the number of pairs.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.cache import mapped, write_array

IntArray = NDArray[np.int64]


class Multimap:
    """The memory-mapped multimap that `write_multimap` wrote as `name` to `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._keys, self._starts, self._items = (
            mapped(directory / f"{name}-{part}.bin", np.int64) for part in ("keys", "starts", "items")
        )

    def lookup(self, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The items of several keys.

        Returns:
            Two int64 arrays of equal length: the index of a key in `keys`, ascending, and one of its items; the items
            of a key ascend.
        """
        if not len(self._keys):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        starts = self._starts[at]
        counts = np.where(self._keys[at] == keys, self._starts[at + 1] - starts, 0)
        owners = np.repeat(np.arange(len(keys)), counts)
        return owners, self._items[starts[owners] + positions_within(counts)]


def write_multimap(directory: Path, name: str, keys: IntArray, items: IntArray) -> None:
    """Write the pairs of `keys` and `items`, int64 [P]; duplicates are written once."""
    keys, items = distinct_pairs(keys, items)
    distinct, starts = np.unique(keys, return_index=True)
    for part, values in (("keys", distinct), ("starts", np.append(starts, len(keys))), ("items", items)):
        write_array(directory / f"{name}-{part}.bin", values.astype(np.int64))


def distinct_pairs(keys: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """Each pair once, sorted by key, then by item."""
    order = np.lexsort((items, keys))
    keys, items = keys[order], items[order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = (keys[1:] != keys[:-1]) | (items[1:] != items[:-1])
    return keys[is_new], items[is_new]


def join_pairs(keys: IntArray, links: IntArray, linked: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (key, item) for which a link exists with (key, link) and (link, item) among the inputs."""
    # Without the deduplication, a pair that occurs in many rows would be joined with itself: quadratic memory.
    (keys, links), (linked, items) = distinct_pairs(keys, links), distinct_pairs(linked, items)
    starts = np.searchsorted(linked, links, side="left")
    counts = np.searchsorted(linked, links, side="right") - starts
    owners = np.repeat(np.arange(len(links)), counts)
    return keys[owners], items[starts[owners] + positions_within(counts)]


def positions_within(counts: IntArray) -> IntArray:
    """0, ..., count - 1 for each count, concatenated: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
