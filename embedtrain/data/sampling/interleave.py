"""Sources interleaved evenly: how many items of each are among the first t, in closed form.

S: number of sources.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import MAX_SIZE, permute, random_bits

# An epoch is a line of 2^40 cells, so that a cell holds about one item at most. Products of an item's number with a
# cell's have 80 bits and are taken in two halves of 20.
_HALF = 20
_CELLS = 1 << 2 * _HALF
_LOW = (1 << _HALF) - 1


class Interleaving:
    """The items of several sources in one sequence in which every stretch holds each source's share.

    Item i of a source of n items stands at (i + u) / n of the way, where u, from 0 to 1, is the source's own. The
    offsets are spread evenly over the sources at random, so that sources of one item are spread evenly too.

    Args:
        counts: items of each source, [S]; 2^40 in all at most.
        key: the offsets follow from it.
    """

    def __init__(self, counts: Sequence[int] | NDArray[np.int64], key: int) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.total = int(self.counts.sum())
        assert self.total <= MAX_SIZE
        number = len(self.counts)
        every = np.arange(number, dtype=np.int64)
        strata = permute(every, max(1, number), key)
        jitter = (random_bits(key, every) >> np.uint64(64 - 2 * _HALF)).astype(np.int64)
        self._offsets = (strata * _CELLS + jitter) // max(1, number)

    def before(self, t: int) -> NDArray[np.int64]:
        """How many items of each source are among the first t: int64 [S], whose sum is t, never falling with t."""
        assert 0 <= t <= self.total
        # The last cell before which there are t items at most; the bounds hold since a source is off by 1 at most.
        number = len(self.counts)
        low = max(0, (t - number) * _CELLS // max(1, self.total) - 1)
        high = min(_CELLS, (t + number) * _CELLS // max(1, self.total) + 1)
        while low < high:
            middle = (low + high + 1) // 2
            if int(self._before_cell(middle).sum()) <= t:
                low = middle
            else:
                high = middle - 1
        found = self._before_cell(low)
        missing = t - int(found.sum())
        if missing:
            # Items of one cell stand in the order of their sources.
            here = self._before_cell(low + 1) - found
            found += np.clip(missing - (np.cumsum(here) - here), 0, here)
        return found

    def _before_cell(self, cell: int) -> NDArray[np.int64]:
        """ceil(n x - u) of each source, x the cell's beginning: items that stand before it."""
        high = self.counts * (cell >> _HALF)
        low = self.counts * (cell & _LOW) - self._offsets + (_CELLS - 1)
        return (high + (low >> _HALF)) >> _HALF
