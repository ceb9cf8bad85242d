"""How long ranks wait for each other: long until the first step is done and between steps, short within a step.

Before the first step one rank may read, load or compile while the others wait; between steps rank 0 may write a
checkpoint, a table or a model. Within a step all ranks do the same, and one that is late is gone.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.world import BACKGROUND_GROUP, NCCL_EXTRA_SECONDS, World

# A step takes as long as it takes: a GPU is told its work ahead, and NCCL counts from then.
_STEPS = 3.0


class Timeouts:
    """The time-outs of a training, on one rank of all.

    Args:
        world: the ranks.
        timeout: seconds that ranks wait for each other, but
        step_timeout: seconds within a step, after the first one; at most `timeout`, at least thrice what that one took.
    """

    def __init__(self, world: World, timeout: float, step_timeout: float) -> None:
        self.world, self.timeout, self.step_timeout = world, timeout, step_timeout
        self._first: float | None = None  # seconds that the first step took here
        self._met = False

    def between(self) -> None:
        """Something comes that rank 0 may do while the others wait: the next step begins when all have ended it."""
        self._met = False

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """Wait as long as a step may take, while the block takes one. Every rank enters it alike."""
        if self._first is None:
            began = time.monotonic()
            yield
            self._first = time.monotonic() - began
            return
        if not self._met:
            # All have to be here before any is impatient.
            (first,) = max_over_ranks([math.ceil(self._first)], self.world.device)
            self.step_timeout = min(self.timeout, max(self.step_timeout, _STEPS * first))
            self._met = True
            if self.world.watch is not None:
                self.world.watch.silence = self.step_timeout
        _wait_at_most(self.world, self.step_timeout)
        yield
        # Not after an error: whoever is lost now is not waited for any longer.
        _wait_at_most(self.world, self.timeout)


def _wait_at_most(world: World, seconds: float) -> None:
    """Change the time-out of all process groups from here on; torch has no public way (checked on 2.13).

    gloo and NCCL both take a group's time-out when a collective is asked for.
    """
    if world.watch is not None:
        world.watch.patience = seconds
    longer = NCCL_EXTRA_SECONDS if world.watch is not None and world.device.type == "cuda" else 0.0
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != BACKGROUND_GROUP:
            group.set_timeout(timedelta(seconds=seconds + longer))
