"""The current activity of this process, recorded for messages about ranks that do not respond."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Activity:
    """What the main thread is doing."""

    name: str = "starting"  # such as "evaluating dev"
    step: int | None = None  # optimizer step it belongs to; None before training
    # Activities recorded so far. All ranks record the same sequence, so a rank with a lower number is behind.
    number: int = 0
    since: float = field(default_factory=time.monotonic)  # start, on the clock of `time.monotonic`

    def __str__(self) -> str:
        return describe_activity(self.name, self.step)


def describe_activity(name: str, step: int | None) -> str:
    """`training, step 13`."""
    return name if step is None else f"{name}, step {step}"


# One main thread does one thing at a time. A list, because a function cannot rebind a module's name without `global`.
_current = [Activity()]


def current_activity() -> Activity:
    """The activity of the main thread; callable from any thread."""
    return _current[0]


def set_activity(name: str, step: int | None = None) -> None:
    """Record what the main thread does next. Without a step, the previous one is kept. Other threads are ignored."""
    if threading.current_thread() is threading.main_thread():
        previous = _current[0]
        _current[0] = Activity(name, previous.step if step is None else step, previous.number + 1)


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    """Record the activity of the block, and the previous one again when the block ends.

    After an error the activity is kept: a message about the error names it.
    """
    previous = _current[0]
    set_activity(name)
    yield
    set_activity(previous.name)
