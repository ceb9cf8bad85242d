"""As many graphs are kept as memory has room for, and no plan takes more than there is."""

from dataclasses import replace

import pytest

from embedtrain.config.recipe import Strategy
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.planning.cached_graphs import activation_tokens
from embedtrain.planning.memory import step_memory
from embedtrain.planning.workload import ClusterSpec, StepWorkload
from tests.planning.models import XLMR_LARGE, facts

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
