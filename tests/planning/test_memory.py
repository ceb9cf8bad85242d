"""Planned memory by kind: compared with torch's tracker on 8 fake ranks; cached graphs that fit."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from embedtrain.config.losses import InfoNCEConfig, MatryoshkaConfig
from embedtrain.config.recipe import GradientReduction, Strategy
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.planning.memory import (
    ClusterSpec,
    MemoryUse,
    StepWorkload,
    fit_activation_tokens,
    reduces_once_per_step,
    step_memory,
)
from embedtrain.planning.model_costs import ModelSpec
from tests.conftest import ROOT
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, spec_of

RANKS = 8
GIB = 2**30
XLMR, LLAMA = spec_of(XLMR_LARGE), spec_of(LLAMA_3_8B)
FSDP = ParallelLayout(Strategy.fsdp, 1, RANKS, "", reshard_after_forward=False)
DDP = ParallelLayout(Strategy.ddp, RANKS, 1, "")
CACHED = StepWorkload(rows=16384, texts_per_row=5, tokens_per_text=90, chunk_tokens=16384)


@pytest.mark.slow  # test_measured.py compares with real steps
def test_memory_equals_torchs_tracker():
    """XLM-R large and Llama 3 8B, their first 2 and 4 blocks, small batches (weights dominate) and large ones.

    In a separate process, because the fake process group is global.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.planning.tracked"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 8
    for case in cases:
        planned, tracked, name = case["planned"], case["tracked"], case["name"]
        assert planned["total"] == pytest.approx(tracked["Total"], rel=0.05), name
        assert planned["parameters"] == pytest.approx(tracked["Sharded Param"], rel=0.01), name
        assert planned["optimizer"] == pytest.approx(tracked["OptState"], rel=0.01), name
        if "many tokens" in name:
            gathered = tracked["Unsharded Param"] + tracked["All Gather"]
            assert planned["gathered"] == pytest.approx(gathered, rel=0.05, abs=50e6), name
            assert planned["activations"] == pytest.approx(tracked["Activation"] + tracked["Temp"], rel=0.1), name


def memory_of(
    model: ModelSpec, layout: ParallelLayout, *, reduce_per_step: bool = True, ranks: int = RANKS, **work
) -> MemoryUse:
    cluster = ClusterSpec(ranks=ranks, per_node=RANKS, memory=80 * GIB)
    return step_memory(
        model, layout, cluster, StepWorkload(tokens_per_text=512, **work), reduce_per_step=reduce_per_step
    )


@pytest.mark.parametrize("ranks", [8, 64])
def test_fsdp_shards_parameters_and_optimizer_state(ranks):
    memory = memory_of(LLAMA, ParallelLayout(Strategy.fsdp, 1, ranks, ""), ranks=ranks, rows=8 * ranks)
    assert memory.parameters == pytest.approx(4 * LLAMA.weights.parameters / ranks, rel=1e-3)
    assert memory.optimizer == pytest.approx(8 * LLAMA.weights.parameters / ranks, rel=1e-3)


def test_ddp_shards_nothing():
    assert memory_of(LLAMA, DDP, rows=64).total > 14 * LLAMA.weights.parameters


def test_every_layer_that_is_trained_has_vectors_and_a_loss():
    """In a step whose memory peaks in the loss."""
    losses = (
        InfoNCEConfig(),
        InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[6, 12], layers_per_step=1)),
        InfoNCEConfig(matryoshka=MatryoshkaConfig(layers=[6, 12])),
    )
    uses = [memory_of(XLMR, DDP, rows=2**20, chunk_tokens=512, loss=loss) for loss in losses]
    assert {use.phase for use in uses} == {"the loss"}
    last, drawn, both = (use.by_kind["loss"] for use in uses)
    assert (drawn, both) == pytest.approx((2 * last, 3 * last))


def test_options_that_save_memory():
    base = memory_of(LLAMA, FSDP, rows=128)
    assert memory_of(LLAMA, replace(FSDP, reshard_after_forward=True), rows=128).total < base.total
    checkpointed = memory_of(LLAMA, replace(FSDP, activation_checkpointing=True), rows=128)
    assert checkpointed.activations < 0.2 * base.activations
    offloaded = memory_of(LLAMA, replace(FSDP, cpu_offload=True), rows=128)
    assert offloaded.optimizer == 0
    assert offloaded.parameters < 1e6  # buffers
    assert memory_of(LLAMA, FSDP, rows=128, chunk_tokens=2048).total < base.total


def test_unreduced_gradients_between_chunks():
    """They need four bytes per element on every rank; a step with a single chunk has none."""
    layout = replace(FSDP, reshard_after_forward=True)
    per_step, per_chunk = (
        memory_of(XLMR, layout, reduce_per_step=once, rows=64 * RANKS, chunk_tokens=4096) for once in (True, False)
    )
    unreduced = 4 * XLMR.weights.trained * (1 - 1 / RANKS)
    assert per_step.total - per_chunk.total == pytest.approx(unreduced, rel=0.5)
    per_step, per_chunk = (
        memory_of(XLMR, layout, reduce_per_step=once, rows=4 * RANKS, chunk_tokens=4096) for once in (True, False)
    )
    assert per_step == per_chunk


@pytest.mark.parametrize(
    ("layout", "memory", "per_step"), [(FSDP, 50 * 10**9, True), (FSDP, 30 * 10**9, False), (DDP, 30 * 10**9, True)]
)
def test_gradient_reduction_is_chosen_by_memory(layout, memory, per_step):
    assert reduces_once_per_step(GradientReduction.auto, layout, 10**9, memory) is per_step


def activation_tokens(memory: float, work: StepWorkload = CACHED, free: float | None = None) -> int:
    cluster = ClusterSpec(ranks=8, per_node=8, memory=int(memory * GIB))
    available = int((memory if free is None else free) * GIB)
    return fit_activation_tokens(XLMR, DDP, cluster, work, reduce_per_step=True, free=available)


def test_more_memory_caches_more_graphs():
    tokens = [activation_tokens(memory) for memory in (8, 24, 40, 80, 100, 2000)]
    assert tokens == sorted(tokens)
    assert tokens[0] == CACHED.chunk_tokens < tokens[2] < tokens[3]
    assert tokens[-1] == 16384 * 5 * 90 // 8  # all tokens of a rank


@pytest.mark.parametrize("memory", [40, 80])
def test_cached_graphs_fit(memory):
    cluster = ClusterSpec(ranks=8, per_node=8, memory=memory * GIB)
    work = replace(CACHED, activation_tokens=activation_tokens(memory))
    total = step_memory(XLMR, DDP, cluster, work, reduce_per_step=True).total
    assert 0.5 * memory * GIB < total <= 0.85 * memory * GIB


def test_memory_of_other_processes_is_not_used():
    assert activation_tokens(80, free=40) <= activation_tokens(40)


@pytest.mark.parametrize(("memory", "tokens"), [(80, 0), (8, 10**6)])
def test_activation_tokens_of_the_recipe_are_obeyed(memory, tokens):
    assert activation_tokens(memory, replace(CACHED, activation_tokens=tokens)) == tokens
