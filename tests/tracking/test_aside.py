"""A tracker beside training: one that fails or hangs costs a sentence, and never the training's time."""

import threading
import time

import pytest

from embedtrain.tracking import async_logger as aside
from embedtrain.tracking.async_logger import AsyncLogger


class Notebook:
    """Writes down what it is told; does what `on` says for a method's name."""

    def __init__(self, **on):
        self.on, self.seen = on, []
        self.told("start")

    def told(self, what, *values):
        action = self.on.get(what)
        if action is not None:
            action()
        self.seen.append((what, *values))

    def step(self, row):
        self.told("step", row["step"])

    def evaluation(self, step, results):
        self.told("evaluation", step)

    def exported(self, directory):
        self.told("exported")

    def close(self, failed):
        self.told("close", failed)


def failing():
    raise RuntimeError("no room\nleft")


@pytest.fixture
def release():
    """What hanging calls wait for, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def opened(made, start=5.0, finish=5.0, abandoned=None):
    said = []
    abandon = (lambda: None) if abandoned is None else (lambda: abandoned.append(True))
    return AsyncLogger("it", made, said.append, start=start, finish=finish, abandon=abandon), said


def test_everything_arrives_in_order():
    notebook = Notebook()
    tracker, said = opened(lambda: notebook)
    for step in range(100):
        tracker.step({"step": step})
    tracker.evaluation(100, {})
    tracker.close(False)
    assert notebook.seen == [
        ("start",),
        *(("step", step) for step in range(100)),
        ("evaluation", 100),
        ("close", False),
    ]
    assert said == []


@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_a_failure_is_said_once(where):
    notebook = None

    def made():
        nonlocal notebook
        notebook = Notebook(**{where: failing})
        return notebook

    tracker, said = opened(made)
    for step in range(5):
        tracker.step({"step": step})
        time.sleep(0.01)
    tracker.close(False)
    assert len(said) == 1
    assert said[0].endswith("training goes on without it (metrics.jsonl has everything): no room left")
    if where == "step":
        assert notebook.seen == [("start",), ("close", False)], "what came before it may still be sent"


def test_one_that_hangs_at_its_start_is_left_after_its_time(release):
    began = time.monotonic()
    abandoned = []
    tracker, said = opened(lambda: release.wait() and Notebook(), start=0.2, abandoned=abandoned)
    tracker.step({"step": 1})
    tracker.close(False)
    assert time.monotonic() - began < 2
    assert said == ["it did not start within 0 s, training goes on without it (metrics.jsonl has everything)"]
    assert abandoned == [True]


def test_one_that_hangs_at_a_step_is_left_and_nothing_waits_for_it(release, monkeypatch):
    monkeypatch.setattr(aside, "PATIENCE", 0.2)
    abandoned = []
    tracker, said = opened(lambda: Notebook(step=release.wait), abandoned=abandoned)
    began = time.monotonic()
    for step in range(1000):
        tracker.step({"step": step})
    assert time.monotonic() - began < 0.2, "no step waits"
    time.sleep(0.3)
    tracker.step({"step": 1000})
    tracker.close(False)
    assert time.monotonic() - began < 2
    assert len(said) == 1
    assert "has not answered" in said[0]
    assert abandoned == [True]


def test_what_waits_for_one_that_hangs_is_bounded(release, monkeypatch):
    monkeypatch.setattr(aside, "MOST_WAITING", 10)
    tracker, said = opened(lambda: Notebook(step=release.wait))
    for step in range(100):
        tracker.step({"step": step})
    assert len(said) == 1
    assert "10 calls unanswered" in said[0]


def test_one_that_hangs_at_its_end_is_left_after_its_time(release):
    abandoned = []
    tracker, said = opened(lambda: Notebook(close=release.wait), finish=0.2, abandoned=abandoned)
    began = time.monotonic()
    tracker.close(False)
    assert time.monotonic() - began < 2
    assert len(said) == 1
    assert "did not finish" in said[0]
    assert abandoned == [True]
