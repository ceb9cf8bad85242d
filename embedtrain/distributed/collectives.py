"""Rows over all ranks: gathered with their gradient, in any number per rank, none included.

Shapes: R_r rows on rank r, R = sum of R_r, W ranks, D columns.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def ring(tensors: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Every rank's tensors in turn, beginning with this rank's own; no rank ever holds more than two ranks'.

    The next rank's tensors travel while these are worked on. Without gradient.

    Args:
        tensors: this rank's, each with rows first.
        counts: of each of them, how many rows each rank has.

    Yields:
        A rank and its tensors. Every rank must take all W of them, and leave them unchanged.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held = []
    for tensor, rows in zip(tensors, counts, strict=True):
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        held.append(padded)
    for hop in range(size):
        coming = [torch.empty_like(tensor) for tensor in held]
        works: list[dist.Work] = []
        if hop < size - 1:
            operations = []
            for tag, (here, there) in enumerate(zip(held, coming, strict=True)):
                if here.numel():
                    operations.append(dist.P2POp(dist.isend, here, (rank + 1) % size, tag=tag))
                    operations.append(dist.P2POp(dist.irecv, there, (rank - 1) % size, tag=tag))
            works = dist.batch_isend_irecv(operations) if operations else []
        of = (rank - hop) % size
        yield of, [tensor[: rows[of]] for tensor, rows in zip(held, counts, strict=True)]
        for work in works:
            work.wait()
        held = coming


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send rows to the ranks they belong to: [sum of sent, ...] -> [sum of received, ...]. Without gradient.

    The way back is the same with the two counts swapped. Every rank must call it, also one without rows.

    Args:
        rows: this rank's, those for rank 0 first, then those for rank 1, and so on; the same trailing shape and
            dtype on all ranks.
        sent: how many of them go to each rank.
        received: how many come from each rank: on rank r entry s is what rank s has sent to r.

    Returns:
        What came, by the rank it came from.
    """
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    # One of the few that torch 2.13 did not rename.
    dist.all_to_all_single(out, rows.detach().contiguous(), list(received), list(sent))
    return out


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors of one shape, on every rank, differentiably.

    The backward pass sums, over all ranks, the gradients of what each made of the sum. A rank that takes
    1/W of a function of the sum for its share therefore gets the function's exact gradient.
    """
    return _Sum.apply(values)  # type: ignore[no-any-return,no-untyped-call]


def total(count: int, device: torch.device) -> int:
    """The sum of the ranks' counts, on every rank."""
    return sum(row_counts(count, device))


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients of replicated parameters their mean over the ranks, in one collective.

    A rank whose loss did not reach a parameter takes part with zero.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([grad.flatten().double() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(trained, flat.split([grad.numel() for grad in grads]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def max_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Each place's largest integer over all ranks, on every rank."""
    box = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [int(value) for value in box.tolist()]


def gather_vector(values: Tensor, more: Sequence[float] = ()) -> Tensor:
    """Every rank's numbers as a float64 matrix [W, values + more], on the CPU of every rank.

    Args:
        values: this rank's, a vector where it computes.
        more: others that follow them.
    """
    known = torch.tensor(more, dtype=torch.float64).to(values.device, non_blocking=True)
    mine = torch.cat([values.detach().double(), known])
    out = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.float64, device=mine.device)
    _all_gather(out, mine)
    return out.view(-1, mine.numel()).cpu()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        out = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out


class _GatherRows(torch.autograd.Function):
    """Ranks may hold different numbers of rows, so blocks travel padded to the longest and are cut after."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        if longest == 0:
            return rows.new_empty((0, *rows.shape[1:]))
        out = rows.new_empty((len(counts) * longest, *rows.shape[1:]))
        if min(counts) == longest:
            _all_gather(out, rows.contiguous())
            return out
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        _all_gather(out, padded)
        return torch.cat([block[:n] for block, n in zip(out.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        counts: list[int] = ctx.counts
        longest = max(counts)
        if longest == 0:
            return grad, None
        mine = grad.new_empty((longest, *grad.shape[1:]))
        if min(counts) == longest:
            _reduce_scatter(mine, grad.contiguous())
            return mine, None
        padded = grad.new_zeros((len(counts), longest, *grad.shape[1:]))
        for block, part, n in zip(padded, grad.split(counts), counts, strict=True):
            block[:n] = part
        _reduce_scatter(mine, padded.flatten(0, 1))
        return mine[: counts[dist.get_rank()]], None
