"""SIGTERM, SIGUSR1 and SIGINT: all ranks stop after the same step with a checkpoint, and the same command resumes."""

import json
import signal
import time

import pytest

from tests.faults.hooks import SignalInEvaluation, SignalWhen
from tests.faults.runs import finish, start, training_result


@pytest.mark.slow  # a single stop: test_torchrun.py
def test_repeated_stops_do_not_change_the_result(folder, undisturbed):
    """Signals to one rank or all, in evaluations, Ctrl-C."""
    out, marker = "stopped", folder / "stopped" / "stopped.json"
    moments = [
        ("SIGTERM", SignalWhen(1, "training", 2, signal.SIGTERM), 75, 1),
        ("SIGUSR1", SignalInEvaluation(0, 4, signal.SIGUSR1), 75, 0),
        ("SIGINT", SignalWhen(0, "training", 6, signal.SIGINT), 130, 0),
        ("SIGTERM", SignalInEvaluation(1, 12, signal.SIGTERM), 75, 1),
    ]
    for name, moment, code, rank in moments:
        run = start(folder, out, hook=moment)
        assert run.wait() == [code, code], run.text
        assert not run.errors
        assert not list((folder / out / "model").glob("*")) or moment.step < 12
        stopped = json.loads(marker.read_text())
        assert (stopped["signal"], stopped["rank"]) == (name, rank)
        assert moment.step <= stopped["step"] <= 12
        saved = folder / out / "checkpoints" / f"step-{stopped['step']:08d}" / "checkpoint.json"
        state = json.loads(saved.read_text())["state"]
        assert state["evaluation_due"] == isinstance(moment, SignalInEvaluation)
        message = f"stopped by {name} (rank {rank}) after step {stopped['step']}, saved in {out}/checkpoints/step-"
        assert run.text.count(message) == 1
    finish(folder, out)
    assert not marker.exists()
    assert training_result(folder / out) == undisturbed


def test_a_signal_before_training_ends_the_run_immediately(folder, undisturbed):
    """There is nothing to save; the rank without a signal ends as well."""
    run = start(folder, "early", hook=SignalWhen(1, "reading training data", 0, signal.SIGTERM))
    assert run.wait() == [75, 75], run.text
    assert run.text.count("stopped by SIGTERM (rank 1) while ") == 1
    assert not run.errors
    run = start(folder, "early", "evaluation.at_start=true", hook=SignalInEvaluation(0, 0, signal.SIGTERM))
    assert run.wait() == [75, 75], run.text
    assert "stopped by SIGTERM (rank 0) before the first step" in run.text
    assert not (folder / "early" / "checkpoints").exists()
    finish(folder, "early")
    assert training_result(folder / "early") == undisturbed


@pytest.mark.slow
def test_a_second_signal_ends_the_process_immediately(folder, undisturbed):
    """Except within three seconds: a launcher forwards signals that the scheduler has sent to every process."""
    run = start(folder, "twice").until(lambda run: run.last_step >= 2)
    run.send(signal.SIGSTOP, 1)  # rank 0 waits and cannot complete its step
    run.send(signal.SIGTERM, 0)
    time.sleep(0.5)
    run.send(signal.SIGTERM, 0)
    time.sleep(3.0)
    assert run.processes[0].is_alive()
    run.send(signal.SIGTERM, 0)
    run.processes[0].join(10)
    assert run.processes[0].exitcode == 75
    run.send(signal.SIGCONT, 1)
    assert run.wait() == [75, 1], run.text
    assert "second signal SIGTERM" in run.text
    finish(folder, "twice")
    assert training_result(folder / "twice") == undisturbed
