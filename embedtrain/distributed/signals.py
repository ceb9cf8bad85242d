"""Signals that ask a run to stop: noted while it trains, obeyed at once before and after."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntFlag
from types import FrameType

# What schedulers send before they take a machine away, and what a user's Ctrl-C sends.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 130
# A launcher forwards a signal that the scheduler may have sent to each of its processes as well.
ONCE = 3.0


class Notice(IntFlag):
    """What a rank has to say when ranks meet at the end of a step."""

    stop = 1  # a signal asked it to stop
    save_failed = 2  # a checkpoint that was being written beside training could not be written


def exit_code(asked: signal.Signals) -> int:
    """What a run that a signal stopped ends with: 75 asks a scheduler to start it again, 130 tells of Ctrl-C."""
    return EXIT_INTERRUPTED if asked is signal.SIGINT else EXIT_TRY_AGAIN


class StopSignals:
    """Listens to this process's signals.

    A thread acts on them, for a main thread that waits for another rank does not come round to it.

    Attributes:
        asked: the signal that came; None: none did.
        is_stopping: whether the run is ending because a rank was asked.
        tell: says on which signal the process ends at once, and gives the code to end with.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.is_stopping = False
        self.tell: Callable[[signal.Signals], int] = report_early_stop
        self._asked_at = 0.0
        self._deferred = False

    @property
    def notice(self) -> Notice:
        """What this rank has to say to the others."""
        return Notice(0) if self.asked is None else Notice.stop

    def listen(self) -> None:
        """Take the signals over, from the main thread; a process that is forked off has its own again."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for each in SIGNALS:
            signal.signal(each, _woken)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._listen, args=(ours, theirs), name="signals", daemon=True).start()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While the block runs a signal is noted, for the block to look after; a later second one ends the process.

        So it is after the block, too, if it has set `is_stopping`.
        """
        self._deferred = True
        yield
        if self.is_stopping:
            return
        self._deferred = False
        if self.asked is not None:
            self._end()

    def _listen(self, ours: socket.socket, _theirs: socket.socket) -> None:
        while True:
            for number in ours.recv(64):
                if number in SIGNALS:
                    self._take(signal.Signals(number))

    def _take(self, asked: signal.Signals) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = asked, now
        elif now - self._asked_at < ONCE:
            return
        elif self._deferred:
            print(f"a second signal: {asked.name} ends the process at once", file=sys.stderr, flush=True)
            os._exit(exit_code(asked))
        if not self._deferred:
            self._end()

    def _end(self) -> None:
        assert self.asked is not None
        code = self.tell(self.asked)
        sys.stdout.flush()
        os._exit(code)


def report_early_stop(asked: signal.Signals) -> int:
    """Say that a signal ended this process, before it knows the others: the first rank does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"stopped by {asked.name} at the start: the same command begins again", file=sys.stderr, flush=True)
    return exit_code(asked)


def _woken(_number: int, _frame: FrameType | None) -> None:
    """Nothing: a handler of Python's has to be there for the thread to be woken."""


def _forget() -> None:
    """In a process that was forked off: it must not write into its parent's socket, nor outlive a signal."""
    signal.set_wakeup_fd(-1)
    for each in SIGNALS:
        signal.signal(each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL)
