"""Drawing one positive and some hard negatives for every row of a batch at once.

B: rows of the batch; N: negatives drawn over all of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import make_keys, random_below, random_bits

# What the key is for: `order` takes other numbers from the same seed.
_DRAW = 4


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken of each row.

    Attributes:
        positive: int64 [B], which of the row's positives; -1 where it has none.
        negatives: int64 [N], which of its row's negatives, row after row, in the order they were drawn.
        owners: int64 [N], the row within the batch that each is of, ascending.
        counts: int64 [B], how many negatives each row has.
    """

    positive: NDArray[np.int64]
    negatives: NDArray[np.int64]
    owners: NDArray[np.int64]
    counts: NDArray[np.int64]


def draw(
    num_positives: NDArray[np.int64],
    num_negatives: NDArray[np.int64],
    most: int | NDArray[np.int64] | None,
    places: NDArray[np.int64],
    seed: int,
) -> Selection:
    """One positive of each row, and at most so many of its negatives, each as likely as any other.

    No negative is drawn twice: one given twice would weigh twice in the loss. Where all fit they are taken in
    their order. What is drawn for a row depends on the seed, on its place in the run and on its own numbers alone:
    not on the rows beside it, and a row that is seen again draws anew.

    Args:
        num_positives: int64 [B], that each row has; a row without any has no documents, so no negatives either.
        num_negatives: int64 [B], likewise.
        most: negatives of a row that are used at a time, of all rows or int64 [B]; None or -1: all.
        places: int64 [B], each row's place in the run.
        seed: the run's seed.
    """
    limits = np.broadcast_to(np.asarray(-1 if most is None else most, dtype=np.int64), num_negatives.shape)
    has = np.where(num_positives > 0, num_negatives, 0)
    counts = np.where(limits < 0, has, np.minimum(has, limits))
    keys = make_keys(seed, _DRAW, places)
    positive = np.where(num_positives > 0, random_below(random_bits(keys, 0), np.maximum(num_positives, 1)), -1)

    owners = np.repeat(np.arange(len(counts)), counts)
    negatives = _numbered(counts)
    chosen = np.flatnonzero((counts < has) & (counts > 0))
    if len(chosen):
        # Of each of these rows the negatives with the smallest hashes. Sorting leaves a row's candidates where
        # they stood as a block, so that their numbers before are their ranks after.
        of, ranks = np.repeat(chosen, has[chosen]), _numbered(has[chosen])
        hashes = random_bits(keys[of], ranks + 1)
        # Row and hash in one number: seven times faster than `lexsort`, for rows are in order as they are.
        row, rest = of.astype(np.uint64) << np.uint64(40), hashes >> np.uint64(24)
        order = np.argsort(row | rest, kind="stable")
        negatives[(counts < has)[owners]] = ranks[order[ranks < counts[of]]]
    return Selection(positive, negatives, owners, counts)


def _numbered(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each row: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
