"""The kernels of packed texts on a GPU, on a pretended one: which are selected, and how blocks with them compile."""

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.utils._python_dispatch import _disable_current_modes

from embedtrain.config.losses import InfoNCEConfig, Similarity
from embedtrain.config.recipe import Attention, Precision
from embedtrain.data.rows import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.build import build_loss
from embedtrain.models import attention
from embedtrain.models.attention import choose_flash_attention, use_flash_attention
from embedtrain.models.blocks import find_blocks
from embedtrain.models.packing import enable_packing
from embedtrain.training.backward import Backward
from embedtrain.training.guides import GuideModel
from embedtrain.training.rank_batch import ChunkOptions, GuideTokenizer, make_rank_batch
from tests.models.test_late_interaction import EXPANSION, late_interaction, open_model
from tests.models.test_packing import encoder_of, options, texts
from tests.pretend_cuda.steps import Case, Result, take_steps
from tests.small import parallel, small_model, small_tokenizer, text
from tests.training.test_losses import rows_for

# What torch 2.11 to 2.15 looks for in the package.
PACKAGE = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    if not hasattr(torch.ops.flash_attn_3, name):
        library.define(f"{name}() -> ()")
"""


@contextlib.contextmanager
def installed(package: Path, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """On a GPU of this capability, with the package in the folder."""
    actual = torch.cuda.get_device_capability
    sys.path.insert(0, str(package))
    sys.modules.pop("flash_attn_interface", None)
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = actual
        sys.path.remove(str(package))
        sys.modules.pop("flash_attn_interface", None)
        use_flash_attention(None)


def chosen(world: World, package: Path, capability: tuple[int, int], deterministic: bool) -> list[str | None]:
    """The choice of a model, and what torch says before and after its use."""
    with installed(package, capability):
        torch.use_deterministic_algorithms(deterministic)
        try:
            name = choose_flash_attention(world.device, [16, 128])
        finally:
            torch.use_deterministic_algorithms(False)
        before = current_flash_attention_impl()
        use_flash_attention(name)
        return [name, before, current_flash_attention_impl()]


@pytest.mark.parametrize(
    ("source", "capability", "deterministic", "name"),
    [
        (PACKAGE, (9, 0), False, "FA3"),
        (PACKAGE, (9, 0), True, None),
        (PACKAGE, (8, 0), False, None),
        ("raise ImportError('another version of CUDA')", (9, 0), False, None),
        (None, (9, 0), False, None),
    ],
)
def test_flash_attention_3(cuda_ranks, tmp_path: Path, source, capability, deterministic, name):
    if source is not None:
        (tmp_path / "flash_attn_interface.py").write_text(source)
    (answer,) = cuda_ranks(1, chosen, tmp_path, capability, deterministic)
    assert answer == [name, None, name]


def beside_a_selection(world: World, package: Path) -> list[str | None]:
    """What torch says in a program with a selection of its own, when encoders select theirs."""
    said = []
    with installed(package):
        register_flash_attention_impl("OWN", register_fn=lambda: SimpleNamespace(remove=lambda: None))
        activate_flash_attention_impl("OWN")
        for name in (None, "FA3", "FA3", None, None):
            use_flash_attention(name)
            said.append(current_flash_attention_impl())
        restore_flash_attention_impl(_raise_warn=False)
    return said


def test_the_selection_of_the_program_remains(cuda_ranks, tmp_path: Path):
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    assert cuda_ranks(1, beside_a_selection, tmp_path) == [["OWN", "FA3", "FA3", "OWN", "OWN"]]


def kernels_of_a_step(
    world: World, package: Path, trained: Attention, guide: Attention
) -> tuple[list[str], list[str | None], list[str | None]]:
    """The notes of the trained model, loaded before its guide, and the kernels in its passes and in those of the guide.

    Graphs of the first chunks are kept while the guide encodes.
    """
    used: dict[bool, list[str | None]] = {True: [], False: []}
    with installed(package), pytest.MonkeyPatch.context() as patch:
        model, other = (
            Case(architecture="bert", attention=attention, model={"dropout": 0.1}).load(world)
            for attention in (trained, guide)
        )
        texts = GuideTokenizer(other.tokenizer, TextFormat(), chunk_tokens=60)
        guides = {"guide": GuideModel(other.encoder, texts, Similarity.cosine, world)}
        loss = build_loss(InfoNCEConfig(guide="guide"), dimension=32, guide_dimensions={"guide": 32}, seed=0)
        backward = Backward(
            model.encoder, loss.to(world.device), world, seed=0, dummy=model.tokenizer.dummy(), guides=guides
        )
        rows = rows_for(InfoNCEConfig(), 6)
        local = make_rank_batch(rows, 0, 1, model.tokenizer, ChunkOptions(60, 60), guides={"guide": texts})
        for encoder in (model.encoder, other.encoder):
            encoder.register_forward_hook(
                lambda module, *_: used[module is model.encoder].append(current_flash_attention_impl())
            )
        run = torch.autograd.backward

        def recorded(*arguments: Any, **options: Any) -> None:
            if isinstance(arguments[0], tuple):  # of a chunk, not of the loss
                used[True].append(current_flash_attention_impl())
            run(*arguments, **options)

        patch.setattr(torch.autograd, "backward", recorded)
        backward(local.pinned().to(world.device))
        return list(model.notes), used[True], used[False]


PACKED, PADDED = Attention.packed, Attention.padded


@pytest.mark.parametrize(("trained", "guide"), [(PACKED, PADDED), (PADDED, PACKED)])
def test_a_guide_leaves_the_kernel_of_the_trained_model(cuda_ranks, tmp_path: Path, trained, guide):
    """FlashAttention 3 raises for the dropout of padded texts."""
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    ((lines, own, others),) = cuda_ranks(1, kernels_of_a_step, tmp_path, trained, guide)
    assert any("FlashAttention 3" in line for line in lines) is (trained is PACKED)
    assert len(own) > 3 and set(own) == {"FA3" if trained is PACKED else None}
    assert others and set(others) == {"FA3" if guide is PACKED else None}


def step_in(world: World, version: str) -> tuple[Result, list[tuple[int, tuple[int, int]]]]:
    """A step with `varlen_attn` of torch 2.14 or 2.15 on Hopper, and the longest text and the window of its calls."""
    calls, kernel = [], attention.varlen_attn

    def newer(*arguments: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
        if version == "2.15":
            if not torch.backends.cuda.flash_sdp_enabled():
                raise RuntimeError("No viable backend for varlen_attn")
            assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN is preferred"
        else:
            assert window_size != (-1, -1), "cuDNN is preferred"
        calls.append((arguments[5], window_size))
        return kernel(*arguments, window_size=window_size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", newer)
        patch.setattr(attention, "_PREFERS_CUDNN", version == "2.14")
        patch.setattr(attention, "_OBEYS_SDPA_KERNEL", version == "2.15")
        architecture, heads = ("bert", {}) if version == "2.14" else ("gemma3_text", {"head_dim": 136})
        case = Case(architecture=architecture, model={"config": small_model(architecture).config | heads})
        return take_steps(world, case.load(world), case.loss), calls


@pytest.mark.parametrize("version", ["2.14", "2.15"])
def test_packed_texts_have_one_kernel_in_newer_versions_of_torch(cuda_ranks, version):
    """Neither cuDNN, nor none at all where large heads restrict the kernels of padded texts."""
    ((result, calls),) = cuda_ranks(1, step_in, version)
    assert math.isfinite(result.losses[0]) and result.grad_norms[0] > 0
    assert calls
    if version == "2.14":
        assert all(min(window) > longest for longest, window in calls), "the window hides nothing"


def notes(world: World, dropout: float) -> list[str]:
    options = parallel(precision=Precision.bf16)
    model = small_model("bert", dropout=dropout)
    return list(load_model(model, options, world, seed=0, tokenizer=small_tokenizer()).notes)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_kernel_and_skipped_dropout_are_reported(cuda_ranks, dropout):
    (lines,) = cuda_ranks(1, notes, dropout)
    (line,) = [line for line in lines if "FlashAttention 2" in line]
    assert line.startswith("texts are packed") and ("(0.1)" in line) == bool(dropout)


EXPANDED = "expanded queries"


def compilations(world: World, case: str) -> list[int]:
    """The number of compiled graphs after each of four chunks, forward and backward; graph breaks raise.

    The tensors are torch's fake ones, on the GPU and without values.
    """
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def on_gpu(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    if case == EXPANDED:
        encoder, token_rows = open_model(late_interaction("bert", **EXPANSION))
        enable_packing(encoder)
        tokenizer: TextTokenizer = token_rows.with_packing(True)
        ids = tokenizer.tokens([text(seed, 1 + 2 * seed) for seed in range(8)], role=TextRole.query)
    else:
        encoder = encoder_of(options(case))
        tokenizer = TextTokenizer(small_tokenizer(), 48, packed=True)
        ids = texts(tokenizer)
    encoder.to(torch.bfloat16).train()
    chunks = [tokenizer.chunk(ids, rows) for rows in ([0, 2, 3], [1, 4, 5, 6], [2, 6, 7], range(8))]
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    torch._dynamo.reset()
    with _disable_current_modes():
        encoder._apply(on_gpu)
        for block in find_blocks(encoder):
            block.compile(dynamic=True, fullgraph=True, backend=counter)
        for chunk in chunks:
            on_device = chunk.map_tensors(on_gpu)
            with fake:
                encoder(on_device)[0].sum().backward()
            counts.append(counter.frame_count)
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize(
    "case",
    ["qwen3", *(pytest.param(case, marks=pytest.mark.slow) for case in ("bert", "gemma3_text, window", EXPANDED))],
)
def test_blocks_compile_as_a_whole_and_once(cuda_ranks, case):
    (counts,) = cuda_ranks(1, compilations, case)
    assert counts[0] > 0 and set(counts) == {counts[0]}
