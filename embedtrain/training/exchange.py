"""Exchange of embeddings: from the rank that encoded a text to the rank that has its row, and gradients back.

n: texts that this rank encodes; m: texts of its rows, B queries and then M documents; W: ranks.
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
    """Which embeddings go to which rank; every rank knows it without communication."""

    send_order: Tensor  # int64 [n], this rank's encoded texts, sorted by the rank of their row
    num_sent: Sequence[int]  # [W], texts sent to each rank
    num_received: Sequence[int]  # [W], texts received from each rank
    received_rows: Tensor  # int64 [m], index among this rank's texts of each text received, in order of arrival

    def to_row_owner(self, embeddings: Tensor) -> Tensor:
        """Embeddings [n, D] of the texts encoded here -> those of this rank's rows [m, D], without gradient.

        A collective.
        """
        received = exchange_rows(embeddings[self.send_order], self.num_sent, self.num_received)
        return torch.empty_like(received).index_copy_(0, self.received_rows, received)

    def to_encoder_rank(self, grads: Tensor) -> Tensor:
        """Gradients [m, D] of what `to_row_owner` returned -> those of the texts encoded here [n, D]. A collective."""
        received = exchange_rows(grads[self.received_rows], self.num_received, self.num_sent)
        return torch.empty_like(received).index_copy_(0, self.send_order, received)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Exchange":
        """The same exchange with `change` applied to its tensors."""
        return replace(self, send_order=change(self.send_order), received_rows=change(self.received_rows))


def plan_exchange(
    encoder_ranks: NDArray[np.int64], row_ranks: NDArray[np.int64], rank: int, size: int, encoded: NDArray[np.int64]
) -> Exchange:
    """What rank `rank` of `size` sends and receives.

    Args:
        encoder_ranks: int64 [T], the rank that encodes each text of the global batch.
        row_ranks: int64 [T], the rank that has the row of each text.
        encoded: int64 [n], the texts that this rank encodes, in the order of its embeddings.
    """
    destinations = row_ranks[encoded]
    send_order = np.lexsort((encoded, destinations))  # by rank, then by text: the order that the receiver expects
    origins = encoder_ranks[np.flatnonzero(row_ranks == rank)]
    return Exchange(
        send_order=torch.from_numpy(send_order),
        num_sent=np.bincount(destinations, minlength=size).tolist(),
        num_received=np.bincount(origins, minlength=size).tolist(),
        received_rows=torch.from_numpy(np.argsort(origins, kind="stable")),
    )
