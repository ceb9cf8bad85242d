"""Compiled blocks: whole graphs, as many as there are kinds of layers and passes, and what happens where it fails."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from embedtrain.config.recipe import Attention, LoraConfig, ModelConfig, ParallelConfig
from embedtrain.data.types import Chunk
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import EagerBlocks, compile_blocks, compiles_blocks, num_compilations, reshard
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel, load_model
from tests.marks import slow_but
from tests.small import parallel, small_model, small_tokenizer, text

# Layers of each kind, so that a graph for each layer would show.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "bert": (1, {}),
    "xlm-roberta": (1, {}),
    # The first layer has no norm, and every second one sees a window alone.
    "modernbert": (3, {"num_hidden_layers": 5, "global_attn_every_n_layers": 2}),
    "qwen3": (1, {}),
    "gemma3_text": (
        2,
        {"num_hidden_layers": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}


def open_compiled(world: World, model: ModelConfig, options: ParallelConfig, backend: Any) -> LoadedModel:
    """The model with blocks that `backend` compiles; the first tensors of its compilations are those of this call."""
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        return load_model(model, options, world, seed=0, tokenizer=small_tokenizer())


def model_of(architecture: str, **changes: Any) -> ModelConfig:
    model = small_model(architecture, **changes)
    return replace(model, config=model.config | {"num_hidden_layers": 3} | KINDS[architecture][1])


def chunks_of_step(loaded: LoadedModel, step: int) -> list[Chunk]:
    """Chunks of every form, of other sizes in each step: packed, or padded with and without padding and of one text."""
    tokenizer = loaded.tokenizer
    ids = tokenizer.tokens([text(10 * step + n, 3 + (n + step) % 7 + 2 * step) for n in range(6 + step)])
    same = tokenizer.tokens([text(20 * step + n, 6 + step) for n in range(3 + step)])
    some = [tokenizer.chunk(ids, range(len(ids))), tokenizer.chunk(ids, [0, 2, 3, 4])]
    return some if tokenizer.packed else [*some, tokenizer.chunk(same, range(len(same))), tokenizer.chunk(ids, [1])]


def take_step(loaded: LoadedModel, step: int) -> dict[str, Tensor]:
    """Every chunk without and with gradients and in evaluation; the gradients of the step."""
    encoder = loaded.encoder
    encoder.zero_grad()
    for chunk in chunks_of_step(loaded, step):
        encoder.train()
        with torch.no_grad():
            expected = encoder(chunk)[0]
        vectors = encoder(chunk)[0]
        torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=1e-5)
        (vectors * torch.linspace(-1, 1, vectors.shape[1])).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(encoder.eval()(chunk)[0], expected, atol=1e-6, rtol=1e-5)
    reshard(encoder)
    grads = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to the rounding of fp32; gradients that vanish are measured against all."""
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / max(grad.norm(), 1e-3 * whole)
        assert error < 1e-5, (name, float(error))


def graphs(world: World, model: ModelConfig, changes: dict[str, Any], backend: str, steps: int) -> list[int]:
    """The number of graphs after loading and after each step, whose gradients are those of the eager blocks."""
    counter = CompileCounterWithBackend(backend)
    loaded = open_compiled(world, model, parallel(compile=True, **changes), counter)
    counts = [counter.frame_count]
    eager = load_model(model, parallel(compile=False, **changes), world, seed=0, tokenizer=small_tokenizer())
    for step in range(steps):
        assert_close(take_step(loaded, step), take_step(eager, step))
        counts.append(counter.frame_count)
    assert not EagerBlocks([loaded.encoder]).notice
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize("architecture", slow_but(["bert", "qwen3", "modernbert"], KINDS))
def test_packed_blocks_have_three_graphs_for_each_kind_of_layer(ranks, architecture):
    """Without and with gradients, and in evaluation; none while the model is verified, and none after the first step."""
    (counts,) = ranks(1, graphs, model_of(architecture), {}, "eager", 3)
    assert counts == [0, *[3 * KINDS[architecture][0]] * 3]


# Packed and padded texts, recomputation, adapters and two ranks, each of them once for every architecture.
WAYS = {
    "padded": {"attention": Attention.padded},
    "recomputed": {},
    "recomputed and padded": {"attention": Attention.padded},
    "adapters": {"lora": LoraConfig(rank=4)},
    "two ranks": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", KINDS)
def test_no_block_falls_back_and_no_graph_is_compiled_after_the_second_step(ranks, architecture, way):
    model, changes = replace(model_of(architecture), **WAYS[way]), {"activation_checkpointing": "recomputed" in way}
    for counts in ranks(2 if way == "two ranks" else 1, graphs, model, changes, "eager", 4, timeout=400):
        assert counts[0] == 0 < counts[1] and len(set(counts[2:])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recomputed", "recomputed and padded", "adapters"])
def test_backward_passes_are_graphs_as_well(ranks, way):
    model, changes = replace(model_of("qwen3"), **WAYS[way]), {"activation_checkpointing": "recomputed" in way}
    (counts,) = ranks(1, graphs, model, changes, "aot_eager", 3, timeout=400)
    assert counts[0] == 0 < counts[1] and len(set(counts[2:])) == 1
