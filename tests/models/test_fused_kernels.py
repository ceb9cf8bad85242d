"""Fused kernels: the numbers of the modules that they replace in every way of a pass, where they apply, and messages.

Kernels in torch overwrite what those of liger-kernel overwrite, and show the calling code on any machine. Those of
liger-kernel themselves run where it is installed with Triton, in Triton's interpreter.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import SELECTIVE, Attention, LoraConfig, ModelConfig
from embedtrain.distributed.block_compute import EagerBlocks
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading import load
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models import fused_kernels
from embedtrain.models.blocks import find_blocks
from embedtrain.models.fused_kernels import Kernels, fused_classes, kernel_error
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.conftest import ROOT
from tests.distributed.test_compile import assert_close, broken, open_compiled, take_step
from tests.runs import losses, options, run
from tests.small import batch, parallel, save_small, small_model, small_tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
CPU = torch.device("cpu")
has_liger = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))


def normed(hidden: Tensor, weight: Tensor, eps: float, added: float, casting: str) -> Tensor:
    rows = hidden.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (rows * (added + weight.float())).to(hidden.dtype)
    return (added + weight) * rows.to(hidden.dtype)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """As a kernel does it, which autograd does not notice."""
    tensor.data.copy_(values)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *choices: Any) -> Tensor:
        assert hidden.is_contiguous(), "the kernel would copy it"
        rows = torch.empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        ctx.choices = choices
        return normed(hidden, weight, *choices[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:2]]
        with torch.enable_grad():
            found = torch.autograd.grad(normed(*given, *ctx.choices[:-1]), given, grads[0])
        if ctx.choices[-1]:
            overwrite(grads[0], found[0])
            return (grads[0], found[1], *[None] * 4)
        return (*found, *[None] * 4)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.function = function
        return function(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: recomputation gives them away
        given = [tensor.detach().clone().requires_grad_() for tensor in saved]
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.function(given[0]) * given[1], given, grads[0])
        for tensor, grad in zip(saved, found, strict=True):
            overwrite(tensor, grad)
        return None, *saved


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == cos.shape[0] == 1, "the kernel is compiled for a number of texts"
        ctx.save_for_backward(cos, sin)
        return Rotate.overwritten(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return (*Rotate.overwritten(*grads, cos, -sin), None, None)

    @staticmethod
    def overwritten(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rows = [heads.transpose(1, 2).contiguous() for heads in (q, k)]
        for heads in rows:
            overwrite(heads, turned(heads.transpose(1, 2), cos, sin).transpose(1, 2))
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)


def torch_kernels() -> Kernels:
    def gelu(gate: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate, approximate="tanh")

    return Kernels(
        norm=Norm.apply,
        silu=lambda gate, up: Gate.apply(torch.nn.functional.silu, gate, up),
        gelu=lambda gate, up: Gate.apply(gelu, gate, up),
        rotate=Rotate.apply,
    )


@contextlib.contextmanager
def installed(kernels: Callable[[], Kernels] = torch_kernels) -> Iterator[None]:
    """As if these kernels were those of the library, and ran on any device."""
    with mock.patch.object(load, "liger_kernels", kernels), mock.patch.object(load, "kernel_error", lambda *_: None):
        yield


def gradients(
    world: World, model: ModelConfig, changes: dict[str, Any], *, fused: bool
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a batch, one half of whose chunks are encoded twice."""
    option = parallel(fused_kernels=fused, **changes)
    loaded = load.load_model(model, option, world, seed=0, tokenizer=small_tokenizer())
    found = [note for note in loaded.notes if "fused kernels" in note]
    assert len(found) == fused, found
    loss = InfoNCE(InfoNCEConfig(temperature=0.2))
    backward = Backward(loaded.encoder.train(), loss, world, seed=0, dummy=loaded.tokenizer.dummy())
    cutting = ChunkOptions(60, 60, pass_overhead_tokens=4)
    output, _ = backward(make_rank_batch(batch(6), world.rank, world.size, loaded.tokenizer, cutting))
    named = loaded.encoder.named_parameters()
    return output.local_loss.item(), {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in named if p.grad is not None
    }


def compared(world: World, model: ModelConfig, changes: dict[str, Any]) -> None:
    """With the kernels, losses and gradients are those of the modules, which other models of the process keep."""
    expected_loss, expected = gradients(world, model, changes, fused=False)
    loss, grads = gradients(world, model, changes, fused=True)
    again_loss, again = gradients(world, model, changes, fused=False)
    assert again_loss == expected_loss and all(torch.equal(again[name], expected[name]) for name in expected)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert grads.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        error = (grads[name] - grad).norm() / max(grad.norm(), 1e-3 * whole)
        assert error < 2e-5, (name, float(error))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({}, {}),
    "padded": ({"attention": Attention.padded}, {}),
    "recomputed": ({}, {"activation_checkpointing": True}),
    "recomputed between products": ({}, {"activation_checkpointing": SELECTIVE}),
    "padded, recomputed between products": (
        {"attention": Attention.padded},
        {"activation_checkpointing": SELECTIVE},
    ),
    "adapters": ({"lora": LoraConfig(rank=4)}, {"activation_checkpointing": SELECTIVE}),
}


def compared_in_torch(world: World, model: ModelConfig, changes: dict[str, Any]) -> None:
    with installed():
        compared(world, model, changes)


@pytest.mark.quick("padded, recomputed between products-llama", "packed-gemma3_text", "packed-qwen3")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["packed", "padded, recomputed between products"])
def test_gradients_are_those_of_the_modules(ranks, family, way):
    model, changes = WAYS[way]
    ranks(1, compared_in_torch, replace(small_model(family), **model), changes)


@pytest.mark.quick("adapters-qwen3", "recomputed between products-llama", "padded-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ["padded", "recomputed", "recomputed between products", "adapters"])
def test_gradients_in_every_way_of_a_pass(ranks, family, way):
    model, changes = WAYS[way]
    ranks(2, compared_in_torch, replace(small_model(family), **model), changes)


@pytest.mark.parametrize("scaling", ["yarn", "linear", "llama3"])
def test_scaled_rotary_positions(ranks, scaling):
    """The kernel takes the sines and cosines of the model, whatever they are."""
    rope = {"rope_type": scaling, "factor": 4.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    ranks(1, compared_in_torch, replace(small_model("llama"), rope_scaling=rope), {})


def notes_of(world: World, model: ModelConfig, fused_kernels: bool | str, kernels: bool) -> tuple[list[str], list[str]]:
    """Lines about fused kernels, and the classes whose modules have them."""
    option = parallel(fused_kernels=fused_kernels)
    with installed() if kernels else contextlib.nullcontext():
        loaded = load.load_model(model, option, world, seed=0, tokenizer=small_tokenizer())
    return [note for note in loaded.notes if "fused kernels" in note], replaced(loaded.encoder)


def replaced(encoder: nn.Module) -> list[str]:
    """The classes of modules, blocks excepted, whose forward method is not that of their class."""
    names = (type(part).__name__ for part in encoder.modules() if "forward" in vars(part))
    return [name for name in dict.fromkeys(names) if not name.startswith("FSDP")]


def test_on_a_cpu_auto_leaves_models_as_they_are(ranks):
    ((notes, classes),) = ranks(1, notes_of, small_model("qwen3"), "auto", True)
    assert notes == classes == []


def test_what_is_fused_is_named(ranks):
    ((notes, classes),) = ranks(1, notes_of, small_model("qwen3"), True, True)
    assert sorted(classes) == ["Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"]
    assert len(notes) == 1 and all(name in notes[0] for name in classes)


def test_what_has_no_kernel_is_named(ranks):
    model = small_model("qwen3")
    model = replace(model, config=model.config | {"hidden_act": "gelu"})
    ((notes, classes),) = ranks(1, notes_of, model, True, True)
    assert sorted(classes) == ["Qwen3Attention", "Qwen3RMSNorm"]
    assert len(notes) == 1 and "Qwen3MLP has no kernel for GELUActivation" in notes[0]
    ranks(1, compared_in_torch, model, {})


def test_a_model_without_such_modules_is_named_if_kernels_are_asked_for(ranks):
    ((notes, classes),) = ranks(1, notes_of, small_model("xlm-roberta"), True, True)
    assert classes == [] and len(notes) == 1 and "XLMRobertaLayer" in notes[0]


def refused(world: World, reason: str | None) -> str:
    """The error on each rank if one rank cannot use the kernels, or none can on this device."""
    error = (lambda *_: reason if world.rank else None) if reason else kernel_error
    with mock.patch.object(load, "kernel_error", error), pytest.raises(ConfigError) as caught:
        notes_of(world, small_model("llama"), True, False)
    return str(caught.value)


def test_kernels_that_fail_on_one_rank_end_all_ranks(ranks):
    first, second = ranks(2, refused, "no compiler")
    assert first == second and "parallel.fused_kernels=true" in first and "no compiler" in first


def small_blocks(family: str, **changes: Any) -> list[nn.Module]:
    config = AutoConfig.for_model(**small_model(family).config | changes)
    with torch.device("meta"):
        return find_blocks(AutoModel.from_config(config))


@pytest.fixture
def library(monkeypatch) -> Callable[[Kernels], None]:
    """As if liger-kernel were installed with these kernels, and needed no GPU."""

    def install(kernels: Kernels) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(fused_kernels.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(fused_kernels, "liger_kernels", lambda: kernels)

    return install


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_with_the_numbers_of_the_modules_are_used(library, family, dtype):
    library(torch_kernels())
    state = torch.get_rng_state()
    assert kernel_error(small_blocks(family), dtype, CPU) is None
    assert torch.equal(torch.get_rng_state(), state)
    fused, left = fused_classes(small_blocks(family))
    assert len(fused) == 3 and left == []


def fails(*_: Any) -> Any:
    raise RuntimeError("no compiler")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "weight of another offset": ({"norm": lambda x, w, eps, add, *_: normed(x, w, eps, 1 - add, "llama")}, "RMSNorm"),
    "another activation": ({"silu": lambda gate, up: torch.sigmoid(gate) * up}, "MLP"),
    "the other direction": ({"rotate": lambda q, k, cos, sin: Rotate.apply(q, k, cos, -sin)}, "Attention"),
    "gradients": ({"silu": lambda gate, up: torch.nn.functional.silu(gate) * up.detach() + 0 * up}, "MLP"),
    "an error": ({"rotate": fails}, "no compiler"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_with_other_numbers_are_not_used(library, wrong):
    kernels, named = WRONG[wrong]
    library(torch_kernels()._replace(**kernels))
    assert named in str(kernel_error(small_blocks("qwen3"), torch.float32, CPU))


def test_why_kernels_cannot_be_used(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused_kernels.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in str(kernel_error(small_blocks("llama"), torch.float32, CPU))
    monkeypatch.setattr(fused_kernels.importlib.util, "find_spec", lambda name: object())
    assert "CUDA" in str(kernel_error(small_blocks("llama"), torch.float32, CPU))


def test_on_a_gpu_auto_says_why_there_are_none(cuda_ranks):
    """The pretended device has no Triton, whether or not liger-kernel is installed."""
    for option, count in (("auto", 1), (False, 0)):
        ((notes, classes),) = cuda_ranks(1, notes_of, small_model("llama"), option, False)
        assert classes == [] and len(notes) == count
    ((notes, _),) = cuda_ranks(1, notes_of, small_model("bert"), "auto", False)
    assert notes == []


def rejected(world: World) -> tuple[list[str], list[str], list[str]]:
    """What is replaced before and after the compiler rejects a block on the last rank, and the sentences about it."""
    model, option = small_model("qwen3"), parallel(compile=True, fused_kernels=True)
    eager = load.load_model(model, parallel(), world, seed=0, tokenizer=small_tokenizer())
    with installed():
        loaded = open_compiled(world, model, option, broken if world.rank else "eager")
        before = replaced(loaded.encoder)
        assert_close(take_step(loaded, 0), take_step(eager, 0))
        sentences = EagerBlocks([eager.encoder, loaded.encoder]).name(world)
    assert_close(take_step(loaded, 1), take_step(eager, 1))
    torch._dynamo.reset()
    return before, replaced(loaded.encoder), sentences


def test_blocks_that_cannot_be_compiled_have_fused_kernels_on_all_ranks(ranks):
    first, second = ranks(2, rejected)
    assert first == second
    before, after, (failed, fused) = first
    assert before == [] and sorted(after) == ["Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"]
    assert "Qwen3DecoderLayer cannot be compiled" in failed and "Qwen3MLP" in fused


def run_fused(world: World, *arguments: str) -> str:
    with installed(), mock.patch("embedtrain.config.checks.importlib.util.find_spec", lambda name: object()):
        return run(world, *arguments, "parallel.fused_kernels=true")


def test_a_run_exports_the_model_without_them(ranks, run_inputs, tmp_path: Path):
    """The export is opened by its libraries and compared with the model that was trained."""
    save_small(small_model("qwen3"), tmp_path / "model")
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    more = (f"model.path={tmp_path / 'model'}", "train.steps=3", "parallel.compile=false", "export.check=true")
    ranks(1, run, *options(run_inputs, plain, *more))
    (output,) = ranks(1, run_fused, *options(run_inputs, fused, *more))
    assert "fused kernels of liger-kernel" in output
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (fused, plain))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-5, rtol=1e-3)
    config = "config.json"
    assert (fused / "model" / config).read_text() == (plain / "model" / config).read_text()


@pytest.mark.skipif(not has_liger, reason="needs Triton, of torch for CUDA, and liger-kernel: pip install '.[liger]'")
def test_liger_kernel_in_the_interpreter_of_triton():
    """Its own kernels, forward and backward: Triton's interpreter needs no GPU, and a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.models.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["families"] == list(FAMILIES)
