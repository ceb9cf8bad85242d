"""Activation checkpointing does not change gradients, for any model, mesh and number of passes."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from embedtrain.config.recipe import ModelConfig, Pooling, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.small import model_options, parallel, save_small, small_model

# The last one declares no layers, and its class does not support gradient checkpointing.
NAMES = ("bert", "modernbert", "llama", "qwen3", "gemma3_text", "mpnet")


def texts(rank: int) -> list[Chunk]:
    """Queries, documents and hard negatives of a rank, each padded to one length."""
    columns = []
    for column, length in enumerate((4, 7, 11)):
        generator = torch.Generator().manual_seed(10 * rank + column)
        ids = torch.randint(4, 30, (3, length), generator=generator)
        mask = (torch.arange(length) < torch.tensor([[length], [length - 1], [2]])).long()
        columns.append(Chunk(torch.where(mask.bool(), ids, 1), mask))
    return columns


def loss(encoder: nn.Module, rank: int, num_passes: int) -> Tensor:
    """Like a triplet loss: a forward pass per column, and one backward pass."""
    queries, *documents = (encoder(chunk)[0] for chunk in texts(rank)[:num_passes])
    return sum((1 + column) * (queries * vectors).sum() for column, vectors in enumerate(documents))


def plain(model: ModelConfig, num_passes: int, num_ranks: int) -> dict[str, Tensor]:
    """The gradient of the mean over the ranks' losses, in one process."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    for rank in range(num_ranks):
        (loss(encoder.train(), rank, num_passes) / num_ranks).backward()
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def relative_error(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together."""
    assert grads.keys() == expected.keys()
    squares = sum((grads[name] - expected[name]).double().square().sum() for name in expected)
    return float((squares / sum(g.double().square().sum() for g in expected.values())).sqrt())


def same_gradients(world: World, models: dict[str, ModelConfig]) -> None:
    for name, model in models.items():
        expected = {num_passes: plain(model, num_passes, world.size) for num_passes in (2, 3)}
        for strategy, recompute in itertools.product((Strategy.ddp, Strategy.fsdp), (False, True)):
            options = parallel(strategy, activation_checkpointing=recompute)
            encoder = load_model(model, options, world, seed=0).encoder.train()
            assert sum(isinstance(part, FSDPModule) for part in encoder.modules()) == 2 + 1, (name, "blocks + root")
            configs = [part.config for part in encoder.modules() if hasattr(part, "config")]
            assert configs
            assert not any(getattr(config, "use_cache", False) for config in configs), name
            runs: list[int] = []
            for number, block in enumerate(find_blocks(encoder)):
                inner = next(part for part in block.modules() if isinstance(part, nn.Linear))
                inner.register_forward_hook(lambda *_, number=number, runs=runs: runs.append(number))
            for num_passes in (2, 3):
                runs.clear()
                encoder.zero_grad()
                loss(encoder, world.rank, num_passes).backward()
                assert sorted(runs) == sorted([0, 1] * num_passes * (2 if recompute else 1)), (
                    name,
                    strategy,
                    recompute,
                )
                grads = {n: p.grad.full_tensor() for n, p in encoder.named_parameters() if isinstance(p.grad, DTensor)}
                error = relative_error(grads, expected[num_passes])
                assert error < 1e-6, (name, strategy, recompute, num_passes)
            with torch.no_grad():
                runs.clear()
                encoder(texts(0)[0])
            assert sorted(runs) == [0, 1]


@pytest.mark.slow
def test_gradients_equal_one_process(ranks, tmp_path):
    models = {
        name: model_options(path=str(save_small(small_model(name), tmp_path / name)), pooling=Pooling.mean)
        for name in NAMES
    }
    ranks(2, same_gradients, models)


def without_layers(world: World, model: ModelConfig) -> None:
    with pytest.raises(ModelError, match=r"BertModel .*activation_checkpointing=false"):
        load_model(model, parallel(Strategy.ddp, activation_checkpointing=True), world, seed=0)


def test_model_without_layers(ranks, tmp_path):
    model = small_model("bert")
    flat = save_small(small_model("bert", config=model.config | {"num_hidden_layers": 0}), tmp_path / "flat")
    ranks(1, without_layers, model_options(path=str(flat), pooling=Pooling.mean))
