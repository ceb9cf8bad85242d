"""Gathering rows, forward and backward, against torch.cat in one process."""

import pytest
import torch
from torch import nn

from embedtrain.distributed.collectives import (
    average_gradients,
    exchange_rows,
    gather_rows,
    gather_vector,
    max_over_ranks,
    ring,
    row_counts,
    sum_over_ranks,
)
from embedtrain.distributed.world import World

COUNTS = [[3, 3, 3, 3], [1, 4, 0, 2], [0, 0, 0, 5], [2, 0, 0, 0], [0, 0, 0, 0]]


def blocks(counts: list[int], trailing: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, *trailing, generator=generator, dtype=torch.float64) for n in counts]


def weights(rows: int, rank: int, trailing: tuple[int, ...]) -> torch.Tensor:
    """Weights of the gathered rows in the loss of a rank, different on every rank."""
    return torch.randn(rows, *trailing, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)


def loss(everything: torch.Tensor, rank: int) -> torch.Tensor:
    return (everything.sin() * weights(everything.shape[0], rank, tuple(everything.shape[1:]))).sum()


def check_gather_rows(world: World) -> None:
    for all_counts in COUNTS:
        for trailing in ((), (2,), (2, 3)):
            counts = all_counts[-world.size :]
            whole = [block.requires_grad_() for block in blocks(counts, trailing)]
            reference = torch.cat(whole)
            torch.autograd.backward([sum(loss(reference, rank) for rank in range(world.size))])

            for known_counts in (None, counts):
                local = whole[world.rank].detach().clone().requires_grad_()
                assert row_counts(local.shape[0], world.device) == counts
                gathered = gather_rows(local, known_counts)
                assert gathered.dtype == torch.float64
                torch.testing.assert_close(gathered, reference, rtol=0, atol=0)
                loss(gathered, world.rank).backward()
                torch.testing.assert_close(local.grad, whole[world.rank].grad, rtol=1e-12, atol=1e-12)


def check_integers(world: World) -> None:
    local = torch.arange(world.rank) + 2**62
    expected = torch.cat([torch.arange(rank) + 2**62 for rank in range(world.size)])
    assert gather_rows(local).equal(expected)
    assert max_over_ranks([7 - world.rank, world.rank], world.device) == [7, world.size - 1]
    table = gather_vector(torch.tensor([world.rank, float("nan")], device=world.device), [1e300])
    assert table[:, 0].tolist() == list(range(world.size))
    assert table[:, 1].isnan().all()
    assert table[:, 2].tolist() == [1e300] * world.size


def check_ring(world: World) -> None:
    """Two tensors of different counts, types and shapes arrive from every rank, in ring order."""
    for all_counts in COUNTS:
        counts = all_counts[-world.size :], all_counts[: world.size]
        floats = blocks(counts[0], (2,))
        integers = [torch.arange(n) + 100 * rank for rank, n in enumerate(counts[1])]
        sources = []
        for rank, (rows, numbers) in ring([floats[world.rank], integers[world.rank]], counts):
            torch.testing.assert_close(rows, floats[rank], rtol=0, atol=0)
            assert numbers.equal(integers[rank])
            sources.append(rank)
        assert sources == [(world.rank - hop) % world.size for hop in range(world.size)]


def check_exchange(world: World) -> None:
    """Every rank receives its rows in the order of their source ranks; the inverse returns them."""
    random = torch.Generator().manual_seed(4)
    nobody = torch.zeros(world.size, world.size, dtype=torch.int64)
    to_last = nobody.clone()
    to_last[:, -1] = 3
    from_first = nobody.clone()
    from_first[0] = torch.arange(world.size)
    uneven = torch.randint(0, 5, (world.size, world.size), generator=random)
    for counts in (uneven, to_last, from_first, nobody, nobody + 2):
        for trailing, dtype in (
            ((3,), torch.float32),
            ((3,), torch.bfloat16),
            ((), torch.int64),
            ((2, 2), torch.float64),
        ):
            parts = [
                [torch.full((int(n), *trailing), 100 * source + to, dtype=dtype) for to, n in enumerate(row)]
                for source, row in enumerate(counts)
            ]
            rows = torch.cat(parts[world.rank])
            sent, received = counts[world.rank].tolist(), counts[:, world.rank].tolist()
            exchanged = exchange_rows(rows, sent, received)
            assert exchanged.dtype == dtype
            assert exchanged.equal(torch.cat([parts[source][world.rank] for source in range(world.size)]))
            assert exchange_rows(exchanged, received, sent).equal(rows)
    # A view that is not contiguous, of rows that require a gradient.
    wide = torch.randn(world.size, 6, requires_grad=True)[:, ::2]
    exchanged = exchange_rows(wide, [1] * world.size, [1] * world.size)
    assert not exchanged.requires_grad
    assert exchange_rows(exchanged, [1] * world.size, [1] * world.size).equal(wide)


def check_sum(world: World) -> None:
    """Local losses of 1/W of a function of the sum give the gradient of the function."""
    parts = [block.requires_grad_() for block in blocks([1] * world.size, (3,))]
    torch.stack(parts).sum(dim=0).pow(3).sum().backward()
    local = parts[world.rank].detach().clone().requires_grad_()
    whole = sum_over_ranks(local)
    (whole.pow(3).sum() / world.size).backward()
    torch.testing.assert_close(whole, torch.stack(parts).sum(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(local.grad, parts[world.rank].grad, rtol=1e-12, atol=1e-12)


def check_average_gradients(world: World) -> None:
    """Parameters without gradient on this rank count as zero; frozen parameters have none."""
    a, b, c, frozen = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (), (3,), (1,)))
    frozen.requires_grad_(False)
    a.grad = torch.full((2, 2), float(world.rank))
    b.grad = torch.tensor(1.0)
    if world.rank == 0:
        c.grad = torch.tensor([1.0, 2.0, 4.0])
    average_gradients([a, b, c, frozen])
    assert a.grad.tolist() == [[(world.size - 1) / 2] * 2] * 2
    assert b.grad.shape == ()
    assert b.grad == 1.0
    torch.testing.assert_close(c.grad, torch.tensor([1.0, 2.0, 4.0]) / world.size)
    assert frozen.grad is None
    average_gradients([frozen])


def check_all(world: World) -> None:
    check_gather_rows(world)
    check_integers(world)
    check_ring(world)
    check_exchange(world)
    check_sum(world)
    check_average_gradients(world)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_equal_one_process(ranks, world_size):
    ranks(world_size, check_all)
