"""The global order of training rows: which rows batch k holds is a function of (seed, k) alone.

S: number of sources; B: rows of a batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import MAX_SIZE, make_key, make_keys, permute, random_bits
from embedtrain.errors import ConfigError

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


# What a key is for, so that no two uses of the seed share random numbers.
_ROWS, _SOURCES, _BATCH = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The rows of one global batch.

    Attributes:
        step: counted from 0.
        source: the one that all rows are of, where batches are made by source; else None.
        sources: int64 [B], the source of each row.
        rows: int64 [B], the number of each row within its source.
        first: the place of the first row in the run, counted from 0 over all batches before; the others follow.
    """

    step: int
    source: int | None
    sources: NDArray[np.int64]
    rows: NDArray[np.int64]
    first: int


class BatchPlan:
    """Which rows make up each global batch, for ever: batch k is known without the batches before it.

    Neither ranks nor history enter, so a run that is stopped and started again on another number of ranks sees the
    same batches; and nothing as long as an epoch is ever made, so a plan of any size is there at once.

    The rows of a source are seen in passes, each in a random order of its own, and a pass goes on where an epoch
    ends: every row is seen once before any is seen twice, and a source that an epoch sees half of shows the other
    half in the next. Where one pass ends and another begins within a batch, a row can be in it twice; not elsewhere.

    Mixed batches hold each source's share of the epoch, to within a row or two. Batches by source hold rows of one
    source each, and the sources' batches are interleaved as evenly. No row is dropped, none is carried over into
    the next epoch, and the sizes of an epoch's batches (by source: of a source's) differ by one at most: a last
    batch of a single row would have nothing to compare it with.

    Args:
        sizes: rows that each source has, [S].
        rows_per_source: rows of each source in an epoch, [S]; more than it has where rows are seen several times.
        global_batch_size: rows of a batch over all ranks, at most.
        seed: the run's seed.
        by_source: whether a batch holds rows of one source only.

    Raises:
        ConfigError: a batch size below 1, or an epoch without rows or with more than 2^40.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rows_per_source: Sequence[int],
        global_batch_size: int,
        seed: int,
        *,
        by_source: bool = False,
    ) -> None:
        if global_batch_size < 1:
            raise ConfigError(f"train.global_batch_size={global_batch_size} must be at least 1")
        assert all(rows >= 0 and (size or not rows) for size, rows in zip(sizes, rows_per_source, strict=True))
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.by_source = by_source
        self.rows_per_epoch = sum(rows_per_source)
        if self.rows_per_epoch == 0:
            raise ConfigError("data.train: an epoch holds no rows: raise a source's weight")
        if max(self.rows_per_epoch, *sizes) > MAX_SIZE:
            raise ConfigError(f"data.train: an epoch of {self.rows_per_epoch:,} rows is too long: lower the weights")
        self.sizes = np.array(sizes, dtype=np.int64)
        self.rows_per_source = np.array(rows_per_source, dtype=np.int64)
        if by_source:
            self._batches = -(-self.rows_per_source // global_batch_size)
            self.steps_per_epoch = int(self._batches.sum())
        else:
            self.steps_per_epoch = -(-self.rows_per_epoch // global_batch_size)

    def total_steps(self, steps: int | None, epochs: float | None) -> int:
        """Steps of a run that is to last `steps` steps or `epochs` epochs; a part of a step counts as a whole one.

        Raises:
            ConfigError: neither is given, or both, or one that is not above 0.
        """
        if (steps is None) == (epochs is None):
            raise ConfigError(f"train.steps={steps} and train.epochs={epochs}: give one of the two")
        # As a decimal fraction, since 1.1 * 10 is a little above 11 in floating point.
        total = steps if epochs is None else math.ceil(Fraction(str(epochs)) * self.steps_per_epoch)
        if total is None or total < 1:
            raise ConfigError(f"train.steps={steps}, train.epochs={epochs}: a run lasts at least one step")
        return total

    def batch(self, k: int) -> PlannedBatch:
        """Batch k, counted from 0."""
        epoch, step = divmod(k, self.steps_per_epoch)
        return self._of_one_source(k, epoch, step) if self.by_source else self._mixed(k, epoch, step)

    def _mixed(self, k: int, epoch: int, step: int) -> PlannedBatch:
        start, stop = (_even_start(self.rows_per_epoch, self.steps_per_epoch, at) for at in (step, step + 1))
        order = Interleaving(self.rows_per_source, make_key(self.seed, _SOURCES, epoch))
        before = order.before(start)
        counts = order.before(stop) - before
        sources = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(stop - start) - np.repeat(np.cumsum(counts) - counts - before, counts)
        rows = self._rows(sources, epoch * self.rows_per_source[sources] + places)
        # Else the rows stood source by source, and ranks would get sources of their own.
        shuffled = np.argsort(random_bits(make_key(self.seed, _BATCH, k), np.arange(stop - start)), kind="stable")
        return PlannedBatch(k, None, sources[shuffled], rows[shuffled], epoch * self.rows_per_epoch + start)

    def _of_one_source(self, k: int, epoch: int, step: int) -> PlannedBatch:
        order = Interleaving(self._batches, make_key(self.seed, _SOURCES, epoch))
        before = order.before(step)
        source = int(np.argmax(order.before(step + 1) - before))
        rows, batches, at = (int(values[source]) for values in (self.rows_per_source, self._batches, before))
        start, stop = _even_start(rows, batches, at), _even_start(rows, batches, at + 1)
        sources = np.full(stop - start, source, dtype=np.int64)
        found = self._rows(sources, epoch * rows + np.arange(start, stop))
        first = epoch * self.rows_per_epoch + int(_even_starts(self.rows_per_source, self._batches, before).sum())
        return PlannedBatch(k, source, sources, found, first)

    def _rows(self, sources: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these places in their sources' endless streams."""
        sizes = self.sizes[sources]
        passes, within = np.divmod(places, sizes)
        return permute(within, sizes, make_keys(self.seed, _ROWS, sources, passes))


def _even_start(rows: int, parts: int, at: int) -> int:
    """Where part `at` begins if rows are cut into parts whose sizes differ by one at most, the larger ones first."""
    each, larger = divmod(rows, parts)
    return at * each + min(at, larger)


def _even_starts(rows: NDArray[np.int64], parts: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of several at a time; 0 where there are no parts."""
    each, larger = np.divmod(rows, np.maximum(parts, 1))
    return at * each + np.minimum(at, larger)
