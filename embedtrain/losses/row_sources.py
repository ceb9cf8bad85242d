"""The training source of each row, by which the loss of a batch with rows of several sources is logged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSources:
    """Which source each of this rank's B rows is of. In `BatchInfo.prepared` under this class."""

    sources: Sequence[int]  # those that the global batch has rows of
    indices: Tensor  # int64 [B], index in `sources` of each row's
    scales: Tensor  # float64 [B], rows of the global batch per row of its source

    @classmethod
    def of(cls, row_sources: NDArray[np.int64], rank: int, size: int) -> Self:
        """From the source of each row of the global batch, [N]."""
        sources, indices, counts = np.unique(row_sources, return_inverse=True, return_counts=True)
        local = indices[rank::size]
        return cls(sources.tolist(), torch.from_numpy(local), torch.from_numpy(len(row_sources) / counts[local]))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to all tensors."""
        return replace(self, indices=change(self.indices), scales=change(self.scales))

    def local_losses(self, row_losses: Tensor) -> dict[int, Tensor]:
        """By source, this rank's part of the mean over its rows, from `LossOutput.row_losses` [B]."""
        sums = self.scales.new_zeros(len(self.sources)).index_add_(0, self.indices, row_losses.double() * self.scales)
        return dict(zip(self.sources, sums.unbind(), strict=True))
