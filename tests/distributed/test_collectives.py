"""Gathering rows, forward and backward, against torch.cat in one process."""

import pytest
import torch

from embedtrain.distributed.collectives import (
    gather_rows,
    gather_vector,
    max_over_ranks,
    row_counts,
)
from embedtrain.distributed.world import World

COUNTS = [[3, 3, 3, 3], [1, 4, 0, 2], [0, 0, 0, 5], [2, 0, 0, 0], [0, 0, 0, 0]]


def blocks(counts: list[int], trailing: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, *trailing, generator=generator, dtype=torch.float64) for n in counts]


def weights(rows: int, rank: int, trailing: tuple[int, ...]) -> torch.Tensor:
    """What rank `rank` makes of the gathered rows: every rank something else."""
    return torch.randn(rows, *trailing, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)


def loss(everything: torch.Tensor, rank: int) -> torch.Tensor:
    return (everything.sin() * weights(everything.shape[0], rank, tuple(everything.shape[1:]))).sum()


def on_ranks(world: World) -> None:
    for all_counts in COUNTS:
        for trailing in ((), (2,), (2, 3)):
            counts = all_counts[-world.size :]
            whole = [block.requires_grad_() for block in blocks(counts, trailing)]
            reference = torch.cat(whole)
            torch.autograd.backward([sum(loss(reference, rank) for rank in range(world.size))])

            for given in (None, counts):
                mine = whole[world.rank].detach().clone().requires_grad_()
                assert row_counts(mine.shape[0], world.device) == counts
                gathered = gather_rows(mine, given)
                assert gathered.dtype == torch.float64
                torch.testing.assert_close(gathered, reference, rtol=0, atol=0)
                loss(gathered, world.rank).backward()
                torch.testing.assert_close(mine.grad, whole[world.rank].grad, rtol=1e-12, atol=1e-12)


def whole_numbers(world: World) -> None:
    mine = torch.arange(world.rank) + 2**62
    expected = torch.cat([torch.arange(rank) + 2**62 for rank in range(world.size)])
    assert gather_rows(mine).equal(expected)
    assert max_over_ranks([7 - world.rank, world.rank], world.device) == [7, world.size - 1]
    table = gather_vector([world.rank, float("nan"), 1e300], world.device)
    assert table[:, 0].tolist() == list(range(world.size))
    assert table[:, 1].isnan().all()
    assert table[:, 2].tolist() == [1e300] * world.size


def everything(world: World) -> None:
    on_ranks(world)
    whole_numbers(world)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_as_in_one_process(ranks, world_size):
    ranks(world_size, everything)
