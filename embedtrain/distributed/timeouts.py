"""Time-outs of collectives: long before and between steps, short within a step.

Before the first step one rank may read, load or compile while the others wait; between steps rank 0 may write a
checkpoint, a table or a model. Within a step all ranks do the same work, so a late rank is considered lost.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from datetime import timedelta

from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.world import BACKGROUND_GROUP, NCCL_EXTRA_SECONDS, World, process_groups

# The first step is only a rough measure of later ones: work is queued on a GPU ahead of time, and NCCL starts its clock
# when a collective is queued.
_FIRST_STEP_FACTOR = 3.0


class Timeouts:
    """The time-outs of a training run on this rank.

    Args:
        timeout: seconds that ranks wait for each other before the first step and between steps.
        step_timeout: seconds that ranks wait within a step, after the first one; at most `timeout`, at least three
            times the duration of the first step.
    """

    def __init__(self, world: World, timeout: float, step_timeout: float) -> None:
        self.world, self.timeout, self.step_timeout = world, timeout, step_timeout
        self._first_step_seconds: float | None = None
        self._in_sync = False

    def leave_steps(self) -> None:
        """Announce work between steps, which rank 0 may do alone: the next step starts when all ranks have arrived."""
        self._in_sync = False

    @contextlib.contextmanager
    def within_step(self) -> Iterator[None]:
        """Apply the step time-out while the block takes a step. Every rank must enter it."""
        if self._first_step_seconds is None:
            started = time.monotonic()
            yield
            self._first_step_seconds = time.monotonic() - started
            return
        if not self._in_sync:
            # All ranks must have arrived before any of them applies the shorter time-out.
            (seconds,) = max_over_ranks([math.ceil(self._first_step_seconds)], self.world.device)
            self.step_timeout = min(self.timeout, max(self.step_timeout, _FIRST_STEP_FACTOR * seconds))
            self._in_sync = True
            if self.world.watchdog is not None:
                self.world.watchdog.max_silence = self.step_timeout
        _set_timeout(self.world, self.step_timeout)
        yield
        # Not after an error: a lost rank is not waited for any longer.
        _set_timeout(self.world, self.timeout)


def _set_timeout(world: World, seconds: float) -> None:
    """Change the time-out of all process groups.

    gloo and NCCL read a group's time-out when a collective is called.
    """
    if world.watchdog is not None:
        world.watchdog.timeout = seconds
    extra = NCCL_EXTRA_SECONDS if world.watchdog is not None and world.device.type == "cuda" else 0.0
    for group in process_groups():
        if group.group_desc != BACKGROUND_GROUP:
            group.set_timeout(timedelta(seconds=seconds + extra))
