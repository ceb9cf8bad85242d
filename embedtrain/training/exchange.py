"""Vectors on their way: from the rank that encoded a text to the rank that has its row, and gradients back.

Texts are encoded wherever they fit best. n: texts that this rank encodes; m: texts of its rows, B queries and then
M documents; W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.distributed.collectives import exchange_rows


@dataclass(frozen=True, slots=True)
class Exchange:
    """What goes where, known on every rank without asking.

    Attributes:
        order: int64 [n], this rank's encoded texts by the rank of their row.
        sent: [W], how many go to each rank.
        received: [W], how many come from each rank.
        places: int64 [m], which of this rank's texts each is that comes, in the order of coming.
    """

    order: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    places: Tensor

    def home(self, vectors: Tensor) -> Tensor:
        """The vectors [n, D] of the texts encoded here -> those of this rank's rows [m, D]. Without gradient.

        A collective: every rank calls it.
        """
        found = exchange_rows(vectors[self.order], self.sent, self.received)
        return torch.empty_like(found).index_copy_(0, self.places, found)

    def back(self, slopes: Tensor) -> Tensor:
        """The other way round, [m, D] -> [n, D]: gradients of what `home` brought. A collective."""
        found = exchange_rows(slopes[self.places], self.received, self.sent)
        return torch.empty_like(found).index_copy_(0, self.order, found)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Exchange":
        """The same with its tensors changed."""
        return replace(self, order=change(self.order), places=change(self.places))


def plan_exchange(
    encoded_on: NDArray[np.int64], belongs_to: NDArray[np.int64], rank: int, size: int, encoded: NDArray[np.int64]
) -> Exchange:
    """What rank `rank` sends and receives.

    Args:
        encoded_on: int64 [T], the rank that encodes each text of the global batch.
        belongs_to: int64 [T], the rank that has its row. A rank's texts count in the order of T.
        rank: this rank.
        size: number of ranks.
        encoded: int64 [n], the texts that this rank encodes, in the order of its vectors.
    """
    to = belongs_to[encoded]
    order = np.lexsort((encoded, to))  # by rank, then by text: the order in which the other side expects them
    mine = np.flatnonzero(belongs_to == rank)
    coming = encoded_on[mine]
    return Exchange(
        order=torch.from_numpy(order),
        sent=np.bincount(to, minlength=size).tolist(),
        received=np.bincount(coming, minlength=size).tolist(),
        places=torch.from_numpy(np.argsort(coming, kind="stable")),
    )
