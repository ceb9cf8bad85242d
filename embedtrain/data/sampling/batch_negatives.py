"""Documents of other rows of a global batch as further negatives of a row, drawn for all rows at once.

B: rows of the batch; E: all documents that these rows hold; K: those that the batch uses; N: drawn documents.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import Purpose, make_keys, permute


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
