"""The vectors of texts on a rank, and those of all ranks.

Shapes: n texts, n_r of them on rank r, with R vectors; D dimensions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.encoded import Part


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """The vectors on this rank; each text is on exactly one rank."""

    vectors: Tensor  # [R, D] on this rank's device, text by text; float32, unless `transform` returned another type
    rows: Tensor  # int64 [n_r] on the CPU, the index of each text among the n texts
    sizes: NDArray[np.int64] | None = None  # [n_r], vectors of each text; None: one

    @property
    def part(self) -> Part:
        """The vectors of the n_r texts."""
        return Part(self.vectors, self.sizes)


def gather_texts(local: Part) -> Part:
    """The texts of all ranks, on every rank. A collective."""
    values = gather_rows(local.values)
    return Part(values, None if local.sizes is None else gather_numbers(local.sizes, values.device))


def gather_numbers(numbers: NDArray[np.int64], device: torch.device) -> NDArray[np.int64]:
    """The numbers of all ranks, on every rank; they travel on `device`. A collective."""
    gathered: NDArray[np.int64] = gather_rows(torch.from_numpy(numbers).to(device)).cpu().numpy()
    return gathered
