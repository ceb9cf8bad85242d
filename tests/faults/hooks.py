"""Faults injected into a rank by a thread or a replaced function: real signals, real exceptions."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.distributed.watchdog import watchdog
from embedtrain.distributed.watchdog.watchdog import current_activity


def _before_step(step: int | None, action: Callable[[], object]) -> None:
    """Call `action` in this process before the optimizer step after `step` completed ones; None: before every step."""
    import embedtrain.training.loop as loop

    real = loop.train_step

    def train_step(context, *batches, **options):
        if step is None or context.state.step == step:
            action()
        return real(context, *batches, **options)

    loop.train_step = train_step


class _Unmissed(list[Any]):
    """The activity of a process, which waits in the one that another thread looks for: some last less than a poll."""

    def __init__(self, current: list[Any], is_due: Callable[[], bool]) -> None:
        super().__init__(current)
        self._is_due = is_due

    def __setitem__(self, index: Any, activity: Any) -> None:
        super().__setitem__(index, activity)
        if self._is_due():
            time.sleep(0.05)


@dataclass(frozen=True)
class SignalWhen:
    """Send this process a signal during an activity.

    Args:
        rank: the rank that fails.
        activity: prefix of the activity; or "writing DIR", while a checkpoint is being written in DIR.
        step: earliest optimizer step.
        which: the signal.
        delay: seconds after the activity was observed.
    """

    rank: int
    activity: str
    step: int = 0
    which: signal.Signals = signal.SIGKILL
    delay: float = 0.0

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            watchdog._current = _Unmissed(watchdog._current, self._is_due)
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while not self._is_due():
            time.sleep(0.0005)
        time.sleep(self.delay)
        os.kill(os.getpid(), self.which)

    def _is_due(self) -> bool:
        now = current_activity()
        if (now.step or 0) < self.step:
            return False
        if self.activity.startswith("writing "):
            return any(Path(self.activity.removeprefix("writing "), "checkpoints").glob("step-*.tmp"))
        return now.name.startswith(self.activity)


def verify_cache_in_thread(rank: int) -> None:
    """Verify cached files of any size in a thread, as those of large caches."""
    from embedtrain.data.cache import cache

    cache.VERIFIED_BYTES = 0


@dataclass(frozen=True)
class InStep:
    """Fail or hang in an optimizer step.

    Args:
        rank: the rank that fails.
        step: number of completed steps.
        seconds: duration of the hang; 0 raises an error.
    """

    rank: int
    step: int
    seconds: float = 0.0

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return

        def fail():
            if not self.seconds:
                raise ValueError("a cosmic ray")
            time.sleep(self.seconds)

        _before_step(self.step, fail)


@dataclass(frozen=True)
class SlowSave:
    """A rank's part of every checkpoint takes long, and another fault follows.

    Args:
        rank: the slow rank.
        seconds: that writing its shards takes.
        then: the other fault.
    """

    rank: int
    seconds: float
    then: Callable[[int], None]

    def __call__(self, rank: int) -> None:
        self.then(rank)
        if rank != self.rank:
            return
        import embedtrain.checkpoint.checkpointer as checkpointer

        real = checkpointer.write_local_shards

        def write_local_shards(*arguments):
            time.sleep(self.seconds)
            return real(*arguments)

        checkpointer.write_local_shards = write_local_shards


@dataclass(frozen=True)
class DiskFails:
    """A rank's disk fails while checkpoints are verified.

    Args:
        rank: the rank that cannot read them.
    """

    rank: int

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        import embedtrain.checkpoint.tensor_files as tensor_files

        def read_blocks(path, offset, size):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        tensor_files.read_blocks = read_blocks


@dataclass(frozen=True)
class SlowEnd:
    """What rank 0 does after the training takes long.

    Args:
        seconds: of the check of the export, of its upload, and of closing the trackers.
    """

    seconds: float

    def __call__(self, rank: int) -> None:
        from huggingface_hub import constants

        import embedtrain.formats.export as export
        import embedtrain.training.final_export as final_export
        from embedtrain.tracking.tracker import Tracker

        constants.HF_HUB_OFFLINE = False
        os.environ["HF_TOKEN"] = "hf_of_a_test"
        final_export.upload_model = lambda *_, **__: time.sleep(self.seconds)
        real, check = Tracker.close, export.check_transformers

        def check_transformers(*arguments):
            time.sleep(self.seconds)
            return check(*arguments)

        export.check_transformers = check_transformers

        def close(tracker, **options):
            if rank == 0:
                time.sleep(self.seconds)
            real(tracker, **options)

        Tracker.close = close


@dataclass(frozen=True)
class MemoryExhausted:
    """An allocation fails in an optimizer step: more bytes than any machine has.

    Args:
        rank: the rank that fails.
        step: number of completed steps.
    """

    rank: int
    step: int

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        import torch

        _before_step(self.step, lambda: torch.empty(2**60))


@dataclass(frozen=True)
class NcclError:
    """NCCL reports an error from an optimizer step on, while another rank is suspended and the main thread waits.

    Args:
        rank: the rank to which it is reported; the others suspend themselves.
        step: the optimizer step in which this happens.
    """

    rank: int
    step: int

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            SignalWhen(rank, "training", self.step, signal.SIGSTOP)(rank)
            return
        import embedtrain.distributed.world as world

        def nccl_error() -> str:
            return "NCCL: REMOTE_ERROR" if (current_activity().step or 0) >= self.step else ""

        world.nccl_error = nccl_error


@dataclass(frozen=True)
class PrintDeterminism:
    """Print whether deterministic algorithms are in use in each optimizer step."""

    def __call__(self, rank: int) -> None:
        import torch

        def report() -> None:
            print(f"deterministic={torch.are_deterministic_algorithms_enabled()}", flush=True)

        _before_step(None, report)


@dataclass(frozen=True)
class SignalInEvaluation:
    """Send this process a signal during the first set of an evaluation, so that another set remains.

    Args:
        rank: the rank that fails.
        step: the evaluated optimizer step.
        which: the signal.
    """

    rank: int
    step: int
    which: signal.Signals

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        from embedtrain.evaluation.evaluator import Evaluator

        real = Evaluator._measure

        def measure(evaluator, context, *options):
            is_first = context.loaded.data.name == evaluator.sets[0].data.name
            if (current_activity().step or 0) >= self.step and is_first:
                os.kill(os.getpid(), self.which)
                time.sleep(0.5)  # for the listening thread, on a busy machine
            return real(evaluator, context, *options)

        Evaluator._measure = measure
