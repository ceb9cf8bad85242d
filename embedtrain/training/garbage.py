"""Python's garbage collector, between steps: never inside one, and on all ranks at the same time.

By itself it starts whenever enough objects were made, on each rank at another moment; nothing is launched on that rank
meanwhile, and all others wait for it in the next collective. torchtitan collects by a schedule for the same reason.
What is there at the first collection is set aside (`gc.freeze`): to look through the objects of torch and transformers
takes a third of a second, to look through those of some steps next to nothing.
"""

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 50


class GarbageSchedule:
    """Collects when it is told of a step that is due. Made by `scheduled_collection`."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.set_aside = gc.get_freeze_count() > 0  # by somebody else, who may have reasons

    def after(self, step: int) -> None:
        """Collect if `step` is due: a function of the step alone, so that all ranks do it together."""
        if step % self.every:
            return
        gc.collect()
        if not self.set_aside:
            gc.freeze()
            self.set_aside = True


@contextlib.contextmanager
def scheduled_collection(every: int = COLLECT_EVERY) -> Iterator[GarbageSchedule]:
    """Collect nothing during the block but what is asked for; afterwards as before, whatever happens in it.

    Args:
        every: steps between two collections.
    """
    was_on, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield GarbageSchedule(every)
    finally:
        if not frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def automatic_collection() -> Iterator[None]:
    """Leave it to Python during the block: for what is no step, such as an evaluation."""
    was_on = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_on:
            gc.disable()
