"""The share of a step's time in which a rank communicated and computed nothing, measured now and then.

On a GPU it is the time of NCCL's kernels that no other kernel ran beside, by torch.profiler. A profile of a CPU's
operations would slow the step by a fifth and take seconds to be read; there communication hides behind nothing, for
the main thread itself waits for it, and how long it does is clocked. The two places where it waits belong to torch
and are replaced meanwhile; checked on 2.13.
"""

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World
from embedtrain.training.spans import Clock

# The first step that is measured (those before choose kernels and algorithms), and logged rows from one to the next.
FIRST = 3
ROWS = 100

Intervals = list[tuple[float, float]]


class CommunicationMeter:
    """Measures some steps.

    Args:
        world: the ranks. One that is alone is not measured: it waits for nobody.
        log_every: steps between two logged rows.
    """

    def __init__(self, world: World, log_every: int) -> None:
        self._world, self._apart = world, ROWS * log_every
        self._steps = 0
        self._share: float | None = None

    @contextlib.contextmanager
    def of_step(self, *, already_profiled: bool = False) -> Iterator[None]:
        """Around every step, on every rank; where it measures, a collective at the end.

        Args:
            already_profiled: somebody else clocks this step; the next one is measured instead.
        """
        if already_profiled:
            yield
            return
        self._steps += 1
        due = self._steps >= FIRST and (self._steps - FIRST) % self._apart == 0
        if not due or self._world.size == 1:
            yield
            return
        began = time.perf_counter()
        with gpu_profile(self._world.device) if self._world.device.type == "cuda" else timed_waits() as alone:
            yield
        share = alone() / (time.perf_counter() - began)
        mean = float(gather_vector(torch.tensor([share], device=self._world.device)).mean())
        self._share = mean if math.isfinite(mean) else None  # a rank could not be profiled

    def take(self) -> dict[str, float]:
        """The ranks' mean of the step that was measured since this was last asked, if one was."""
        share, self._share = self._share, None
        return {} if share is None else {"communication": share}


@contextlib.contextmanager
def timed_waits(clock: Clock | None = None) -> Iterator[Callable[[], float]]:
    """Clock this thread's waits for collectives during the block; what is yielded tells the seconds of them.

    Args:
        clock: where each of them is written down; default: a new one.
    """
    me, kept = threading.get_ident(), clock or Clock()

    def clocked(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return wait(*args, **kwargs)
            with kept.wait():
                return wait(*args, **kwargs)

        return timed

    of_work, of_tensor = Work.wait, functional.wait_tensor
    Work.wait, functional.wait_tensor = clocked(of_work), clocked(of_tensor)  # type: ignore[method-assign]
    try:
        yield lambda: kept.waited
    finally:
        Work.wait, functional.wait_tensor = of_work, of_tensor  # type: ignore[method-assign]


@contextlib.contextmanager
def gpu_profile(device: torch.device) -> Iterator[Callable[[], float]]:
    """Profile the GPU during the block; what is yielded tells the seconds of NCCL alone, NaN where it cannot be."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on the terminal that it starts and stops
    found: list[Any] = []
    try:
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    except Exception:  # somebody else profiles this process, or the driver does not let us: training goes on
        yield lambda: math.nan
        return
    try:
        yield lambda: exposed_nccl_seconds(found)
        torch.cuda.synchronize(device)
    finally:
        with contextlib.suppress(Exception):
            profiler.stop()
            found += profiler.events()


def exposed_nccl_seconds(events: Iterable[Any]) -> float:
    """Seconds of a profile's events in which NCCL's kernels ran alone; NaN without any kernel."""
    ours: Intervals = []
    others: Intervals = []
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kind = ours if "nccl" in event.name.lower() else others
            kind.append((event.time_range.start, event.time_range.end))
    if not others:
        return math.nan
    return (covered_length(ours + others) - covered_length(others)) / 1e6


def covered_length(intervals: Intervals) -> float:
    """The length of what intervals cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
