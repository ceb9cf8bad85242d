"""Signals that ask a run to stop: deferred to the end of a step while it trains, immediate before and after."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import IntFlag
from types import FrameType
from typing import Any


def start_monitor(name: str, watch: Callable[[], None]) -> threading.Thread:
    """Start `watch` in a daemon thread, which ends the process with exit code 1 if `watch` raises.

    A rank without its watchdog would be declared lost by the others, with nothing in its own output; one that no longer
    listens to signals could not be stopped.
    """

    def run() -> None:
        try:
            watch()
        except BaseException:
            traceback.print_exc()
            rank = os.environ.get("RANK", "0")
            print(f"error: rank {rank} ends because its thread {name!r} failed, see above", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


# Sent by schedulers before they reclaim a machine, by Ctrl-C, and when a terminal or an SSH connection is closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 130
# Seconds within which a repeated signal is ignored: a launcher forwards a signal that the scheduler may also have sent
# to each of its processes.
_REPEAT_WINDOW = 3.0


class Notice(IntFlag):
    """What a rank announces to the others at the end of a step."""

    stop = 1  # a signal asked it to stop
    save_failed = 2  # an asynchronous checkpoint could not be written
    save_due = 4  # so much time has passed since the last checkpoint, on rank 0
    not_compiled = 8  # a block could not be compiled


def exit_code(received: signal.Signals) -> int:
    """Exit code of a run that a signal stopped: 75 asks a scheduler to start it again, 130 means Ctrl-C."""
    return EXIT_INTERRUPTED if received is signal.SIGINT else EXIT_TRY_AGAIN


class StopSignals:
    """Listens to the signals of this process.

    A thread handles them, because a main thread that waits in a collective does not run Python code.

    Attributes:
        received: the signal that was received; None if there was none.
        agreed: whether all ranks know that one of them received a signal, and stop.
        is_stopping: whether the run is ending because of it; further signals are ignored.
        report: prints which signal ends the process immediately, and returns the exit code.
        awaited: what a deferred signal waits for.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.agreed = False
        self.is_stopping = False
        self.report: Callable[[signal.Signals], int] = report_early_stop
        self.awaited = "the current step, with a checkpoint"
        self._received_at = 0.0
        self._deferred = False
        self._ends_process = True

    @property
    def notice(self) -> Notice:
        """What this rank announces to the others."""
        return Notice(0) if self.received is None else Notice.stop

    def listen(self) -> None:
        """Install the handlers, from the main thread. Forked processes get the default handlers back."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, _ignore)
        os.register_at_fork(after_in_child=_restore_defaults)
        start_monitor("signals", lambda: self._listen(receiver, sender))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen during the block in a process that continues after it, such as a notebook; restore the handlers.

        Python's handlers of the main thread record a signal while signals are deferred. At any other time, and when a
        later signal repeats it, the previous handler acts: Ctrl-C raises KeyboardInterrupt. Elsewhere than in the main
        thread, which alone may set handlers, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

        def handle(number: int, frame: FrameType | None) -> None:
            received, now = signal.Signals(number), time.monotonic()
            if self._deferred and self.received is None:
                self.received, self._received_at = received, now
                _acknowledge(received, self.awaited, "to interrupt it at once")
            elif not self._deferred or now - self._received_at >= _REPEAT_WINDOW:
                _act(previous[received], number, frame)

        self._ends_process = False
        for number in previous:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.received is not None and not self.agreed:  # it came after the last step
            _act(previous[self.received], self.received, None)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Record a signal during the block instead of ending the process; a second, later signal ends it.

        If the block has set `is_stopping`, signals stay deferred after it.
        """
        self._deferred = True
        yield
        if self.is_stopping:
            return
        self._deferred = False
        if self.received is not None and self._ends_process:
            self._exit()

    def _listen(self, receiver: socket.socket, _sender: socket.socket) -> None:
        while True:
            for number in receiver.recv(64):
                if number in SIGNALS:
                    self._handle(signal.Signals(number))

    def _handle(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = received, now
            if self._deferred:
                _acknowledge(received, self.awaited, "to end the process at once")
        elif now - self._received_at < _REPEAT_WINDOW:
            return
        elif self._deferred:
            print(f"second signal {received.name}: ending the process immediately", file=sys.stderr, flush=True)
            os._exit(exit_code(received))
        if not self._deferred:
            self._exit()

    def _exit(self) -> None:
        assert self.received is not None
        code = self.report(self.received)
        sys.stdout.flush()
        os._exit(code)


def report_early_stop(received: signal.Signals) -> int:
    """Report that a signal ended this process before it joined the others. Rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        print(f"stopped by {received.name} during start-up: run the same command again", file=sys.stderr, flush=True)
    return exit_code(received)


def _acknowledge(received: signal.Signals, awaited: str, effect: str) -> None:
    """Report at once that a signal arrived: the current step, evaluation or export may take long. Rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        again = f"send it again after {_REPEAT_WINDOW:.0f} s {effect}"
        text = f"{received.name}: stopping after {awaited}; {again}"
        with contextlib.suppress(RuntimeError):  # it interrupted a write to the same stream
            print(text, file=sys.stderr, flush=True)


def _act(handler: Any, number: int, frame: FrameType | None) -> None:
    """Do what the process did on this signal before."""
    if callable(handler):
        handler(number, frame)
    elif handler is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a Python handler the thread would not be woken."""


def _restore_defaults() -> None:
    """In a forked process: do not write to the parent's socket, and do not survive signals."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
