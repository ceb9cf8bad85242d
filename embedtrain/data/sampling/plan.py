"""The order of training rows and the documents of each: batch k is a function of (seed, k) alone.

S: number of sources; B: rows of a batch; E: all documents that these rows hold; K: those that the batch uses; N: drawn
documents.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.recipe import WeightMode
from embedtrain.data.sampling.permutation import (
    MAX_SIZE,
    Purpose,
    make_key,
    make_keys,
    permute,
    random_below,
    random_bits,
    random_uniform,
)
from embedtrain.errors import ConfigError

# An epoch has 2^40 cells, so that a cell holds about one item at most. The product of the numbers of an item and a cell
# has 80 bits and is computed in two halves of 20.
_HALF = 20
_CELLS = 1 << 2 * _HALF
_LOW = (1 << _HALF) - 1


class Interleaving:
    """The items of several sources in one sequence, any part of which has each source's proportion.

    Item i of a source of n items is at (i + u) / n of the sequence, where the offset u, from 0 to 1, belongs to the
    source. The offsets are stratified random numbers, so that sources of one item are spread evenly too.

    Args:
        counts: items of each source, [S]; at most 2^40 in total.
        key: determines the offsets.
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
        """Number of items of each source among the first t: int64 [S] with the sum t, monotonic in t."""
        assert 0 <= t <= self.total
        # The last cell preceded by at most t items; the bounds hold since each source deviates by at most 1.
        number = len(self.counts)
        low = max(0, (t - number) * _CELLS // max(1, self.total) - 1)
        high = min(_CELLS, (t + number) * _CELLS // max(1, self.total) + 1)
        while low < high:
            middle = (low + high + 1) // 2
            if int(self._before_cell(middle).sum()) <= t:
                low = middle
            else:
                high = middle - 1
        counts = self._before_cell(low)
        missing = t - int(counts.sum())
        if missing:
            # Items of one cell are in the order of their sources.
            in_cell = self._before_cell(low + 1) - counts
            counts += np.clip(missing - (np.cumsum(in_cell) - in_cell), 0, in_cell)
        return counts

    def _before_cell(self, cell: int) -> NDArray[np.int64]:
        """Items of each source before the start x of the cell: ceil(n x - u)."""
        high = self.counts * (cell >> _HALF)
        low = self.counts * (cell & _LOW) - self._offsets + (_CELLS - 1)
        return (high + (low >> _HALF)) >> _HALF


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The rows of one global batch."""

    step: int
    source: int | None  # of all rows, if batches are by source and no rows are mixed in
    sources: NDArray[np.int64]  # [B], the source of each row
    rows: NDArray[np.int64]  # [B], the index of each row within its source
    first_position: int  # position of the first row in the run, from 0


class BatchPlan:
    """The rows of every global batch; batch k is computed without the batches before it.

    The number of ranks plays no part, so a run that resumes on another number of ranks sees the same batches. No array
    of the length of an epoch is built.

    The rows of a source are seen in passes, each in a random order of its own, which continue over the ends of epochs:
    every row is seen once before any is seen twice. A row can be in a batch twice only where one pass ends and the next
    begins.

    Mixed batches have each source's proportion of the epoch, to within a row or two. Batches by source have rows of one
    source each, and are interleaved as evenly; with a mixed share of m, that part of every source's rows goes into a
    mixed stream instead, of which each batch gets an even part. No row is dropped or carried over into the next epoch,
    and the sizes of an epoch's batches (by source: of a source's) differ by at most one, by two with a mixed share: a
    last batch of one row would have no in-batch negatives.

    Args:
        sizes: rows of each source, [S].
        rows_per_source: rows of each source in an epoch, [S]; may exceed its size.
        global_batch_size: maximal rows of a batch over all ranks.
        seed: the run's seed.
        by_source: whether a batch has rows of one source only.
        mixed_share: with `by_source`, the part of each batch that is drawn from all sources, from 0 to below 1.

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
        mixed_share: float = 0.0,
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
        # Rounding down leaves every source rows of its own, and no batch more than global_batch_size rows.
        mixed = min(round(mixed_share * global_batch_size), global_batch_size - 1) if by_source else global_batch_size
        self.mixed_rows = mixed  # maximal rows of a batch that are drawn from all sources
        self._mixed_per_source = self.rows_per_source * mixed // global_batch_size
        self._own_per_source = self.rows_per_source - self._mixed_per_source
        if by_source:
            self._batches = -(-self._own_per_source // (global_batch_size - mixed))
            self.steps_per_epoch = int(self._batches.sum())
        else:
            self._batches = np.zeros_like(self.rows_per_source)
            self.steps_per_epoch = -(-self.rows_per_epoch // global_batch_size)

    def total_steps(self, steps: int | None, epochs: float | None) -> int:
        """Steps of a run of `steps` steps or `epochs` epochs, rounded up; a ConfigError unless exactly one is set."""
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
        source, num_before, sources, rows = self._of_one_source(epoch, step)
        if not self.mixed_rows:
            return PlannedBatch(k, source, sources, rows, epoch * self.rows_per_epoch + num_before)
        mixed_before, mixed_sources, mixed_rows = self._of_all_sources(epoch, step)
        sources, rows = np.concatenate([sources, mixed_sources]), np.concatenate([rows, mixed_rows])
        # Without shuffling, rows would be sorted by source and each rank would get its own sources.
        shuffled = np.argsort(
            random_bits(make_key(self.seed, Purpose.batch_order, k), np.arange(len(rows))), kind="stable"
        )
        first_position = epoch * self.rows_per_epoch + num_before + mixed_before
        return PlannedBatch(k, None, sources[shuffled], rows[shuffled], first_position)

    def _of_all_sources(self, epoch: int, step: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """The number of mixed rows of the epoch before this batch; the sources and rows of those in this batch."""
        total = int(self._mixed_per_source.sum())
        start, stop = (_even_start(total, self.steps_per_epoch, i) for i in (step, step + 1))
        key = make_key(self.seed, Purpose.mixed_rows if self.by_source else Purpose.source_order, epoch)
        order = Interleaving(self._mixed_per_source, key)
        before = order.before(start)
        counts = order.before(stop) - before
        sources = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(stop - start) - np.repeat(np.cumsum(counts) - counts - before, counts)
        positions += epoch * self.rows_per_source[sources] + self._own_per_source[sources]
        return start, sources, self._rows(sources, positions)

    def _of_one_source(self, epoch: int, step: int) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
        """The source of this batch, the number of rows before it in batches by source, and its sources and rows."""
        if not self.by_source:
            return 0, 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        order = Interleaving(self._batches, make_key(self.seed, Purpose.source_order, epoch))
        before = order.before(step)
        source = int(np.argmax(order.before(step + 1) - before))
        num_rows, batches, index = (int(values[source]) for values in (self._own_per_source, self._batches, before))
        start, stop = _even_start(num_rows, batches, index), _even_start(num_rows, batches, index + 1)
        sources = np.full(stop - start, source, dtype=np.int64)
        rows = self._rows(sources, epoch * self.rows_per_source[source] + np.arange(start, stop))
        num_before = int(_even_starts(self._own_per_source, self._batches, before).sum())
        return source, num_before, sources, rows

    def _rows(self, sources: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at these positions in the infinite streams of their sources."""
        sizes = self.sizes[sources]
        passes, within = np.divmod(positions, sizes)
        return permute(within, sizes, make_keys(self.seed, Purpose.row_order, sources, passes))


def _even_start(rows: int, parts: int, index: int) -> int:
    """The first row of part `index` if rows are cut into parts whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(rows, parts)
    return index * size + min(index, larger)


def _even_starts(rows: NDArray[np.int64], parts: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """`_even_start` of several sources; 0 if there are no parts."""
    size, larger = np.divmod(rows, np.maximum(parts, 1))
    return index * size + np.minimum(index, larger)


# Powers are rounded to this grid: much finer than a row, and coarser than the difference of `pow` between machines.
_GRID = 2**40


def rows_per_source_of_epoch(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    max_rows: Sequence[int | None],
    mode: WeightMode,
    temperature: float,
) -> list[int]:
    """Number of rows of each source in an epoch; at least one of every source that has rows.

    With the mode `epochs` a source has size x weight rows, with `proportions` its part of the total number of rows. A
    temperature T other than 1 divides the total of these counts again, in proportion to count^(1/T) (Devlin et al.,
    multilingual BERT, 2019; Raffel et al., "Exploring the Limits of Transfer Learning", 2020): above 1 small sources
    are seen more, below 1 less. Proportions are rounded by largest remainder, so that the total is exact. No source
    counts or gets more than `max_rows`; what it would get beyond that is not given to others.

    Raises:
        ConfigError: a weight or a temperature that is not above 0, or `max_rows` below 1.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"data.train: weight={weight} must be above 0; leave out a source that is not to be used")
    for limit in max_rows:
        if limit is not None and limit < 1:
            raise ConfigError(f"data.train: max_rows={limit} must be at least 1, or null for all rows")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"data.mixing_temperature={temperature} must be above 0: 1 keeps the proportions as they are")
    # As the decimal that was written: 0.1 * 5 is a half only so.
    exact = [Fraction(str(weight)) for weight in weights]
    if mode == WeightMode.proportions:
        counted = [_at_most(size, limit) for size, limit in zip(sizes, max_rows, strict=True)]
        rows = _apportion(sum(counted), [weight if size else 0 for weight, size in zip(exact, sizes, strict=True)])
    else:
        rows = [
            _at_most(max(1, math.floor(size * weight + Fraction(1, 2))), limit) if size else 0
            for size, weight, limit in zip(sizes, exact, max_rows, strict=True)
        ]
    if temperature != 1.0 and any(rows):
        largest = max(rows)
        powers = [(count / largest) ** (1.0 / temperature) for count in rows]
        weighted = [max(1, round(power * _GRID)) if count else 0 for power, count in zip(powers, rows, strict=True)]
        rows = _apportion(sum(rows), weighted)
    return [_at_most(count, limit) for count, limit in zip(rows, max_rows, strict=True)]


def _at_most(rows: int, limit: int | None) -> int:
    return rows if limit is None else min(rows, limit)


def _apportion(total: int, proportions: Sequence[Fraction | int]) -> list[int]:
    """Integers in these proportions with the sum `total`, at least 1 where a proportion is positive."""
    parts = [0] * len(proportions)
    left = {index: Fraction(proportion) for index, proportion in enumerate(proportions) if proportion > 0}
    # A part below one is raised to one and the others divide the rest, which may bring further parts below one.
    while left:
        rate = total / sum(left.values())
        small = [index for index, proportion in left.items() if proportion * rate < 1]
        for index in small:
            parts[index] = 1
            del left[index]
        total -= len(small)
        if not small:
            break
    if left:
        quotas = {index: proportion * rate for index, proportion in left.items()}
        floors = {index: math.floor(quota) for index, quota in quotas.items()}
        by_remainder = sorted(left, key=lambda index: (floors[index] - quotas[index], index))
        for index in by_remainder[: total - sum(floors.values())]:
            floors[index] += 1
        for index, count in floors.items():
            parts[index] = count
    return parts


_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"(?:[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+)\s*")
NO_LIMIT = int(np.iinfo(np.int64).max)  # as the maximal number of negatives


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected documents of each row."""

    positive: NDArray[np.int64]  # [B], index among the row's positives; -1 for a row without positives
    # [N], indices among the row's negatives, row by row; -1 for the last positive, -2 for the one before, and so on.
    negatives: NDArray[np.int64]
    owners: NDArray[np.int64]  # [N], the row of each negative within the batch, ascending
    counts: NDArray[np.int64]  # [B], number of selected negatives of each row


def draw(
    num_positives: NDArray[np.int64],
    num_negatives: NDArray[np.int64],
    max_negatives: int | NDArray[np.int64],
    positions: NDArray[np.int64],
    seed: int,
    other_positives: NDArray[np.bool_] | None = None,
) -> Selection:
    """Select one positive and at most `max_negatives` negatives of each row, uniformly and without replacement.

    If all negatives are selected they keep their order. The selection of a row is a function of the seed, its position
    in the run and its own counts: it does not depend on other rows, and it changes when the row occurs again.

    Args:
        num_positives: int64 [B], of each row; a row without positives gets no negatives either.
        num_negatives: int64 [B], of each row.
        max_negatives: for all rows or int64 [B].
        positions: int64 [B], position of each row in the run.
        other_positives: bool [B], rows whose other positives are drawn like negatives; default: none.
    """
    num_others = (
        num_negatives if other_positives is None else num_negatives + np.where(other_positives, num_positives - 1, 0)
    )
    available = np.where(num_positives > 0, num_others, 0)
    counts = np.minimum(available, max_negatives)
    keys = make_keys(seed, Purpose.documents, positions)
    positive = np.where(num_positives > 0, random_below(random_bits(keys, 0), np.maximum(num_positives, 1)), -1)

    owners = np.repeat(np.arange(len(counts)), counts)
    negatives = _positions_within(counts)
    sampled_rows = np.flatnonzero((counts < available) & (counts > 0))
    if len(sampled_rows):
        # Select the negatives with the smallest hashes of each row. Sorting keeps the candidates of a row adjacent, so
        # their indices before are their ranks afterwards.
        rows = np.repeat(sampled_rows, available[sampled_rows])
        ranks = _positions_within(available[sampled_rows])
        hashes = random_bits(keys[rows], ranks + 1)
        # Row and hash in one number, because rows are already sorted: seven times faster than `lexsort`.
        order = np.argsort(rows.astype(np.uint64) << np.uint64(40) | hashes >> np.uint64(24), kind="stable")
        negatives[(counts < available)[owners]] = ranks[order[ranks < counts[rows]]]
    if other_positives is not None:  # from indices among all documents but the drawn one
        among_all = negatives + (negatives >= positive[owners])
        negatives = np.where(other_positives[owners], among_all - num_positives[owners], negatives)
    return Selection(positive, negatives, owners, counts)


def without_words(text: str, share: float, position: int, seed: int) -> str:
    """A text of which each word is deleted with this probability, at least one is left, and the order is kept.

    What is deleted is a function of the text, the seed and the position of the row in the run. An ideograph or a kana
    is a word, as in BERT's vocabularies, and so are the letters between spaces otherwise.
    """
    words = _WORDS.findall(text)
    if not words:
        return text
    key = make_key(seed, Purpose.deleted_words, position)
    numbers = np.arange(len(words))
    kept = random_uniform(key, numbers) >= share
    if not kept.any():
        kept = numbers == random_below(random_bits(key, len(words)), len(words))
    return "".join(itertools.compress(words, kept)).strip()


def _positions_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ..., counts - 1 for each row: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDocuments:
    """The documents of a batch and what they are equal to."""

    query_keys: NDArray[np.int64]  # [B], equal exactly where two queries are equal
    keys: NDArray[np.int64]  # [E], row by row: equal exactly where two texts are equal
    ids: NDArray[np.int64] | None  # [E], equal exactly where two ids are equal, -1 without one; None if there are none
    counts: NDArray[np.int64]  # [B], documents that each row holds, with those that the batch does not use
    used: NDArray[np.int64]  # [K], the documents that the batch uses, among the E
    known_answers: NDArray[np.int64]  # [n, 2], as `GlobalBatch` has them


@dataclass(frozen=True, slots=True)
class BatchNegatives:
    """The drawn documents."""

    documents: NDArray[np.int64]  # [N], row by row, each an index among the K documents of the batch
    counts: NDArray[np.int64]  # [B], of each row


def draw_batch_negatives(batch: BatchDocuments, limits: NDArray[np.int64], seed: int, step: int) -> BatchNegatives:
    """Draw at most `limits` [B] documents of other rows for each row, uniformly and without replacement.

    A function of the seed, the step and the batch. Documents that are equal by text or id are one document. Not drawn
    for a row: the documents that it holds itself or that a row with an equal query holds, whether the batch uses them
    or not, the known answers to its query, and its query, where that is a document of another row. A row for which too
    few documents remain gets those.
    """
    num_rows, candidates = len(limits), _distinct(batch)
    number = len(candidates)
    if number == 0:
        return BatchNegatives(np.empty(0, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))
    queries, groups = np.unique(batch.query_keys, return_inverse=True)
    excluded = _excluded(batch, candidates, groups, queries)
    num_excluded = np.bincount(excluded // number, minlength=num_rows)  # of each group
    first_excluded = np.cumsum(num_excluded) - num_excluded
    num_allowed = (number - num_excluded)[groups]
    counts = np.minimum(limits, num_allowed)
    owners = np.repeat(np.arange(num_rows), counts)
    starts = (np.cumsum(counts) - counts)[owners]
    keys = make_keys(seed, Purpose.batch_negatives, step, np.arange(num_rows))
    drawn = permute(np.arange(len(owners)) - starts, num_allowed[owners], keys[owners])
    # From indices among the allowed candidates to indices among all: the excluded candidate e, before which k others
    # are excluded, has e - k allowed ones before it.
    group = groups[owners]
    num_before = np.arange(len(excluded)) - first_excluded[excluded // number]
    skipped = np.searchsorted(excluded - num_before, group * number + drawn, side="right") - first_excluded[group]
    return BatchNegatives(candidates[drawn + skipped], counts)


def _distinct(batch: BatchDocuments) -> NDArray[np.int64]:
    """The first of each set of equal documents, indices among the K."""
    _, first = np.unique(batch.keys[batch.used], return_index=True)
    if batch.ids is None:
        return first
    ids = batch.ids[batch.used][first]
    _, first_of_id = np.unique(ids, return_index=True)
    is_first = ids < 0
    is_first[first_of_id] = True
    return first[is_first]


def _excluded(
    batch: BatchDocuments, candidates: NDArray[np.int64], groups: NDArray[np.int64], queries: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Which candidates no row of a group gets: ascending numbers group * candidates + candidate.

    `groups` [B] are numbers from 0, equal for rows with equal queries, whose keys are `queries`.
    """
    owners = np.repeat(groups, batch.counts)
    # A row's query is excluded as well.
    cells = [_cells(batch.keys[batch.used][candidates], groups, batch.query_keys)]
    cells.append(_cells(batch.keys[batch.used][candidates], owners, batch.keys))
    of_query, answers = batch.known_answers.T
    cells.append(_cells(batch.keys[batch.used][candidates], np.searchsorted(queries, of_query), answers))
    if batch.ids is not None:
        has_id = batch.ids >= 0
        cells.append(_cells(batch.ids[batch.used][candidates], owners[has_id], batch.ids[has_id]))
    return np.unique(np.concatenate(cells))


def _cells(candidates: NDArray[np.int64], groups: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Group * candidates + candidate for each value of a group that a candidate has."""
    order = np.argsort(candidates, kind="stable")
    index = order[np.minimum(np.searchsorted(candidates, values, sorter=order), len(candidates) - 1)]
    is_candidate = candidates[index] == values
    cells: NDArray[np.int64] = groups[is_candidate] * len(candidates) + index[is_candidate]
    return cells
