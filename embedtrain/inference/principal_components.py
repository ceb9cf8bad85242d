"""Principal components of vectors whose moments are summed over blocks and ranks.

D: dimensions of the vectors.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.distributed.world import World


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over vectors, in float64."""

    count: Tensor  # [1]
    total: Tensor  # [D], sum of x
    products: Tensor  # [D, D], sum of x x^T

    @classmethod
    def of(cls, vectors: Tensor) -> "Moments":
        """The sums over the rows of [n, D]."""
        rows = vectors.double()
        return cls(torch.tensor([float(len(rows))], dtype=torch.float64), rows.sum(dim=0).cpu(), (rows.T @ rows).cpu())

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.products + other.products)

    def all_reduced(self, world: World) -> "Moments":
        """The sums over the vectors of all ranks. A collective."""
        size = len(self.total)
        flat = torch.cat([self.count, self.total, self.products.flatten()]).to(world.device)
        dist.all_reduce(flat)
        count, total, products = flat.cpu().split([1, size, size * size])
        return Moments(count, total, products.view(size, size))

    @property
    def mean(self) -> Tensor:
        """[D]."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """[D, D]."""
        return self.products / self.count - torch.outer(self.mean, self.mean)

    @property
    def second_moment(self) -> Tensor:
        """[D, D], the covariance without subtracting the mean."""
        return self.products / self.count


def principal_components(matrix: Tensor | NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """The eigenvectors of a symmetric float64 matrix [D, D] as rows [D, D], and their values [D], largest first.

    The entry of each with the largest absolute value is positive: an eigenvector has no sign of its own. On one thread,
    because libraries add in another order with another number of threads.
    """
    with threadpool_limits(limits=1):
        values, vectors = np.linalg.eigh(np.asarray(matrix))
    values, components = values[::-1], vectors.T[::-1]
    largest = np.abs(components).argmax(axis=1)
    components = components * np.sign(components[np.arange(len(components)), largest])[:, None]
    return torch.from_numpy(components.copy()), torch.from_numpy(values.copy())
