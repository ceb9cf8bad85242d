"""Similarities, distances and reductions that several losses share, and the temperature.

P: pairs; A, N: rows of two sets; D: dimensions; B, M: queries and documents of this rank; c, t: rows and candidates of
one tile.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.losses import Distance, Similarity

# The largest matrices of one chunk take at most this many bytes.
MAX_CHUNK_BYTES = 256 * 2**20


class Temperature(nn.Module):
    """A temperature, fixed or trained as the logarithm of its inverse within `bounds` (Radford et al., 2021: CLIP)."""

    def __init__(self, value: float, *, trained: bool, bounds: Sequence[float] = (0.0, math.inf)) -> None:
        super().__init__()
        self.lowest, self.highest = (-math.log(bound) for bound in reversed(bounds)) if trained else (0.0, 0.0)
        start = torch.tensor([-math.log(value)], dtype=torch.float64)
        # Shape (1,): FSDP rejects scalars. A fixed temperature skips the logarithm, which would cost digits.
        self.log_scale = nn.Parameter(start.float()) if trained else None
        self.fixed = 1.0 / value
        self.followed: Tensor | None = None

    def follow(self, log_scale: Tensor) -> None:
        """Take the logarithm of one over a fixed temperature from this tensor, of one element, in every batch."""
        self.followed = log_scale

    def scale(self, like: Tensor) -> Tensor:
        """One over the temperature, [1], in the dtype of `like`; differentiable if it is trained."""
        if self.followed is not None:
            return self.followed.reshape(1).exp().to(like.dtype)
        if self.log_scale is None:
            return like.new_full((1,), self.fixed)
        with torch.no_grad():  # clamped before use instead of after the step, so a value at a bound keeps its gradient
            self.log_scale.clamp_(self.lowest, self.highest)
        return self.log_scale.exp().to(like.dtype)


def at_least_float32(vectors: Tensor) -> Tensor:
    """The vectors in float32; float64 stays. Losses never compute in a narrower dtype."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def rounding_tolerance(like: Tensor) -> float:
    """How far two computations of the same similarity of vectors of length 1 may differ."""
    # TF32 rounds the operands to 10 bits, so each is off by up to 2^-10 of its size.
    tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return 2**-9 if tf32 else 16 * torch.finfo(like.dtype).eps


def positions_in_row(owners: Tensor) -> Tensor:
    """Int64 [M]: 0 for a row's positive, k for its k-th hard negative. `owners` as in `BatchInfo`."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)


def pairwise_similarity(left: Tensor, right: Tensor, similarity: Similarity) -> Tensor:
    """[P, D] and [P, D] to [P]."""
    if similarity is Similarity.cosine:
        left, right = F.normalize(left, dim=1), F.normalize(right, dim=1)
    return (left * right).sum(dim=1)


def pairwise_distance(left: Tensor, right: Tensor, distance: Distance) -> Tensor:
    """[P, D] and [P, D] to [P]. The gradient between equal vectors is 0."""
    match distance:
        case Distance.cosine:
            return 1 - pairwise_similarity(left, right, Similarity.cosine)
        case Distance.euclidean:
            norms: Tensor = torch.linalg.vector_norm(left - right, dim=1)
            return norms
        case Distance.manhattan:
            return (left - right).abs().sum(dim=1)


def distance_matrix(left: Tensor, right: Tensor, distance: Distance) -> Tensor:
    """[A, D] and [N, D] to [A, N]. Cosine expects vectors of length 1. The gradient between equal vectors is 0."""
    match distance:
        case Distance.cosine:
            return 1 - inner_products(left, right)
        case Distance.euclidean:
            # By a matrix product, |a|^2 - 2ab + |b|^2 would cancel between near vectors: 3e-4 instead of 0.
            return torch.cdist(left, right, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
        case Distance.manhattan:
            return torch.cdist(left, right, p=1.0)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """[A, D] and [N, D] to [A, N], in the dtype of the inputs: under autocast bf16 would be off by 1 %."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T


def rows_per_chunk(values_per_row: int, dtype: torch.dtype) -> int:
    """The number of rows, at least 1, that fit into one chunk if each needs `values_per_row` numbers."""
    return max(1, MAX_CHUNK_BYTES // max(1, values_per_row * dtype.itemsize))


def row_slices(num_rows: int, height: int) -> list[tuple[int, int]]:
    """Consecutive rows, at most `height` of them at a time: the first of each slice, and the one after its last."""
    return [(start, min(start + height, num_rows)) for start in range(0, num_rows, height)]


def row_max(scores: Tensor) -> Tensor:
    """The largest score of each row; -inf without candidates."""
    if scores.shape[1] == 0:  # torch has no maximum of an empty dimension
        return scores.new_full((len(scores),), -torch.inf)
    return scores.amax(dim=1)


def finite(values: Tensor) -> Tensor:
    """The values, and 0 in place of -inf: of a row without candidates."""
    return values.masked_fill(values == -torch.inf, 0.0)


def add_exp(maximum: Tensor, sum_exp: Tensor, scores: Tensor, highest: Tensor | None = None) -> Tensor:
    """Add further scores [c, t] to the largest one [c] and the sum of exp(score - largest) [c] of each row, in place.

    The scores become exp(score - largest). Returns the factor [c] of what was added before. `highest` is `row_max` of
    the scores, if it is known.
    """
    largest = torch.maximum(maximum, row_max(scores) if highest is None else highest)
    offset = finite(largest)
    rescale = (maximum - offset).exp()
    sum_exp.mul_(rescale).add_(scores.sub_(offset.unsqueeze(1)).exp_().sum(dim=1))
    maximum.copy_(largest)
    return rescale


def sum_by_row(terms: Tensor, owners: Tensor, num_rows: int) -> Tensor:
    """The detached sum of each row's terms: [T] with the row of each term, int64 [T] -> [num_rows]."""
    return terms.new_zeros(num_rows).index_add_(0, owners, terms.detach())


def group_max(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """The largest of the values [M] of each group, [num_groups]; -inf for an empty group."""
    return values.new_full((num_groups,), -torch.inf).scatter_reduce(0, owners, values, "amax")


def group_logsumexp(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """Logsumexp of the values [M] of each group, [num_groups]; a group of only -inf gives 0 and no gradient."""
    highest = group_max(values.detach(), owners, num_groups)
    offset = highest.masked_fill(highest == -torch.inf, 0.0)
    sum_exp = torch.zeros_like(offset).index_add(0, owners, (values - offset[owners]).exp())
    return offset + sum_exp.masked_fill(highest == -torch.inf, 1.0).log()


def group_log_softmax(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """Log softmax of the values [M] over those of the same group."""
    return values - group_logsumexp(values, owners, num_groups)[owners]


def is_group_max(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """Bool [M], where a value is the largest of its group."""
    return values == group_max(values, owners, num_groups)[owners]
