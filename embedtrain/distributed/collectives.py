"""Differentiable collectives over rows, with any number of rows per rank, including 0.

Shapes: R_r rows on rank r, R = sum of R_r, W ranks, D columns.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 renamed these two collectives and warns about the old names; 2.11 and 2.12 only have the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def row_counts(rows: int, device: torch.device) -> list[int]:
    """Number of rows on each rank. Every rank must call it."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    _all_gather(counts, torch.tensor([rows], dtype=torch.int64, device=device))
    return [int(n) for n in counts.tolist()]


def gather_rows(rows: Tensor, counts: list[int] | None = None) -> Tensor:
    """Concatenate the rows of all ranks, [R_r, ...] -> [R, ...], differentiably.

    The backward pass sums the gradients of a row over all ranks and returns the sum to the rank that the row came from.
    With a local loss on each rank, the gradient of the *sum* of the local losses is therefore exact. A gather without
    gradient, as in other trainers, makes it wrong.

    Args:
        rows: any number; the same trailing shape and dtype on all ranks.
        counts: `row_counts` of these rows, if already known.
    """
    counts = row_counts(rows.shape[0], rows.device) if counts is None else counts
    return _GatherRows.apply(rows, counts)  # type: ignore[no-any-return,no-untyped-call]


def ring(tensors: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Pass every rank's tensors around, starting with the local ones; a rank holds those of at most two ranks.

    Yields a rank and its tensors, `counts[i][rank]` rows of the i-th. Every rank must consume all W and must not modify
    them. The next transfer overlaps with work on the current tensors. Not differentiable.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held = []
    for tensor, rows in zip(tensors, counts, strict=True):
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        held.append(padded)
    for hop in range(size):
        incoming = [torch.empty_like(tensor) for tensor in held]
        works: list[dist.Work] = []
        if hop < size - 1:
            operations = []
            for tag, (outgoing, buffer) in enumerate(zip(held, incoming, strict=True)):
                if outgoing.numel():
                    operations.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % size, tag=tag))
                    operations.append(dist.P2POp(dist.irecv, buffer, (rank - 1) % size, tag=tag))
            works = dist.batch_isend_irecv(operations) if operations else []
        source = (rank - hop) % size
        yield source, [tensor[: rows[source]] for tensor, rows in zip(held, counts, strict=True)]
        for work in works:
            work.wait()
        held = incoming


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send each row to one rank: [sum of sent, ...] -> [sum of received, ...]. Not differentiable.

    The inverse is the same call with the two counts swapped. Every rank must call it, even without rows.

    Args:
        rows: ordered by destination rank; the same trailing shape and dtype on all ranks.
        sent: number of rows for each rank.
        received: number of rows from each rank: on rank r, entry s is what rank s sends to r.

    Returns:
        The received rows, ordered by source rank.
    """
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    # torch 2.13 did not rename this one.
    dist.all_to_all_single(out, rows.detach().contiguous(), list(received), list(sent))
    return out


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors of one shape, on every rank, differentiably.

    The backward pass sums the gradients of the result over all ranks. If every rank's local loss is 1/W of a function
    of the sum, the gradient of that function is exact.
    """
    return _Sum.apply(values)  # type: ignore[no-any-return,no-untyped-call]


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients of replicated parameters their mean over the ranks, in one collective.

    For the parameters of losses, such as a temperature; FSDP reduces those of the encoder.
    A parameter without gradient on this rank counts as zero.
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
    """The elementwise maximum over all ranks, on every rank."""
    box = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [int(value) for value in box.tolist()]


def gather_vector(values: Tensor, more: Sequence[float] = ()) -> Tensor:
    """Every rank's numbers as a float64 matrix [W, len(values) + len(more)] on the device of `values`."""
    # A copy from memory that is not pinned may wait for the work queued on the GPU.
    known = torch.tensor(more, dtype=torch.float64, pin_memory=values.is_cuda).to(values.device, non_blocking=True)
    local = torch.cat([values.detach().double(), known])
    out = torch.empty(dist.get_world_size() * local.numel(), dtype=torch.float64, device=local.device)
    _all_gather(out, local)
    return out.view(-1, local.numel())


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
    """Ranks may have different numbers of rows: blocks are padded to the longest, and trimmed after the collective."""

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
        local = grad.new_empty((longest, *grad.shape[1:]))
        if min(counts) == longest:
            _reduce_scatter(local, grad.contiguous())
            return local, None
        padded = grad.new_zeros((len(counts), longest, *grad.shape[1:]))
        for block, part, n in zip(padded, grad.split(counts), counts, strict=True):
            block[:n] = part
        _reduce_scatter(local, padded.flatten(0, 1))
        return local[: counts[dist.get_rank()]], None
