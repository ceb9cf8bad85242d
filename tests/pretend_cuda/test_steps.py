"""Optimizer steps on the pretended device: no mixed devices, and the numbers of the CPU."""

from typing import Any

import pytest

from embedtrain.config.recipe import SELECTIVE, Attention, GradientReduction, LoraConfig, Precision, Strategy
from tests.pretend_cuda.steps import Case, agree, run_case
from tests.small import ARCHITECTURES, MORE_ARCHITECTURES

# bf16 has 8 bits, and the kernel for packed texts rounds elsewhere than torch's attention on the CPU.
TOLERANCES = {Precision.fp32: 1e-5, Precision.bf16: 1e-2}

# The others have an attention like one of these.
DIFFERENT = ("xlm-roberta", "qwen3", "gemma3_text", "modernbert")


ATTENTION = [
    pytest.param(name, attention, marks=() if name in DIFFERENT else pytest.mark.slow)
    for name in ARCHITECTURES | MORE_ARCHITECTURES
    for attention in (Attention.packed, Attention.padded)
    if attention is Attention.padded or name not in ("mpnet", "deberta-v2")  # which compute attention themselves
]


@pytest.mark.quick("gemma3_text-packed", "modernbert-padded", "xlm-roberta-packed")
@pytest.mark.parametrize(("architecture", "attention"), ATTENTION)
def test_architectures(cuda_ranks, architecture, attention):
    """Packed in bf16, which the kernel for packed texts needs; padded in fp32. The forward pass never waits."""
    precision = Precision.bf16 if attention is Attention.packed else Precision.fp32
    case = Case(architecture=architecture, attention=attention, precision=precision)
    ((result, expected),) = cuda_ranks(1, run_case, case)
    agree(result, expected, TOLERANCES[precision])
    assert not [line for line in result.reads if line.startswith("models/")]


LORA = {"lora": LoraConfig(rank=4, alpha=8.0)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "recomputation": {"parallel": {"activation_checkpointing": True}},
    "offload": {"parallel": {"cpu_offload": True}},
    "recomputation and offload": {"parallel": {"activation_checkpointing": True, "cpu_offload": True}},
    "gradients reduced per chunk": {"parallel": {"gradient_reduction": GradientReduction.per_chunk}},
    "LoRA": {"model": LORA},
    "LoRA and recomputation": {"model": LORA, "parallel": {"activation_checkpointing": True}},
    "LoRA and offload": {"model": LORA, "parallel": {"cpu_offload": True}},
    "dropout": {"model": {"dropout": 0.1}},
}
# The others combine what these have.
_QUICK = ("recomputation and offload", "LoRA", "dropout")
_QUICK_OF_TWO = ((Strategy.fsdp, "plain"), (Strategy.hsdp, "LoRA and offload"))


@pytest.mark.quick("LoRA", "recomputation and offload")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _QUICK)) for name in LAYOUTS]
)
def test_layouts_of_one_rank(cuda_ranks, name):
    """Two steps in fp32, for which the kernel for packed texts does not exist."""
    case = Case(precision=Precision.fp32, attention=Attention.padded, **LAYOUTS[name])
    ((result, expected),) = cuda_ranks(1, run_case, case, 2)
    agree(result, expected, TOLERANCES[Precision.fp32])


@pytest.mark.parametrize("architecture", ["xlm-roberta", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_selective_recomputation_of_packed_texts(cuda_ranks, architecture):
    """The kernel for packed texts has run once for each text and layer, as without recomputation."""
    case = Case(
        architecture=architecture,
        attention=Attention.packed,
        precision=Precision.bf16,
        parallel={"activation_checkpointing": SELECTIVE},
    )
    ((result, expected),) = cuda_ranks(1, run_case, case)
    agree(result, expected, TOLERANCES[Precision.bf16])


# Of a step of two ranks with FSDP and InfoNCE: three units of FSDP (two blocks and the rest) and the embeddings of the
# batch are gathered, and their gradients reduced; embeddings travel from the rank that encodes them and back.
COLLECTIVES = {
    "cuda _allgather_base_": 5,
    "cuda _reduce_scatter_base_": 4,
    "cuda alltoall_base_": 2,
    "cuda allreduce_": 4,
}


@pytest.mark.quick("hsdp-LoRA and offload")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[pytest.mark.slow] * ((strategy, name) not in _QUICK_OF_TWO))
        for strategy in (Strategy.fsdp, Strategy.ddp, Strategy.hsdp)
        for name in ("plain", "recomputation and offload", "LoRA and offload")
    ],
)
def test_layouts_of_two_ranks(cuda_ranks, strategy, name):
    values = LAYOUTS.get(name, {})
    sizes = {"shard_size": 1} if strategy is Strategy.hsdp else {}
    values = values | {"parallel": values.get("parallel", {}) | sizes}
    case = Case(precision=Precision.fp32, attention=Attention.padded, strategy=strategy, **values)
    for result, expected in cuda_ranks(2, run_case, case):
        agree(result, expected, TOLERANCES[Precision.fp32])
        if (strategy, name) == _QUICK_OF_TWO[0]:  # the table of docs/speed.md
            assert result.reads.total() == 1
            assert result.calls == COLLECTIVES
