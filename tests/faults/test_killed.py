"""A rank is killed during any activity: the others end with one message, and the same command resumes bit for bit."""

import random
import signal
import socket

import pytest

from tests.faults.hooks import SignalWhen
from tests.faults.runs import finish, start, training_result


@pytest.mark.parametrize(
    ("rank", "activity", "step"),
    [
        pytest.param(0, "training", 5, marks=pytest.mark.slow),  # covered by test_chaos.py
        (1, "evaluating dev", 8),  # the checkpoint of step 3 is complete, also on a busy machine
        pytest.param(1, "writing", 6, marks=pytest.mark.slow),
        pytest.param(0, "exporting the model", 12, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_does_not_change_the_result(folder, undisturbed, rank, activity, step):
    out = f"killed-{activity.split()[0]}"
    moment = f"writing {folder / out}" if activity == "writing" else activity
    delay = random.Random(f"{rank} {activity}").uniform(0, 0.02)
    run = start(folder, out, hook=SignalWhen(rank, moment, step, delay=delay))
    codes = run.wait()
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 1, run.text
    assert len(run.errors) == 1, run.text
    assert f"error: rank {rank} on {socket.gethostname()} ended while " in run.text
    assert "the same command resumes from it" in run.errors[0]
    again = finish(folder, out)
    assert f"resuming from {out}/checkpoints/step-" in again.text or "is the end of this run" in again.text
    assert training_result(folder / out) == undisturbed


@pytest.mark.slow
def test_rank_0_is_killed_and_the_store_with_it(folder):
    """Without an agent rank 0 hosts the store: the other two of three ranks lose it."""
    run = start(folder, "no-agent", size=3, hook=SignalWhen(0, "training", 4), agent=False)
    assert run.wait()[1:] == [1, 1]
    assert len(run.errors) == 1, run.text
    assert f"error: rank 0 on {socket.gethostname()} ended while training, step " in run.text
    finish(folder, "no-agent")  # on two ranks
    assert (folder / "no-agent" / "model" / "model.safetensors").is_file()
