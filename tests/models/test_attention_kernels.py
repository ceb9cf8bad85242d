"""The kernels of packed texts on a GPU, on a pretended one: which are selected, and how blocks with them compile."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import _disable_current_modes

from embedtrain.config.recipe import Precision
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.models.attention import select_flash_attention, use_flash_attention_2
from embedtrain.models.blocks import find_blocks
from embedtrain.models.packing import enable_packing
from tests.models.test_late_interaction import EXPANSION, late_interaction, open_model
from tests.models.test_packing import encoder_of, options, texts
from tests.small import parallel, small_model, small_tokenizer, text

# What torch 2.11 to 2.13 looks for in the package.
PACKAGE = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    if not hasattr(torch.ops.flash_attn_3, name):
        library.define(f"{name}() -> ()")
"""


def selected(world: World, package: str, capability: tuple[int, int], deterministic: bool) -> tuple[str, str | None]:
    """The kernel's name, and what torch says."""
    actual = torch.cuda.get_device_capability
    sys.path.insert(0, package)
    sys.modules.pop("flash_attn_interface", None)
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.use_deterministic_algorithms(deterministic)
    try:
        return select_flash_attention(world.device, [16, 128]), current_flash_attention_impl()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.get_device_capability = actual
        sys.path.remove(package)
        use_flash_attention_2()


@pytest.mark.parametrize(
    ("source", "capability", "deterministic", "name"),
    [
        (PACKAGE, (9, 0), False, "FlashAttention 3"),
        (PACKAGE, (9, 0), True, "FlashAttention 2"),
        (PACKAGE, (8, 0), False, "FlashAttention 2"),
        ("raise ImportError('another version of CUDA')", (9, 0), False, "FlashAttention 2"),
        (None, (9, 0), False, "FlashAttention 2"),
    ],
)
def test_flash_attention_3(cuda_ranks, tmp_path: Path, source, capability, deterministic, name):
    if source is not None:
        (tmp_path / "flash_attn_interface.py").write_text(source)
    (answer,) = cuda_ranks(1, selected, str(tmp_path), capability, deterministic)
    assert answer == (name, "FA3" if name == "FlashAttention 3" else None)


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
