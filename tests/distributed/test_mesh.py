"""Which shape of the mesh is chosen, and why."""

import pytest
import torch

from embedtrain.config.schema import ModelConfig, ParallelConfig, Pooling, Strategy
from embedtrain.distributed.mesh import choose_layout, memory_of_rank
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.training.model import load_model
from tests.small import parallel, save_small, small_model

GIB = 2**30


def world(size: int, local_size: int = 4) -> World:
    return World(0, size, 0, local_size, torch.device("cpu"))


def layout(strategy: str, size: int = 8, num_parameters: int = 1000, shard_size: int | None = None):
    options = ParallelConfig(strategy=Strategy(strategy), shard_size=shard_size)
    return choose_layout(options, world(size), num_parameters, memory=16 * GIB)


def test_shapes():
    assert [(found.replicate, found.shard) for found in map(layout, ("ddp", "fsdp", "hsdp"))] == [
        (8, 1),
        (1, 8),
        (2, 4),
    ]
    hsdp = layout("hsdp", shard_size=2)
    assert (hsdp.replicate, hsdp.shard) == (4, 2)


def test_auto_replicates_what_fits_and_says_why():
    small, large = layout("auto", num_parameters=GIB // 8), layout("auto", num_parameters=GIB // 2)
    assert (small.strategy, small.replicate, small.shard) == (Strategy.ddp, 8, 1)
    assert (large.strategy, large.replicate, large.shard) == (Strategy.fsdp, 1, 8)
    assert "2.0 GiB" in small.reason
    assert "8.0 GiB" in large.reason
    assert "16.0 GiB" in large.reason


def test_a_model_that_only_encodes_takes_less():
    options = ParallelConfig(strategy=Strategy.auto)
    found = choose_layout(options, world(8), GIB // 2, memory=16 * GIB, trains=False)
    assert found.strategy is Strategy.ddp
    assert "3.0 GiB of weights, 16.0 GiB of memory" in found.reason


@pytest.mark.parametrize("shard_size", [0, -1, 3, 16])
def test_a_shard_size_that_does_not_divide(shard_size):
    with pytest.raises(ConfigError, match=rf"parallel\.shard_size={shard_size} .* 1, 2, 4, 8"):
        layout("hsdp", shard_size=shard_size)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_a_shard_size_without_hsdp(strategy):
    with pytest.raises(ConfigError, match=r"only for parallel\.strategy=hsdp"):
        layout(strategy, shard_size=2)


def test_a_node_that_cannot_be_cut():
    """hsdp with 4 ranks a node but 6 ranks in all."""
    with pytest.raises(ConfigError, match="1, 2, 3, 6"):
        layout("hsdp", size=6)


def test_ranks_of_a_node_share_its_memory():
    assert memory_of_rank(world(8, 4)) == memory_of_rank(world(8, 1)) // 4


def shape_of_mesh(world: World) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    mesh = choose_layout(ParallelConfig(strategy=Strategy.hsdp, shard_size=2), world, 10, GIB).mesh(world.device)
    return tuple(mesh.shape), mesh.mesh_dim_names


def test_the_mesh_has_that_shape(ranks):
    assert ranks(4, shape_of_mesh) == [((2, 2), ("replicate", "shard"))] * 4


def load(world: World, path: str, strategies: list[Strategy]) -> list[float]:
    found = []
    for strategy in strategies:
        model = load_model(ModelConfig(path=path, pooling=Pooling.mean), parallel(strategy), world, seed=0)
        ids = torch.tensor([[0, 5, 2]])
        with torch.no_grad():
            found.append(model.encoder.eval()(ids, torch.ones_like(ids))[0, 0].item())
    return found


def test_the_mesh_of_a_process_group_that_has_ended_is_forgotten(ranks, tmp_path):
    """The jobs of a multirun make process groups in one process, and their meshes are equal but for the groups."""
    path = str(save_small(small_model("bert"), tmp_path))
    two, one = ranks(2, load, path, [Strategy.fsdp, Strategy.ddp]), ranks(2, load, path, [Strategy.ddp])
    assert two[0] == pytest.approx([one[0][0]] * 2, abs=1e-6)
