"""When Python collects garbage during training."""

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 50


class GarbageSchedule:
    """Collects garbage after some steps; see `scheduled_collection`."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._is_frozen = gc.get_freeze_count() > 0  # by the caller, who may have reasons

    def collect_after(self, step: int) -> None:
        """Collect if `step` is due. This depends on the step only, so all ranks collect at the same time."""
        if step % self.every:
            return
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True


@contextlib.contextmanager
def scheduled_collection(every: int = COLLECT_EVERY) -> Iterator[GarbageSchedule]:
    """Disable automatic collection during the block; restore it afterwards."""
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield GarbageSchedule(every)
    finally:
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def automatic_collection() -> Iterator[None]:
    """Enable automatic collection during the block, which is not a step: an evaluation, for example."""
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()
