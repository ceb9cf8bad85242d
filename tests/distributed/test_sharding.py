"""Calls that bypass the gathering of a sharded encoder are rejected; master weights and buffers stay in fp32."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import ModelConfig, Pooling, Precision, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import ParallelLayout, reshard, row_range, shard_encoder, unsharded_weights
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError, ModelError, TrainingError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.optimizer import build_optimizer, clip_grad_norm
from tests.small import ARCHITECTURES, model_options, parallel, save_small, small_model

IDS = torch.tensor([[0, 5, 9, 2, 1, 1], [0, 7, 8, 6, 12, 2]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: model_options(path=str(save_small(small_model(name), root / name)), pooling=Pooling.mean)
        for name in ARCHITECTURES
    }


def in_one_process(model: ModelConfig) -> nn.Module:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    return encoder.eval()


def rejected_or_correct(world: World, models: dict[str, ModelConfig]) -> None:
    for name, model in models.items():
        reference = in_one_process(model)
        with torch.no_grad():
            expected = reference(Chunk(IDS, MASK))[0]
            hidden = reference.backbone.get_input_embeddings()(IDS)
        for strategy in (Strategy.fsdp, Strategy.ddp):
            encoder = load_model(model, parallel(strategy), world, seed=0).encoder.eval()
            blocks = find_blocks(encoder, type(find_blocks(reference)[0]).__name__.join(["FSDP", ""]))
            direct = {
                "forward": lambda encoder=encoder: encoder.forward(Chunk(IDS, MASK)),
                "backbone": lambda encoder=encoder: encoder.backbone(input_ids=IDS, attention_mask=MASK),
                "embeddings": lambda encoder=encoder: encoder.backbone.get_input_embeddings()(IDS),
                "part of a block": lambda blocks=blocks, hidden=hidden: next(
                    part for part in blocks[0].modules() if isinstance(part, nn.Linear)
                )(hidden),
            }
            for case, call in direct.items():
                with pytest.raises(TrainingError, match=r"encoder\(chunk\)") as caught, torch.no_grad():
                    call()
                assert "DTensor" not in str(caught.value), (name, case)
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(encoder(Chunk(IDS, MASK))[0], expected, rtol=0, atol=1e-5)
            with torch.inference_mode():
                torch.testing.assert_close(encoder(Chunk(IDS, MASK))[0], expected, rtol=0, atol=1e-5)
            reshard(encoder)
            assert all(isinstance(p, DTensor) for p in encoder.parameters())
            with pytest.raises(EmbedtrainError), torch.no_grad():
                encoder.forward(Chunk(IDS, MASK))
            # Training after evaluation has the gradient of the reference.
            encoder(Chunk(IDS, MASK))[0][0, 0].backward()
            reference.zero_grad()
            reference(Chunk(IDS, MASK))[0][0, 0].backward()
            for key, parameter in reference.named_parameters():
                if parameter.grad is not None:
                    grad = encoder.get_parameter(key).grad.full_tensor()
                    torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=f"{name} {key}")


def test_calls_that_bypass_the_gathering(ranks, models):
    ranks(2, rejected_or_correct, {name: models[name] for name in ("xlm-roberta", "llama", "modernbert")})


def single_block(world: World, model: ModelConfig) -> None:
    """A block gathers its own weights, so calling it works, even before the encoder is called."""
    reference = in_one_process(model)
    encoder = load_model(model, parallel(), world, seed=0).encoder.eval()
    hidden = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, expected = encoder.backbone.encoder.layer[0](hidden), reference.backbone.encoder.layer[0](hidden)
        output, expected = (x[0] if isinstance(x, tuple) else x for x in (output, expected))
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(encoder(Chunk(IDS, MASK))[0], reference(Chunk(IDS, MASK))[0], rtol=0, atol=1e-5)


def test_a_block_called_alone_first(ranks, models):
    ranks(2, single_block, models["bert"])


def in_bf16(world: World, models: dict[str, ModelConfig]) -> None:
    for name, model in models.items():
        reference = in_one_process(model)
        encoder = load_model(model, parallel(precision=Precision.bf16), world, seed=0).encoder.eval()
        inside: list[torch.dtype] = []
        block = find_blocks(encoder)[0]
        block.register_forward_pre_hook(lambda _, args, inside=inside: inside.append(args[0].dtype))
        with torch.no_grad():
            vectors = encoder(Chunk(IDS, MASK))[0]
            left_padded = encoder(Chunk(IDS.flip(1), MASK.flip(1)))[0]
            expected = reference(Chunk(IDS, MASK))[0]
        assert inside == [torch.bfloat16] * 2, name
        assert vectors.dtype == torch.float32
        assert left_padded.isfinite().all()  # a mask of fp32's smallest number would be -inf in bf16 and cause NaN
        assert torch.cosine_similarity(vectors, expected).min() > 0.99, name
        reshard(encoder)
        encoder(Chunk(IDS, MASK))[0].sum().backward()
        for parameter in encoder.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is None or parameter.grad.dtype == torch.float32
        for key, buffer in reference.named_buffers():
            torch.testing.assert_close(encoder.get_buffer(key), buffer, rtol=0, atol=0, msg=f"{name} {key}")


def test_master_weights_gradients_outputs_and_buffers_are_fp32(ranks, models):
    ranks(2, in_bf16, models)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.temperature = nn.Parameter(torch.tensor(1.0))


def freed(world: World, model: ModelConfig) -> None:
    encoder = load_model(model, parallel(), world, seed=0).encoder
    encoder(Chunk(IDS, MASK))[0][0, 0].backward()
    sharding.compile_blocks(encoder)
    alive = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert alive() is None


def test_an_encoder_is_freed_with_its_last_user(ranks, models):
    """Also if its blocks are to be compiled: another run of the same process has its memory and process groups."""
    ranks(2, freed, models["xlm-roberta"])


def shapes(world: World) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, world.size), mesh_dim_names=("replicate", "shard"))
    model = Scaled()
    with pytest.raises(ModelError, match=r"temperature.* \(1,\)"):
        shard_encoder(
            model, list(model.layers), ParallelLayout(Strategy.fsdp, 1, world.size, ""), parallel(), world.device
        )
    assert not isinstance(model.layers[0].weight, DTensor)  # and nothing changed
    # A rank holds the rows that torch.chunk assigns to it, empty shards included.
    for rows in (1, 2, 5, 7, 8):
        full = torch.arange(3.0 * rows).view(rows, 3)
        tensor = distribute_tensor(full, mesh["shard"], [Shard(0)])
        start, end = row_range(tensor)
        assert tensor.to_local().equal(full[start:end])
        assert sum(b - a for a, b in world.gather((start, end))) == rows
    assert row_range(torch.zeros(4, 2)) == (0, 4)
    assert row_range(torch.tensor(1)) == (0, 1)


def test_sharded_shapes(ranks):
    ranks(3, shapes)


def memory_options(world: World, model: ModelConfig) -> None:
    """Vectors and gradients with resharding, recomputation and CPU offload; the large embedding is its own group."""
    reference = in_one_process(model)
    expected = reference(Chunk(IDS, MASK))[0]
    expected.pow(3).sum().backward()
    limit, sharding.LARGE_EMBEDDING = sharding.LARGE_EMBEDDING, 64 * 32
    try:
        cases = [
            {"reshard_after_forward": True},
            {"reshard_after_forward": False},
            {"activation_checkpointing": True, "reshard_after_forward": True},
            {"cpu_offload": True, "reshard_after_forward": True},
            {"cpu_offload": True, "reshard_after_forward": False, "activation_checkpointing": True},
        ]
        for options in cases:
            encoder = load_model(model, parallel(**options), world, seed=0).encoder.eval()
            embedding = encoder.backbone.get_input_embeddings()
            assert isinstance(embedding, FSDPModule), "a group of its own"
            assert sum(isinstance(part, FSDPModule) for part in encoder.modules()) == 2 + 1 + 1
            for _ in range(2):  # the second time after a backward pass, which gathers again
                encoder.zero_grad()
                vectors = encoder(Chunk(IDS, MASK))[0]
                torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)
                weight = embedding.weight
                assert isinstance(weight, DTensor) == (options.get("reshard_after_forward") is not False), options
                vectors.pow(3).sum().backward()
            for (name, parameter), (_, reference_parameter) in zip(
                encoder.named_parameters(), reference.named_parameters(), strict=True
            ):
                if reference_parameter.grad is not None:
                    assert isinstance(parameter, DTensor)
                    torch.testing.assert_close(
                        parameter.grad.full_tensor(),
                        reference_parameter.grad,
                        rtol=1e-4,
                        atol=1e-6,
                        msg=f"{options} {name}",
                    )
            before = [p.full_tensor().clone() for p in encoder.parameters()]
            optimizer = build_optimizer(encoder, OptimConfig(lr=1e-3))
            assert clip_grad_norm(encoder.parameters(), 1.0) > 0
            optimizer.step()
            assert all(not p.full_tensor().equal(old) for p, old in zip(encoder.parameters(), before, strict=True))
            with unsharded_weights(encoder, lambda encoder=encoder: encoder(Chunk(IDS, MASK))), torch.no_grad():
                unsharded = encoder(Chunk(IDS, MASK))[0]
            with torch.no_grad():
                assert encoder(Chunk(IDS, MASK))[0].equal(unsharded)
    finally:
        sharding.LARGE_EMBEDDING = limit


@pytest.mark.quick("xlm-roberta")
@pytest.mark.parametrize("name", ["xlm-roberta", "llama"])
def test_memory_options_change_nothing(ranks, tmp_path, name):
    small = small_model(name)
    path = save_small(small, tmp_path / name)
    ranks(2, memory_options, replace(small, config=None, path=str(path)))


def two_dtypes(world: World) -> None:
    """Trained weights of one block with two dtypes are rejected by name; frozen ones may have another dtype."""
    for frozen in (False, True):
        model = Scaled()
        del model.temperature
        model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())])
        model.layers[0][1].requires_grad_(not frozen)
        layout = ParallelLayout(Strategy.fsdp, 1, world.size, "")
        if frozen:
            shard_encoder(model, list(model.layers), layout, parallel(), world.device)
        else:
            with pytest.raises(
                ModelError, match=r"layers.0.0.weight \(torch.float32\) and layers.0.1.weight \(torch.bf"
            ):
                shard_encoder(model, list(model.layers), layout, parallel(), world.device)


def test_block_with_two_dtypes(ranks):
    ranks(2, two_dtypes)
