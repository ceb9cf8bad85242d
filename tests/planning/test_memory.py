"""A plan's kinds of memory against torch's own tracker: 8 fake ranks in one process, without any memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from embedtrain.config.recipe import GradientReduction, ParallelConfig, Strategy
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.planning.memory import MemoryUse, activation_tokens, reduces_once_per_step, step_memory
from embedtrain.planning.workload import ClusterSpec, StepWorkload
from tests.conftest import ROOT
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, facts

RANKS = 8


@pytest.mark.slow  # what a real step takes is measured in any case
def test_memory_is_that_of_torchs_tracker():
    """XLM-R large and Llama 3 8B, their first 2 and 4 blocks, small batches (weights count) and large ones.

    In a process of its own, for the fake process group is the process's.
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
            gathered = tracked["Unsharded Param"] + tracked["All Unshard"]
            assert planned["gathered"] == pytest.approx(gathered, rel=0.05, abs=50e6), name
            assert planned["activations"] == pytest.approx(tracked["Activation"] + tracked["Temp"], rel=0.1), name


def plan_of(found, layout: ParallelLayout, *, whole: bool = True, ranks: int = RANKS, **work) -> MemoryUse:
    machines = ClusterSpec(ranks=ranks, per_node=RANKS, memory=80 * 2**30)
    return step_memory(found, layout, machines, StepWorkload(tokens_per_text=512, **work), whole=whole)


def test_shares_of_what_is_sharded():
    found = facts(LLAMA_3_8B)
    for ranks in (8, 64):
        memory = plan_of(found, ParallelLayout(Strategy.fsdp, 1, ranks, ""), ranks=ranks, rows=8 * ranks)
        assert memory.parameters == pytest.approx(4 * found.parameters / ranks, rel=1e-3)
        assert memory.optimizer == pytest.approx(8 * found.parameters / ranks, rel=1e-3)
    ddp = plan_of(found, ParallelLayout(Strategy.ddp, 8, 1, ""), rows=64)
    assert ddp.total > 14 * found.parameters


def test_each_saving_saves_what_it_says():
    found = facts(LLAMA_3_8B)
    plain = ParallelLayout(Strategy.fsdp, 1, RANKS, "", reshard_after_forward=False)
    whole = plan_of(found, plain, rows=128)
    assert (
        whole.total
        > plan_of(found, ParallelLayout(Strategy.fsdp, 1, RANKS, "", reshard_after_forward=True), rows=128).total
    )
    recomputed = plan_of(
        found,
        ParallelLayout(Strategy.fsdp, 1, RANKS, "", reshard_after_forward=False, activation_checkpointing=True),
        rows=128,
    )
    assert recomputed.activations < 0.2 * whole.activations
    offloaded = plan_of(
        found, ParallelLayout(Strategy.fsdp, 1, RANKS, "", reshard_after_forward=False, cpu_offload=True), rows=128
    )
    assert offloaded.optimizer == 0
    assert offloaded.parameters < 1e6  # buffers
    assert plan_of(found, plain, rows=128, chunk_tokens=2048).total < whole.total


def test_gradients_between_chunks():
    """Whole ones take four bytes an element on every rank; one chunk a step has none to keep."""
    found = facts(XLMR_LARGE)
    layout = ParallelLayout(Strategy.fsdp, 1, RANKS, "")
    several = [plan_of(found, layout, whole=whole, rows=64 * RANKS, chunk_tokens=4096) for whole in (True, False)]
    assert several[0].total - several[1].total == pytest.approx(4 * found.trained * (1 - 1 / RANKS), rel=0.5)
    one = [plan_of(found, layout, whole=whole, rows=4 * RANKS, chunk_tokens=4096) for whole in (True, False)]
    assert one[0] == one[1]
    options = ParallelConfig(gradient_reduction=GradientReduction.auto)
    assert reduces_once_per_step(options.gradient_reduction, layout, 10**9, 50 * 10**9)
    assert not reduces_once_per_step(options.gradient_reduction, layout, 10**9, 30 * 10**9)
    assert reduces_once_per_step(options.gradient_reduction, ParallelLayout(Strategy.ddp, 8, 1, ""), 10**9, 30 * 10**9)


GIB = 2**30
WORK = StepWorkload(rows=16384, texts_per_row=5, tokens_per_text=90, chunk_tokens=16384)
LAYOUT = ParallelLayout(Strategy.ddp, 8, 1, "")


def kept(memory: float, work: StepWorkload = WORK, free: float | None = None) -> int:
    machines = ClusterSpec(ranks=8, per_node=8, memory=int(memory * GIB))
    room = int((memory if free is None else free) * GIB)
    return activation_tokens(facts(XLMR_LARGE), LAYOUT, machines, work, whole=True, free=room)


def test_more_memory_keeps_more_up_to_all():
    some = [kept(memory) for memory in (8, 24, 40, 80, 100, 2000)]
    assert some == sorted(some) and some[0] == WORK.chunk_tokens < some[2] < some[3]
    assert some[-1] == 16384 * 5 * 90 // 8  # all that a rank has


@pytest.mark.parametrize("memory", [40, 80])
def test_what_is_kept_fits(memory):
    machines = ClusterSpec(ranks=8, per_node=8, memory=memory * GIB)
    work = replace(WORK, activation_tokens=kept(memory))
    total = step_memory(facts(XLMR_LARGE), LAYOUT, machines, work, whole=True).total
    assert 0.5 * memory * GIB < total <= 0.85 * memory * GIB


def test_what_others_take_of_the_device_is_not_there():
    assert kept(80, free=40) <= kept(40)


def test_what_the_recipe_says_is_obeyed():
    assert kept(80, replace(WORK, activation_tokens=0)) == 0
    assert kept(8, replace(WORK, activation_tokens=10**6)) == 10**6
