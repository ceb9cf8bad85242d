"""What this process is doing, noted as it goes, for those who wonder why it does not answer."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Activity:
    """What the main thread is doing.

    Attributes:
        what: such as "evaluating dev".
        step: the optimiser step it belongs to; None before training.
        number: notes made so far. Ranks do the same in the same order, so a rank with fewer of them is behind.
        since: when it began, on the clock of `time.monotonic`.
    """

    what: str = "starting"
    step: int | None = None
    number: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return describe_activity(self.what, self.step)


def describe_activity(what: str, step: int | None) -> str:
    """Words for it: "training, step 13"."""
    return what if step is None else f"{what}, step {step}"


# A process does one thing, as it has one main thread; a list, for a name cannot be set from within a function.
_now = [Activity()]


def current_activity() -> Activity:
    """What the main thread is doing; any thread may ask."""
    return _now[0]


def note(what: str, step: int | None = None) -> None:
    """Note what comes now. Threads beside the main one may pass here too: theirs is not noted.

    Args:
        what: is about to be done.
        step: the optimiser step; None: as before.
    """
    if threading.current_thread() is threading.main_thread():
        before = _now[0]
        _now[0] = Activity(what, before.step if step is None else step, before.number + 1)


@contextlib.contextmanager
def activity(what: str) -> Iterator[None]:
    """Note what the block does, and afterwards what was being done before it.

    Not after an error: what was being done when it arose is what one wants to know.
    """
    before = _now[0]
    note(what)
    yield
    note(before.what)
