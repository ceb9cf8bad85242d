"""Process groups of a run: bound to the rank's device, and each part of the ranks with the device's backend alone."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from embedtrain.config.recipe import Strategy
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import NCCL_ERROR_HANDLING, World, nccl_error, nccl_error_handling


def describe(world: World) -> dict[str, Any]:
    """The default group, and the two groups of this rank in a mesh of two replicas."""
    default, backend = dist.group.WORLD, "nccl" if world.device.type == "cuda" else "gloo"
    mesh = ParallelLayout(Strategy.hsdp, 2, world.size // 2, "").mesh(world.device)
    sums = []
    for name in ("replicate", "shard"):
        total = torch.tensor([world.rank], device=world.device)
        dist.all_reduce(total, group=mesh.get_group(name))
        sums.append(int(total))
    groups = [group for group in mesh.get_all_groups() if group is not default]
    return {
        "bound to": default.bound_device_id,
        "backends": {dist.get_backend_config(group) for group in groups},
        "only": f"{world.device.type}:{backend}",
        "sums": sums,
        "error": nccl_error(),
        "error handling": os.environ.get(NCCL_ERROR_HANDLING),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_groups_are_those_of_the_device(device_ranks, size):
    for rank, found in enumerate(device_ranks(size, describe)):
        shards = size // 2
        assert found["sums"] == [2 * (rank % shards) + shards, sum(range(size)[rank // shards * shards :][:shards])]
        assert found["error"] == ""
        if found["only"] == "cuda:nccl":
            assert found["bound to"] == torch.device("cuda", rank)
            assert found["backends"] == {"cuda:nccl"}
            assert found["error handling"] == nccl_error_handling({})
        else:
            assert found["bound to"] is None
