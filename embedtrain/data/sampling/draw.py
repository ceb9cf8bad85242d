"""Documents of a batch, drawn for all rows at once: a positive and hard negatives of each, and those of other rows.

B: rows of the batch; E: all documents that these rows hold; K: those that the batch uses; N: drawn documents.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import Purpose, make_keys, permute, random_below, random_bits

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
    lists: NDArray[np.bool_] | None = None,
) -> Selection:
    """Select one positive and at most `max_negatives` negatives of each row, uniformly and without replacement.

    If all negatives are selected they keep their order. The selection of a row is a function of the seed, its position
    in the run and its own counts: it does not depend on other rows, and it changes when the row occurs again.

    Args:
        num_positives: int64 [B], of each row; a row without positives gets no negatives either.
        num_negatives: int64 [B], of each row.
        max_negatives: for all rows or int64 [B].
        positions: int64 [B], position of each row in the run.
        lists: bool [B], rows whose other positives are drawn like negatives; default: none.
    """
    num_others = num_negatives if lists is None else num_negatives + np.where(lists, num_positives - 1, 0)
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
    if lists is not None:  # from indices among all documents but the drawn one
        among_all = negatives + (negatives >= positive[owners])
        negatives = np.where(lists[owners], among_all - num_positives[owners], negatives)
    return Selection(positive, negatives, owners, counts)


def _positions_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ..., counts - 1 for each row: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDocuments:
    """The documents of a batch and what they are equal to."""

    query_keys: NDArray[np.int64]  # [B], equal exactly where two queries are equal
    keys: NDArray[np.int64]  # [E], row by row: equal exactly where two texts are equal
    ids: NDArray[np.int64] | None  # [E], equal exactly where two ids are equal, -1 without an id; None: there are none
    counts: NDArray[np.int64]  # [B], documents that each row holds, with those that the batch does not use
    used: NDArray[np.int64]  # [K], the documents that the batch uses, among the E


@dataclass(frozen=True, slots=True)
class BatchNegatives:
    """The drawn documents."""

    documents: NDArray[np.int64]  # [N], row by row, each an index among the K documents of the batch
    counts: NDArray[np.int64]  # [B], of each row


def draw_batch_negatives(batch: BatchDocuments, limits: NDArray[np.int64], seed: int, step: int) -> BatchNegatives:
    """Draw at most `limits` [B] documents of other rows for each row, uniformly and without replacement.

    A function of the seed, the step and the batch. Documents that are equal by text or id are one document. Not drawn
    for a row: the documents that it holds itself or that a row with an equal query holds, whether the batch uses them
    or not, and its query, where that is a document of another row. A row for which too few documents remain gets those.
    """
    num_rows, candidates = len(limits), _distinct(batch)
    number = len(candidates)
    if number == 0:
        return BatchNegatives(np.empty(0, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))
    _, groups = np.unique(batch.query_keys, return_inverse=True)
    excluded = _excluded(batch, candidates, groups)
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


def _excluded(batch: BatchDocuments, candidates: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which candidates no row of a group gets: ascending numbers group * candidates + candidate.

    `groups` [B] are numbers from 0, equal for rows with equal queries.
    """
    owners = np.repeat(groups, batch.counts)
    # A row's query is excluded as well.
    cells = [_cells(batch.keys[batch.used][candidates], groups, batch.query_keys)]
    cells.append(_cells(batch.keys[batch.used][candidates], owners, batch.keys))
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
