"""Muon on sharded matrices: each matrix is made orthogonal as a whole, on one rank, whatever the number of ranks.

The iteration of Newton and Schulz needs the whole matrix; on a shard of its rows it would have another result. Ranks
send their rows of each matrix to its owner, which computes and returns rows of the result to the ranks that hold them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.distributed.collectives import exchange_rows

# Of the quintic iteration, by Keller Jordan (2024): singular values end between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with all of its singular values near 1, in its own type: five iterations of Newton-Schulz."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram: Tensor = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def update_scale(shape: Sequence[int]) -> float:
    """The factor with which updates of a matrix have the RMS of those of AdamW (Liu et al., 2025)."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where the rows of a matrix are: in each replica, shard s holds `rows[s]` of them."""

    index: int
    shape: tuple[int, int]
    rows: tuple[int, ...]
    owner: int  # rank that computes

    def size(self, shard: int) -> int:
        """Elements of a shard."""
        return self.rows[shard] * self.shape[1]


def orthogonal_updates(
    parameters: Sequence[nn.Parameter], updates: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The local rows of `orthogonalize` of each matrix of which `updates` are the local rows. A collective.

    Args:
        parameters: matrices, sharded by rows on one mesh of replicas and shards.
        dtype: of the products of matrices.
    """
    if not parameters:
        return []
    first = parameters[0]
    assert isinstance(first, DTensor)
    grid, me = first.device_mesh.mesh, dist.get_rank()
    positions = {int(rank): (r, s) for r, row in enumerate(grid.tolist()) for s, rank in enumerate(row)}
    # With parallel.cpu_offload the updates are in host memory.
    num_shards, device = grid.shape[1], torch.device(first.device_mesh.device_type)
    matrices = _assign([(int(p.shape[0]), int(p.shape[1])) for p in parameters], list(positions), num_shards)
    ranks, (replica, shard) = sorted(positions), positions[me]

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, device=device)

    # An owner receives rows from the shards of its own replica.
    outgoing = {rank: [m for m in matrices if m.owner == rank] for rank in ranks if positions[rank][0] == replica}
    sent = [sum(m.size(shard) for m in outgoing.get(rank, [])) for rank in ranks]
    owned = [m for m in matrices if m.owner == me]
    received = [
        sum(m.size(positions[rank][1]) for m in owned) if positions[rank][0] == replica else 0 for rank in ranks
    ]
    flat = [updates[m.index].reshape(-1).float().to(device) for rank in ranks for m in outgoing.get(rank, [])]
    arrived = exchange_rows(joined(flat), sent, received).split(received)
    by_shard = {
        positions[rank][1]: part for rank, part in zip(ranks, arrived, strict=True) if positions[rank][0] == replica
    }
    results = _results(owned, by_shard, dtype)
    # The owner sends the rows of the result to all replicas.
    parts = [results[m.index][positions[rank][1]] for rank in ranks for m in owned]
    sent = [sum(m.size(positions[rank][1]) for m in owned) for rank in ranks]
    received = [sum(m.size(shard) for m in matrices if m.owner == rank) for rank in ranks]
    returned = exchange_rows(joined(parts), sent, received)
    local: dict[int, Tensor] = {}
    sizes = [(m.index, m.size(shard)) for rank in ranks for m in matrices if m.owner == rank]
    for (index, _), part in zip(sizes, returned.split([size for _, size in sizes]), strict=True):
        local[index] = part.view_as(updates[index]).to(updates[index].device)
    return [local[index] for index in range(len(parameters))]


def _assign(shapes: Sequence[tuple[int, int]], ranks: Sequence[int], num_shards: int) -> list[_Matrix]:
    """An owner for each matrix: the largest first, to the rank with the least work."""
    work, owners = dict.fromkeys(sorted(ranks), 0), {}
    for index in sorted(range(len(shapes)), key=lambda index: (-_cost(shapes[index]), index)):
        owners[index] = min(work, key=lambda rank: (work[rank], rank))
        work[owners[index]] += _cost(shapes[index])
    return [
        _Matrix(index, shape, tuple(_rows(shape[0], num_shards)), owners[index]) for index, shape in enumerate(shapes)
    ]


def _cost(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


def _rows(rows: int, num_shards: int) -> list[int]:
    """Rows of each shard: FSDP2 splits like `torch.chunk`."""
    part = -(-rows // num_shards)
    return [max(0, min(part, rows - part * shard)) for shard in range(num_shards)]


def _results(owned: Sequence[_Matrix], by_shard: dict[int, Tensor], dtype: torch.dtype) -> dict[int, list[Tensor]]:
    """The rows of each shard of the orthogonal matrices, flattened."""
    pieces = {
        shard: dict(zip([m.index for m in owned], part.split([m.size(shard) for m in owned]), strict=True))
        for shard, part in by_shard.items()
    }
    results = {}
    for matrix in owned:
        whole = torch.cat([pieces[shard][matrix.index] for shard in range(len(matrix.rows))]).view(matrix.shape)
        flat = orthogonalize(whole.to(dtype)).float().reshape(-1)
        results[matrix.index] = list(flat.split([matrix.size(shard) for shard in range(len(matrix.rows))]))
    return results
