"""What befalls a rank, from a thread or a replaced function of its own process: real signals, real exceptions."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from embedtrain.distributed.watchdog.activity import current_activity


@dataclass(frozen=True)
class SignalWhen:
    """Send this process a signal while it does something.

    Args:
        rank: the one it happens to.
        doing: how the note of what it does begins; or "writing DIR", while a checkpoint is being written there.
        step: at this optimiser step or a later one.
        which: the signal.
        delay: seconds after it was seen.
    """

    rank: int
    doing: str
    step: int = 0
    which: signal.Signals = signal.SIGKILL
    delay: float = 0.0

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while not self._seen():
            time.sleep(0.0005)
        time.sleep(self.delay)
        os.kill(os.getpid(), self.which)

    def _seen(self) -> bool:
        doing = current_activity()
        if (doing.step or 0) < self.step:
            return False
        if self.doing.startswith("writing "):
            return any(Path(self.doing.removeprefix("writing "), "checkpoints").glob("step-*.tmp"))
        return doing.what.startswith(self.doing)


@dataclass(frozen=True)
class InStep:
    """Fail or hang in an optimiser step.

    Args:
        rank: the one it happens to.
        step: the number of steps it has done.
        seconds: how long it hangs; 0 raises.
    """

    rank: int
    step: int
    seconds: float = 0.0

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        import embedtrain.training.loop as loop

        real = loop.train_step

        def train_step(run, *batches, **options):
            if run.state.step == self.step:
                if not self.seconds:
                    raise ValueError("a cosmic ray")
                time.sleep(self.seconds)
            return real(run, *batches, **options)

        loop.train_step = train_step


@dataclass(frozen=True)
class SignalInEvaluation:
    """Send this process a signal while the first set of an evaluation is measured, so that another is left.

    Args:
        rank: the one it happens to.
        step: the optimiser step that is evaluated.
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

        def measure(evaluator, loaded, save_runs):
            if (current_activity().step or 0) >= self.step and loaded is evaluator.sets[0]:
                os.kill(os.getpid(), self.which)
                time.sleep(0.5)  # for the thread that listens, on a machine that has much to do
            return real(evaluator, loaded, save_runs)

        Evaluator._measure = measure
