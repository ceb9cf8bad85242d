"""How vectors are compared, pair by pair and all with all, and where a row's documents stand.

P: pairs; A, N: rows of two sets; D: dimensions; M: documents of this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Distance, Similarity

# What the largest matrices of one chunk may take, bytes.
_CHUNK_BYTES = 256 * 2**20


def widened(vectors: Tensor) -> Tensor:
    """The same in float32; float64 stays. Losses compute in nothing narrower."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def places_in_row(owners: Tensor) -> Tensor:
    """Int64 [M]: 0 for a row's positive, k for its k-th hard negative. `owners` as in `BatchInfo`."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)


def similarities(left: Tensor, right: Tensor, similarity: Similarity) -> Tensor:
    """[P, D] and [P, D] to [P]."""
    if similarity is Similarity.cosine:
        left, right = F.normalize(left, dim=1), F.normalize(right, dim=1)
    return (left * right).sum(dim=1)


def distances(left: Tensor, right: Tensor, distance: Distance) -> Tensor:
    """[P, D] and [P, D] to [P]. The gradient between equal vectors is 0."""
    match distance:
        case Distance.cosine:
            return 1 - similarities(left, right, Similarity.cosine)
        case Distance.euclidean:
            norms: Tensor = torch.linalg.vector_norm(left - right, dim=1)
            return norms
        case Distance.manhattan:
            return (left - right).abs().sum(dim=1)


def all_distances(left: Tensor, right: Tensor, distance: Distance) -> Tensor:
    """[A, D] and [N, D] to [A, N]. For the cosine both must have length 1. The gradient between equal vectors is 0."""
    match distance:
        case Distance.cosine:
            return 1 - products(left, right)
        case Distance.euclidean:
            # By a matrix product, |a|^2 - 2ab + |b|^2 would cancel between near vectors: 3e-4 instead of 0.
            return torch.cdist(left, right, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
        case Distance.manhattan:
            return torch.cdist(left, right, p=1.0)


def products(left: Tensor, right: Tensor) -> Tensor:
    """[A, D] and [N, D] to their dot products [A, N], in the inputs' precision: bf16 would be off by 1 %."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T


def rows_at_once(values_per_row: int, dtype: torch.dtype) -> int:
    """How many rows a chunk may have where each needs `values_per_row` numbers at a time; at least 1."""
    return max(1, _CHUNK_BYTES // max(1, values_per_row * dtype.itemsize))
