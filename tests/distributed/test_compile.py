"""Compiled blocks: whole graphs, as many as there are kinds of layers and passes, and what happens where it fails."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import SELECTIVE, Attention, LoraConfig, ModelConfig, ParallelConfig
from embedtrain.data.types import Chunk
from embedtrain.distributed import block_compute
from embedtrain.distributed.block_compute import EagerBlocks, compiles_blocks, num_graphs
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.marks import slow_but
from tests.runs import losses, options, rewind_run, run
from tests.small import batch, parallel, small_model, small_tokenizer, text

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


@pytest.mark.parametrize("architecture", slow_but(["bert"], KINDS))
def test_packed_blocks_have_three_graphs_for_each_kind_of_layer(ranks, architecture):
    """Without and with gradients, and in evaluation; none in the verification, and none after the first step."""
    (counts,) = ranks(1, graphs, model_of(architecture), {}, "eager", 3)
    assert counts == [0, *[3 * KINDS[architecture][0]] * 3]


# Packed and padded texts, recomputation, adapters and two ranks, each of them once for every architecture.
WAYS = {
    "padded": {"attention": Attention.padded},
    "recomputed": {},
    "recomputed between products": {},
    "recomputed and padded": {"attention": Attention.padded},
    "adapters": {"lora": LoraConfig(rank=4)},
    "two ranks": {},
}


def recomputation(way: str) -> dict[str, Any]:
    return {"activation_checkpointing": SELECTIVE if "between" in way else "recomputed" in way}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", KINDS)
def test_no_block_falls_back_and_no_graph_is_compiled_after_the_second_step(ranks, architecture, way):
    model, changes = replace(model_of(architecture), **WAYS[way]), recomputation(way)
    for counts in ranks(2 if way == "two ranks" else 1, graphs, model, changes, "eager", 4, timeout=400):
        assert counts[0] == 0 < counts[1] and len(set(counts[2:])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recomputed", "recomputed between products", "recomputed and padded", "adapters"])
def test_backward_passes_are_graphs_as_well(ranks, way):
    model, changes = replace(model_of("qwen3"), **WAYS[way]), recomputation(way)
    (counts,) = ranks(1, graphs, model, changes, "aot_eager", 3, timeout=400)
    assert counts[0] == 0 < counts[1] and len(set(counts[2:])) == 1


def broken(*_: Any) -> Any:
    raise RuntimeError("no compiler")


def unchanged(graph: Any, *_: Any) -> Callable[..., Any]:
    return aot_autograd(fw_compiler=lambda module, inputs: module.forward, bw_compiler=broken)(graph, *_)


CAUSES = {"break": "eager", "compiler": broken, "backward": unchanged, "limit": "eager"}


def fails(world: World, cause: str, rank: int) -> list[str]:
    """The sentences about blocks that fail on one rank, whose outputs and gradients are those of the eager blocks."""
    model, is_broken = model_of("bert"), world.rank == rank
    activation = nn.functional.gelu

    def interrupted(values: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return activation(values)

    backend = CAUSES[cause] if is_broken else "eager"
    loaded = open_compiled(world, model, parallel(compile=True), backend)
    eager = load_model(model, parallel(compile=False), world, seed=0, tokenizer=small_tokenizer())
    of_run = EagerBlocks([eager.encoder, loaded.encoder])
    assert not of_run.notice
    if cause == "break" and is_broken:
        for part in loaded.encoder.modules():
            if type(part).__name__ == "GELUActivation":
                part.act = interrupted
    with torch._dynamo.config.patch(recompile_limit=1 if cause == "limit" and is_broken else 64):
        assert_close(take_step(loaded, 0), take_step(eager, 0))
    assert bool(of_run.notice & Notice.not_compiled) is is_broken
    sentences = of_run.name(world)
    assert not of_run.notice and not of_run.name(world)
    counted = num_graphs()
    assert_close(take_step(loaded, 1), take_step(eager, 1))
    assert num_graphs() == counted, "all ranks run the block eagerly"
    torch._dynamo.reset()
    return sentences


@pytest.mark.quick("break-graph_break")
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("break", "graph_break"),
        pytest.param("compiler", "no compiler", marks=pytest.mark.slow),
        pytest.param("backward", "no compiler", marks=pytest.mark.slow),
        ("limit", "fullgraph"),
    ],
)
def test_a_block_that_fails_runs_eagerly_on_all_ranks_and_is_named_once(ranks, cause, reason):
    first, second = ranks(2, fails, cause, 1)
    (sentence,) = first
    assert first == second and "BertLayer" in sentence and reason in sentence


def run_compiled(world: World, backend: Any, *arguments: str) -> tuple[str, int]:
    """What a run with compiled blocks prints, and how many graphs it has compiled."""
    torch._dynamo.reset()
    before = num_graphs()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        output = run(world, *arguments, "parallel.compile=true")
    count = num_graphs() - before
    torch._dynamo.reset()  # of counters as well
    return output, count


def test_new_and_resumed_runs_are_compiled(ranks, run_inputs, tmp_path: Path):
    plain, whole, rest = (tmp_path / name for name in ("plain", "whole", "rest"))
    arguments = ("train.steps=4", "checkpoint.every=2", "checkpoint.keep=2")
    ranks(1, run, *options(run_inputs, plain, *arguments))
    ((output, count),) = ranks(1, run_compiled, "eager", *options(run_inputs, whole, *arguments))
    assert count > 0 and "compiled in the first steps" in output and "cannot be compiled" not in output
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    rewind_run(whole, rest, 2)
    ((_, count),) = ranks(1, run_compiled, "eager", *options(run_inputs, rest, *arguments))
    assert count > 0
    assert losses(rest) == losses(whole)


@pytest.mark.slow  # the same without a run: test_a_block_that_fails_runs_eagerly_on_all_ranks_and_is_named_once
def test_a_run_names_the_block_once(ranks, run_inputs, tmp_path: Path):
    output, _ = ranks(2, run_compiled, broken, *options(run_inputs, tmp_path / "run", "train.steps=3"))
    lines = [line for line in output[0].splitlines() if "cannot be compiled" in line]
    assert len(lines) == 1 and "XLMRobertaLayer" in output[0]


@pytest.mark.parametrize(
    ("device", "triton", "changes", "compiled"),
    [
        ("cpu", True, {}, False),
        ("cuda", True, {}, True),
        ("cuda", False, {}, False),
        ("cuda", True, {"deterministic": True}, False),
        ("cuda", True, {"compile": False}, False),
        ("cuda", True, {"compile": True, "deterministic": True}, True),
        ("cpu", False, {"compile": True}, True),
    ],
)
def test_auto_compiles_on_gpus(monkeypatch, device, triton, changes, compiled):
    monkeypatch.setattr(block_compute.importlib.util, "find_spec", lambda name: object() if triton else None)
    assert compiles_blocks(ParallelConfig(**changes), torch.device(device)) is compiled


def gradients_of_batch(
    world: World, model: ModelConfig, changes: dict[str, Any], backend: str | None, kept_tokens: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a batch in training mode, with graphs kept for so many tokens."""
    options = parallel(compile=backend is not None, **changes)
    loaded = open_compiled(world, model, options, backend)
    loss = InfoNCE(InfoNCEConfig(temperature=0.2))
    backward = Backward(loaded.encoder.train(), loss, world, seed=0, dummy=loaded.tokenizer.dummy())
    cutting = ChunkOptions(60, kept_tokens, pass_overhead_tokens=4)
    output, _ = backward(make_rank_batch(batch(10), world.rank, world.size, loaded.tokenizer, cutting))
    assert not backward.eager_blocks.notice
    torch._dynamo.reset()
    grads = {name: p.grad.full_tensor() for name, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)}
    return output.local_loss.item(), grads


# Inductor compiles C++ on a CPU, which takes about a minute.
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("attention", [Attention.auto, Attention.padded])
@pytest.mark.parametrize("recomputed", [False, SELECTIVE, True])
def test_losses_and_gradients_are_those_of_eager_blocks(ranks, architecture, attention, recomputed):
    """Through Inductor, with chunks that are kept and encoded twice."""
    model, changes = model_of(architecture, attention=attention), {"activation_checkpointing": recomputed}
    ((loss, grads),) = ranks(1, gradients_of_batch, model, changes, "inductor", 120, timeout=900)
    ((expected, plain),) = ranks(1, gradients_of_batch, model, changes, None, 120)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_close(grads, plain)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [Attention.auto, Attention.padded])
@pytest.mark.parametrize("recomputed", [False, SELECTIVE, True])
def test_dropout_of_graphs_is_replayed(ranks, attention, recomputed):
    """Passes without gradients are other graphs than those with gradients, but have the same masks."""
    model, changes = model_of("bert", attention=attention, dropout=0.2), {"activation_checkpointing": recomputed}
    answers = [ranks(1, gradients_of_batch, model, changes, "inductor", kept, timeout=900)[0] for kept in (10_000, 0)]
    (loss, grads), (same_loss, again) = answers
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert_close(again, grads)
