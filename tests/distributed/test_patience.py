"""Ranks wait for each other long before the first step and between steps, and not within one."""

import time

from embedtrain.distributed.timeouts import Timeouts
from embedtrain.distributed.world import World


def late(world: World, seconds: float) -> list[float]:
    """How long rank 0 waited in steps; in all but the last rank 1 is late where that is allowed."""
    patience = Timeouts(world, timeout=40.0, step_timeout=2.0)
    waited = []

    def step(*, before: float = 0.0, within: float = 0.0) -> None:
        time.sleep(before if world.rank else 0.0)
        with patience.of_step():
            time.sleep(within if world.rank else 0.0)
            began = time.monotonic()
            try:
                world.barrier()
            finally:
                waited.append(time.monotonic() - began)

    step(before=0.2)  # the first
    step(before=seconds)  # all are waited for before any is impatient
    step(within=0.5)
    patience.between()
    step(before=seconds)
    try:
        step(within=seconds)
    except RuntimeError as error:
        # Three times the first step, counted in whole seconds; rank 0 has left when the other one comes.
        assert world.rank or "Timed out waiting 3000ms" in str(error)
    return waited


def test_patience(ranks):
    waited, _ = ranks(2, late, 5.0)
    assert len(waited) == 5
    assert max(waited[1:4]) < 2.5
    assert 2.5 < waited[4] < 4.5
