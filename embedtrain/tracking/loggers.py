"""Metric loggers run in threads of their own: a run neither waits for them nor fails with them."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

# Calls that may be queued; a logger with more is given up.
MAX_QUEUED_CALLS = 10_000
# Seconds that one call may take.
CALL_TIMEOUT = 120.0


class MetricLogger(Protocol):
    """A destination for metrics. To add one, write a class with these methods and a line in `clients.CLIENTS`.

    Every method may raise. Only one thread calls them.

    Attributes:
        id: what continues the same run there, for checkpoints; None if nothing has to be known.
    """

    id: str | None

    def step(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a training step; `row` contains `step`."""

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the results of the evaluation after `step`, as `{set: {metric: value}}`."""

    def exported(self, directory: Path) -> None:
        """The model of the run has been exported to `directory`."""

    def close(self, failed: bool) -> None:
        """Finish logging; `failed`: an error ended the run."""


class AsyncLogger:
    """Runs one metric logger in a thread. Training waits for it only at the start and at the end, with a timeout.

    Args:
        name: of the logger, in warnings.
        create: starts the logger.
        warn: prints a warning; called at most once, in the thread that calls the methods of this class.
        start_timeout: seconds that starting may take.
        finish_timeout: seconds that closing may take.
        abandon: releases whatever would keep this process alive when the logger hangs.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], MetricLogger],
        warn: Callable[[str], None],
        *,
        start_timeout: float,
        finish_timeout: float,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._warn, self._finish_timeout, self._abandon = name, warn, finish_timeout, abandon
        self.logger: MetricLogger | None = None
        self._failure: str | None = None
        self._has_warned = self._given_up = False
        self._call_started: float | None = None
        self._calls: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue(MAX_QUEUED_CALLS)
        threading.Thread(target=self._work, name=name, daemon=True).start()

        def start() -> None:
            self.logger = create()

        self._calls.put(("could not be started", start))
        if not self._wait(start_timeout):
            self._give_up(f"did not start within {start_timeout:.0f} s")
        self._report_failure()

    def step(self, row: Mapping[str, Any]) -> None:
        """Queue the metrics of a training step."""
        self._call(lambda logger: logger.step(row))

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Queue the results of an evaluation."""
        self._call(lambda logger: logger.evaluation(step, results))

    def exported(self, directory: Path) -> None:
        """Queue the notice that the model has been exported."""
        self._call(lambda logger: logger.exported(directory))

    def close(self, failed: bool) -> None:
        """Close the logger, also after a failure, because it may still send earlier metrics."""
        logger = self.logger
        if self._given_up or logger is None:
            return
        self._report_failure()
        self._failure = None
        with contextlib.suppress(queue.Full):  # it hangs, which _wait detects
            self._calls.put_nowait(("could not be finished", lambda: logger.close(failed)))
        if not self._wait(self._finish_timeout):
            self._give_up(f"did not finish within {self._finish_timeout:.0f} s")
        elif self._failure is not None:
            self._abandon()
        self._report_failure()
        self._given_up = True

    def _call(self, action: Callable[[MetricLogger], None]) -> None:
        self._report_failure()
        logger = self.logger
        if logger is None or self._has_warned or self._given_up:
            return
        call_started = self._call_started
        if call_started is not None and time.monotonic() - call_started > CALL_TIMEOUT:
            self._give_up(f"has not answered for {CALL_TIMEOUT:.0f} s")
            return
        try:
            self._calls.put_nowait(("failed", lambda: action(logger)))
        except queue.Full:
            self._give_up(f"has left {MAX_QUEUED_CALLS} calls unanswered")

    def _wait(self, seconds: float) -> bool:
        """Whether all queued calls finish in time."""
        done = threading.Event()
        try:
            self._calls.put_nowait(("", done.set))
        except queue.Full:
            return False
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            failure, action = self._calls.get()
            if failure == "failed" and (self._failure is not None or self._given_up):
                continue
            self._call_started = time.monotonic()
            try:
                action()
            except (Exception, SystemExit) as error:  # wandb has ended processes in the past
                reason = " ".join(str(error).split()) or type(error).__name__
                self._failure = f"{failure}: {reason}"
            self._call_started = None

    def _report_failure(self) -> None:
        if self._failure is not None:
            self._warn_once(self._failure)

    def _give_up(self, failure: str) -> None:
        self._given_up = True
        self._warn_once(failure)
        self._abandon()

    def _warn_once(self, failure: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        failure, _, reason = failure.partition(": ")
        self._warn(
            f"{self._name} {failure}, training continues without it (metrics.jsonl has all metrics)"
            f"{f': {reason}' if reason else ''}"
        )
