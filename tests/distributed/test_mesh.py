"""The device mesh of a layout, and the memory of its ranks."""

import inspect
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from embedtrain.config.recipe import Pooling, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World, device_group
from embedtrain.inference.loading.load import load_model
from tests.small import model_options, parallel, save_small, small_model


def describe_mesh(world: World) -> tuple[Any, ...]:
    """Its shape, the ranks and the time-out of this rank's groups, and sums of the ranks over each."""
    mesh = ParallelLayout(Strategy.hsdp, 2, 2, "").mesh(world.device)
    sums = []
    for name in ("replicate", "shard"):
        total = torch.tensor([world.rank])
        dist.all_reduce(total, group=mesh.get_group(name))
        sums.append(int(total))
    groups = mesh.get_all_groups()
    seconds = {group._get_backend(world.device).options._timeout.total_seconds() for group in groups}
    ranks_of_groups = [dist.get_process_group_ranks(group) for group in groups]
    return tuple(mesh.shape), mesh.mesh_dim_names, ranks_of_groups, seconds, sums


def test_the_mesh_has_the_shape_of_the_layout(ranks):
    """Its groups wait as long as the default group, here a minute, and not as long as torch's default."""
    shape = (2, 2), ("replicate", "shard")
    assert ranks(4, describe_mesh) == [
        (*shape, [[0, 2], [0, 1]], {60.0}, [2, 1]),
        (*shape, [[1, 3], [0, 1]], {60.0}, [4, 1]),
        (*shape, [[0, 2], [2, 3]], {60.0}, [2, 5]),
        (*shape, [[1, 3], [2, 3]], {60.0}, [4, 5]),
    ]


def splits_of_a_bound_group(world: World) -> list[dict[str, Any]]:
    """What torch is asked for where the default group has NCCL and is bound to a GPU; torch's call is stubbed.

    Of offloaded shards the time-out of collectives in host memory, one of which runs.
    """
    asked, default = [], dist.group.WORLD
    parameters = inspect.signature(dist.split_group)

    def split_group(**options: Any) -> Any:
        asked.append(dict(parameters.bind(**options).arguments))
        # As torch does without `backend`.
        backends = "cuda:fake" if "backend" in options else "cpu:gloo,cuda:fake"
        default.bound_device_id = None
        parts, timeout = options["split_ranks"], options["timeout"]
        group, _ = dist.new_subgroups_by_enumeration(parts, backend=backends, timeout=timeout)
        default.bound_device_id = device
        return group

    device = torch.device("cuda", 0)
    stubs = {"split_group": split_group, "get_backend_config": lambda: "cpu:gloo,cuda:nccl"}
    with mock.patch.multiple(dist, **stubs):
        default.bound_device_id = device
        try:
            device_group(device, [[0, 1], [2]], "replicas")
            assert device_group(device, [[0, 1, 2]], "all") is default
            shards = device_group(device, [[0, 1], [2]], "shards", in_host_memory=True)
        finally:
            default.bound_device_id = None
    if world.rank < 2:
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total, group=shards)
        assert total.item() == 3
    asked[-1]["waits"] = shards._get_backend(torch.device("cpu")).options._timeout
    return asked


def test_a_group_of_gpus_connects_gloo_apart_from_nccl_if_shards_are_offloaded(ranks):
    minute = timedelta(seconds=60)
    alone = {"backend": "nccl"} if "backend" in inspect.signature(dist.split_group).parameters else {}
    expected = {"timeout": minute, **alone}
    for replicas, shards in ranks(3, splits_of_a_bound_group):
        assert replicas == expected | {"split_ranks": [[0, 1], [2]], "group_desc": "replicas"}
        assert shards == expected | {"split_ranks": [[0, 1], [2]], "group_desc": "shards", "waits": minute}


def load(world: World, path: str, strategies: list[Strategy]) -> list[float]:
    outputs = []
    for strategy in strategies:
        model = load_model(model_options(path=path, pooling=Pooling.mean), parallel(strategy), world, seed=0)
        ids = torch.tensor([[0, 5, 2]])
        with torch.no_grad():
            outputs.append(model.encoder.eval()(Chunk(ids, torch.ones_like(ids)))[0][0, 0].item())
    return outputs


def test_the_mesh_of_a_destroyed_process_group_is_not_reused(ranks, tmp_path):
    """The jobs of a multirun create process groups in one process; their meshes compare equal."""
    path = str(save_small(small_model("bert"), tmp_path))
    two, one = ranks(2, load, path, [Strategy.fsdp, Strategy.ddp]), ranks(2, load, path, [Strategy.ddp])
    assert two[0] == pytest.approx([one[0][0]] * 2, abs=1e-6)
