"""Rows over all ranks: gathered with their gradient, in any number per rank, none included.

Shapes: R_r rows on rank r, R = sum of R_r, W ranks, D columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two collectives and warns of the old names; 2.11 and 2.12 have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def row_counts(rows: int, device: torch.device) -> list[int]:
    """How many rows each rank has, in rank order. Every rank must call it."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    _all_gather(counts, torch.tensor([rows], dtype=torch.int64, device=device))
    return [int(n) for n in counts.tolist()]


def gather_rows(rows: Tensor, counts: list[int] | None = None) -> Tensor:
    """Concatenate the rows of all ranks, [R_r, ...] -> [R, ...], differentiably.

    The backward pass sums, over all ranks, the gradients that reached a row, and returns them to the
    rank the row came from. With a local loss on each rank this makes the gradient of the *sum* of those
    losses exact; gathering without it is what bends other trainers' gradients.

    Args:
        rows: this rank's rows; any number, but the same trailing shape and dtype on all ranks.
        counts: `row_counts` of these rows where the caller has them already.
    """
    counts = row_counts(rows.shape[0], rows.device) if counts is None else counts
    return _GatherRows.apply(rows, counts)  # type: ignore[no-any-return,no-untyped-call]


def max_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Each place's largest integer over all ranks, on every rank."""
    box = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [int(value) for value in box.tolist()]


def gather_vector(values: list[float], device: torch.device) -> Tensor:
    """Every rank's list of numbers as a float64 matrix [W, len(values)], on the CPU of every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    out = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.float64, device=device)
    _all_gather(out, mine)
    return out.view(-1, mine.numel()).cpu()


class _GatherRows(torch.autograd.Function):
    """Ranks may hold different numbers of rows, so blocks travel padded to the longest and are cut after."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        if longest == 0:
            return rows.new_empty((0, *rows.shape[1:]))
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        out = rows.new_empty((len(counts) * longest, *rows.shape[1:]))
        _all_gather(out, padded)
        return torch.cat([block[:n] for block, n in zip(out.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        counts: list[int] = ctx.counts
        longest = max(counts)
        if longest == 0:
            return grad, None
        padded = grad.new_zeros((len(counts), longest, *grad.shape[1:]))
        for block, part, n in zip(padded, grad.split(counts), counts, strict=True):
            block[:n] = part
        mine = grad.new_empty((longest, *grad.shape[1:]))
        _reduce_scatter(mine, padded.flatten(0, 1))
        return mine[: counts[dist.get_rank()]], None
