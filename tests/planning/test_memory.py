"""Planned memory by kind: compared with torch's tracker on 8 fake ranks; cached graphs that fit."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from embedtrain.config.losses import InfoNCEConfig, MatryoshkaConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import SELECTIVE, CheckpointConfig, CheckpointContents, GradientReduction, Strategy
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.planning.memory import (
    ClusterSpec,
    MemoryUse,
    StepWorkload,
    fit_activation_tokens,
    host_memory,
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
    selective = memory_of(LLAMA, replace(FSDP, activation_checkpointing=SELECTIVE), rows=128)
    assert 2 * checkpointed.activations < selective.activations < 0.6 * base.activations
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


def host_of(layout: ParallelLayout, *, ranks: int = RANKS, model: ModelSpec = LLAMA, **work):
    return host_memory(model, layout, ClusterSpec(ranks=ranks, per_node=RANKS, memory=80 * GIB), StepWorkload(**work))


def test_offload_takes_powers_of_two_of_host_memory():
    """torch rounds page-locked memory of each shard up; moments are ordinary memory."""
    matrices = {
        "embedding": (128256, 4096, 1),
        "projections": (4096, 4096, 2 * 32),
        "keys, values": (1024, 4096, 2 * 32),
        "mlp": (14336, 4096, 2 * 32),
        "down": (4096, 14336, 32),
        "norms": (4096, 1, 2 * 32 + 1),
    }
    for shards, ranks in ((1, 1), (8, 8), (8, 16)):
        layout = ParallelLayout(Strategy.hsdp, ranks // shards, shards, "", cpu_offload=True)
        found = host_of(layout, ranks=ranks)
        sizes = [(-(-rows // shards) * width * 4, count) for rows, width, count in matrices.values()]
        pinned = min(ranks, 8) * sum(count * 2 ** math.ceil(math.log2(size)) for size, count in sizes)
        assert (found.weights, found.gradients) == (pinned, pinned)
        assert found.weights > 1.1 * min(ranks, 8) / shards * 4 * LLAMA.weights.parameters
        assert found.optimizer == pytest.approx(min(ranks, 8) / shards * 8 * LLAMA.weights.parameters)
        # Both nodes of two compute, and one of them writes checkpoints.
        assert found.checkpoint == pytest.approx(12 * LLAMA.weights.parameters)
    assert host_of(FSDP).weights == host_of(FSDP).optimizer == 0


def test_copies_of_checkpoints_are_planned_if_saves_are_periodic():
    weights = 4.0 * LLAMA.weights.parameters
    for options, expected in (
        ({}, 3 * weights),
        ({"asynchronous": False}, 0),
        ({"every_minutes": 0}, 0),  # at the end only
        ({"every": 100, "every_minutes": 0}, 3 * weights),
        ({"every_minutes": 0, "best_metric": "dev/ndcg@10"}, 3 * weights),
        ({"contents": CheckpointContents.model}, 0),  # by time only checkpoints to resume from are saved
        ({"contents": CheckpointContents.model, "every": 100}, weights),
    ):
        checkpoint = CheckpointConfig(**options)
        assert host_of(FSDP, checkpoint=checkpoint).checkpoint == pytest.approx(expected), options
        # One of the replicas writes.
        assert host_of(DDP, checkpoint=checkpoint).checkpoint == pytest.approx(expected), options
    assert host_of(DDP, optim=OptimConfig(ema=0.99)).checkpoint == pytest.approx(4 * weights)


def test_ranks_on_cpus_have_one_memory():
    cluster = ClusterSpec.of_ranks(2, 2, 64 * GIB, gpu=False, host_memory=GIB)
    assert host_memory(LLAMA, replace(DDP, replicate=2), cluster, StepWorkload()).total == 0
    assert math.isinf(cluster.usable_on_host)


def test_selective_recomputation_caches_more_graphs():
    cluster = ClusterSpec(ranks=8, per_node=8, memory=80 * GIB)
    plain, selective, full = (
        fit_activation_tokens(
            XLMR,
            replace(DDP, activation_checkpointing=which),
            cluster,
            CACHED,
            reduce_per_step=True,
            free=cluster.memory,
        )
        for which in (False, SELECTIVE, True)
    )
    blocks = len(XLMR.weights.blocks)
    ratio = XLMR.activations(False).cached(blocks) / XLMR.activations(SELECTIVE).cached(blocks)
    assert ratio > 1.4
    assert selective / plain == pytest.approx(ratio, rel=0.1)
    assert full > 4 * selective


def activation_tokens(memory: float, work: StepWorkload = CACHED, free: float | None = None) -> int:
    cluster = ClusterSpec(ranks=8, per_node=8, memory=int(memory * GIB))
    available = int((memory if free is None else free) * GIB)
    return fit_activation_tokens(XLMR, DDP, cluster, work, reduce_per_step=True, free=available)


def test_more_memory_caches_more_graphs():
    tokens = [activation_tokens(memory) for memory in (8, 24, 40, 80, 100, 2000)]
    assert tokens == sorted(tokens)
    assert tokens[0] == CACHED.chunk_tokens < tokens[2] < tokens[3]
    assert tokens[-1] == 16384 * 5 * 90 // 8  # all tokens of a rank
    local = replace(CACHED, activation_tokens=tokens[-1]).per_rank(8)
    assert local.num_cached_graphs == local.chunks == 57  # the last of which has 48 of 182 texts


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
