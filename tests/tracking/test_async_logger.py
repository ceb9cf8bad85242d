"""A metric logger that fails or hangs costs one warning, and never the time of training."""

import threading
import time

import pytest

from embedtrain.tracking import loggers
from embedtrain.tracking.loggers import AsyncLogger


class RecordingLogger:
    """Records its calls; calls `on[method]` first."""

    def __init__(self, **on):
        self.on, self.calls = on, []
        self.record("start")

    def record(self, method, *values):
        action = self.on.get(method)
        if action is not None:
            action()
        self.calls.append((method, *values))

    def step(self, row):
        self.record("step", row["step"])

    def evaluation(self, step, results):
        self.record("evaluation", step)

    def exported(self, directory):
        self.record("exported")

    def close(self, failed):
        self.record("close", failed)


def failing():
    raise RuntimeError("no room\nleft")


@pytest.fixture
def release():
    """Ends hanging calls after the test, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()


def opened(create, start=60.0, finish=60.0, abandoned=None):
    warnings = []
    abandon = (lambda: None) if abandoned is None else (lambda: abandoned.append(True))
    return AsyncLogger(
        "it", create, warnings.append, start_timeout=start, finish_timeout=finish, abandon=abandon
    ), warnings


def test_calls_arrive_in_order():
    recording = RecordingLogger()
    logger, warnings = opened(lambda: recording)
    for step in range(100):
        logger.step({"step": step})
    logger.evaluation(100, {})
    logger.close(False)
    assert recording.calls == [
        ("start",),
        *(("step", step) for step in range(100)),
        ("evaluation", 100),
        ("close", False),
    ]
    assert warnings == []


@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_a_failure_is_reported_once(where):
    recording = None

    def create():
        nonlocal recording
        recording = RecordingLogger(**{where: failing})
        return recording

    logger, warnings = opened(create)
    for step in range(5):
        logger.step({"step": step})
        time.sleep(0.01)
    logger.close(False)
    assert len(warnings) == 1
    assert warnings[0].endswith("training continues without it (metrics.jsonl has all metrics): no room left")
    if where == "step":
        assert recording.calls == [("start",), ("close", False)], "it may still send earlier metrics"


def test_a_logger_that_hangs_at_its_start_is_abandoned(release):
    began = time.monotonic()
    abandoned = []
    logger, warnings = opened(lambda: release.wait() and RecordingLogger(), start=0.2, abandoned=abandoned)
    logger.step({"step": 1})
    logger.close(False)
    assert time.monotonic() - began < 30
    assert warnings == ["it did not start within 0 s, training continues without it (metrics.jsonl has all metrics)"]
    assert abandoned == [True]


def test_no_step_waits_for_a_logger_that_hangs(release, monkeypatch):
    hangs, abandoned = threading.Event(), []

    def hang():
        hangs.set()
        release.wait()

    logger, warnings = opened(lambda: RecordingLogger(step=hang), abandoned=abandoned)
    for step in range(1000):
        logger.step({"step": step})  # a step that waited would do so for ever
    assert hangs.wait(60)
    assert warnings == []
    monkeypatch.setattr(loggers, "CALL_TIMEOUT", 0.0)
    logger.step({"step": 1000})
    logger.close(False)
    assert len(warnings) == 1
    assert "has not answered" in warnings[0]
    assert abandoned == [True]


def test_the_queue_of_a_logger_that_hangs_is_bounded(release, monkeypatch):
    monkeypatch.setattr(loggers, "MAX_QUEUED_CALLS", 10)
    logger, warnings = opened(lambda: RecordingLogger(step=release.wait))
    for step in range(100):
        logger.step({"step": step})
    assert len(warnings) == 1
    assert "10 calls unanswered" in warnings[0]


def test_a_logger_that_hangs_at_its_end_is_abandoned(release):
    abandoned = []
    logger, warnings = opened(lambda: RecordingLogger(close=release.wait), finish=0.2, abandoned=abandoned)
    began = time.monotonic()
    logger.close(False)
    assert time.monotonic() - began < 30
    assert len(warnings) == 1
    assert "did not finish" in warnings[0]
    assert abandoned == [True]
