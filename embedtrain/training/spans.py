"""Names for the parts of a step: in a trace, and clocked while one is written; without one they cost nothing."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch.profiler import record_function

BATCHES = "waiting for batches"
ENCODE, LOSS, BACKWARD, NORM, AGREE, OPTIMIZER = (
    "encode",
    "loss",
    "backward",
    "gradient norm",
    "agreement of the ranks",
    "optimizer",
)
RANKS = "waiting for other ranks"


class Clock:
    """Seconds of each span of this rank, less its waits for collectives; and those, one after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.waits: list[float] = []
        self.waited = 0.0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """One part of a step. Spans of a clock do not lie within one another."""
        began, waited = time.perf_counter(), self.waited
        try:
            with record_function(name):
                yield
        finally:
            own = time.perf_counter() - began - (self.waited - waited)
            self.seconds[name] = self.seconds.get(name, 0.0) + own

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """One wait for a collective."""
        began = time.perf_counter()
        try:
            with record_function(RANKS):
                yield
        finally:
            self.waits.append(time.perf_counter() - began)
            self.waited += self.waits[-1]


_clock: Clock | None = None


def span(name: str) -> AbstractContextManager[None]:
    """Around a part of a step."""
    return contextlib.nullcontext() if _clock is None else _clock.span(name)


@contextlib.contextmanager
def active_clock(clock: Clock) -> Iterator[None]:
    """Have this clock run during the block."""
    global _clock  # noqa: PLW0603 - one process takes one step at a time
    _clock = clock
    try:
        yield
    finally:
        _clock = None
