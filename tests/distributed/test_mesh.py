"""The device mesh of a layout, and the memory of its ranks."""

import pytest
import torch

from embedtrain.config.recipe import Pooling, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from tests.small import model_options, parallel, save_small, small_model


def shape_of_mesh(world: World) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    mesh = ParallelLayout(Strategy.hsdp, 2, 2, "").mesh(world.device)
    return tuple(mesh.shape), mesh.mesh_dim_names


def test_the_mesh_has_the_shape_of_the_layout(ranks):
    assert ranks(4, shape_of_mesh) == [((2, 2), ("replicate", "shard"))] * 4


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
