"""A tracker that works beside training, in a thread of its own: whatever fails or hangs there is said once."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

# Calls that may wait for a tracker; it is given up when there are more.
MOST_WAITING = 10_000
# Seconds that one call may take.
PATIENCE = 120.0


class MetricLogger(Protocol):
    """What a tracker does with a run's figures; the next one needs these four methods and a line in `recorders`.

    Any of them may raise. None is called by more than one thread.
    """

    def step(self, row: Mapping[str, Any]) -> None:
        """A logged step: `step`, and its figures."""

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """What was measured after `step`, as `{set: {metric: value}}`."""

    def exported(self, directory: Path) -> None:
        """The run's model lies in `directory`."""

    def close(self, failed: bool) -> None:
        """Nothing more comes; `failed`: an error ended the run."""


class AsyncLogger:
    """Runs one recorder. Training never waits for it but at its start and its end, and there not for long.

    Args:
        name: in sentences to the user.
        make: starts it.
        warn: says a sentence to the user; called by the thread that calls methods here, and once at most.
        start: seconds that starting may take.
        finish: seconds that closing may take.
        abandon: lets go of what must not keep this process from ending, when it hangs.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], MetricLogger],
        warn: Callable[[str], None],
        *,
        start: float,
        finish: float,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._warn, self._finish, self._abandon = name, warn, finish, abandon
        self.logger: MetricLogger | None = None
        self._failure: str | None = None
        self._has_warned = self._given_up = False
        self._since: float | None = None  # when the call now under way began
        self._calls: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._work, name=name, daemon=True).start()

        def begin() -> None:
            self.logger = make()

        self._calls.put(("could not be started", begin))
        if not self._wait(start):
            self._give_up(f"did not start within {start:.0f} s")
        self._report_failure()

    def step(self, row: Mapping[str, Any]) -> None:
        """See Recorder."""
        self._call(lambda logger: logger.step(row))

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """See Recorder."""
        self._call(lambda logger: logger.evaluation(step, results))

    def exported(self, directory: Path) -> None:
        """See Recorder."""
        self._call(lambda logger: logger.exported(directory))

    def close(self, failed: bool) -> None:
        """See Recorder; also after a failure, for what came before it may still be sent."""
        logger = self.logger
        if self._given_up or logger is None:
            return
        self._report_failure()
        self._failure = None
        with contextlib.suppress(queue.Full):  # it hangs, and is found to
            self._calls.put_nowait(("could not be finished", lambda: logger.close(failed)))
        if not self._wait(self._finish):
            self._give_up(f"did not finish within {self._finish:.0f} s")
        elif self._failure is not None:
            self._abandon()
        self._report_failure()
        self._given_up = True

    def _call(self, action: Callable[[MetricLogger], None]) -> None:
        self._report_failure()
        logger = self.logger
        if logger is None or self._has_warned or self._given_up:
            return
        since = self._since
        if since is not None and time.monotonic() - since > PATIENCE:
            self._give_up(f"has not answered for {PATIENCE:.0f} s")
            return
        try:
            self._calls.put_nowait(("failed", lambda: action(logger)))
        except queue.Full:
            self._give_up(f"has left {MOST_WAITING} calls unanswered")

    def _wait(self, seconds: float) -> bool:
        """Whether all calls are done in time."""
        done = threading.Event()
        try:
            self._calls.put_nowait(("", done.set))
        except queue.Full:
            return False
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            what, action = self._calls.get()
            if what == "failed" and (self._failure is not None or self._given_up):
                continue
            self._since = time.monotonic()
            try:
                action()
            except (Exception, SystemExit) as error:  # wandb has ended processes in the past
                reason = " ".join(str(error).split()) or type(error).__name__
                self._failure = f"{what}: {reason}"
            self._since = None

    def _report_failure(self) -> None:
        """Say what went wrong meanwhile."""
        if self._failure is not None:
            self._warn_once(self._failure)

    def _give_up(self, what: str) -> None:
        self._given_up = True
        self._warn_once(what)
        self._abandon()

    def _warn_once(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        said, _, why = what.partition(": ")
        reason = f": {why}" if why else ""
        self._warn(f"{self._name} {said}, training goes on without it (metrics.jsonl has everything){reason}")
