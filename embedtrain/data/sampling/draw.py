"""Selection of one positive and some hard negatives for all rows of a batch at once.

B: rows of the batch; N: negatives drawn over all of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import Purpose, make_keys, random_below, random_bits

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
