"""Ranks wait long for each other before the first step and between steps, but not within a step."""

import time

import pytest

from embedtrain.distributed.world import Timeouts, World


def wait_for_late_rank(world: World, seconds: float) -> list[float]:
    """How long rank 0 waits in each step; rank 1 is late, in the last step where it must not be."""
    timeouts = Timeouts(world, timeout=40.0, step_timeout=2.0)
    waits = []

    def step(*, before: float = 0.0, within: float = 0.0) -> None:
        time.sleep(before if world.rank else 0.0)
        with timeouts.within_step():
            time.sleep(within if world.rank else 0.0)
            started = time.monotonic()
            try:
                world.barrier()
            finally:
                waits.append(time.monotonic() - started)

    step(before=0.2)  # the first step
    step(before=seconds)  # all ranks must arrive before the shorter time-out applies
    step(within=0.5)
    timeouts.leave_steps()
    step(before=seconds)
    try:
        step(within=seconds)
    except RuntimeError as error:
        # Three times the first step, counted in whole seconds; rank 0 has left when rank 1 arrives.
        assert world.rank or "Timed out waiting 3000ms" in str(error)
    return waits


def compile_late(world: World) -> float:
    """Rank 1 compiles in two steps, in the second one for longer than ranks wait within steps; their later time-out."""
    counts = [0]
    timeouts = Timeouts(world, timeout=40.0, step_timeout=2.0, num_graphs=lambda: counts[0])
    for seconds, graphs in ((0.0, 3), (3.5, 1), (0.0, 0), (0.0, 0)):
        with timeouts.within_step():
            if world.rank:
                time.sleep(seconds)
                counts[0] += graphs
            world.barrier()
    return timeouts.step_timeout


def test_compilation_does_not_count_as_hanging(ranks):
    """Three times the longest step so far, counted in whole seconds, in which a rank may compile a graph later."""
    assert ranks(2, compile_late) == [12.0, 12.0]


@pytest.mark.slow
def test_the_time_out_within_steps_is_shorter(ranks):
    waits, _ = ranks(2, wait_for_late_rank, 5.0)
    assert len(waits) == 5
    assert max(waits[1:4]) < 2.5
    assert 2.5 < waits[4] < 5.0, "it ended before the other rank arrived"
