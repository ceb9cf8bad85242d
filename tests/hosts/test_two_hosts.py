"""Two hosts train like one; a short network failure changes nothing; a permanent one ends both with messages."""

import re
import time

import psutil
import pytest

from tests.faults.runs import training_result
from tests.hosts.launched import of_one_host

pytestmark = pytest.mark.hosts
# A short time-out within steps; start-up may take long on a busy machine.
TIMEOUTS = ["parallel.timeout=200", "parallel.step_timeout=10"]
RESUME_HINT = r"; .*{out}/checkpoints/step-\d+: .*"


def test_two_hosts_train_like_one(launched, folder):
    """Two hosts of two ranks each and one host of four ranks give bit-identical results."""
    options = ["train.steps=12", "evaluation.every=4"]
    launched.start("plain", *options, ranks=2)
    assert launched.wait(300) == [0, 0], launched.texts
    assert training_result(folder / "plain") == of_one_host(folder, "one-host", *options, ranks=4)


def test_a_short_network_failure(launched, folder):
    """The run continues when the network is back."""
    launched.start("out", "train.steps=150", "parallel.step_timeout=60")
    launched.until_step(22)
    launched.network.cut(1)
    at = launched.last_step
    time.sleep(8.0)
    assert launched.last_step <= at + 1, "the network was not down"
    launched.network.heal(1)
    assert launched.wait(300) == [0, 0], launched.texts
    assert not launched.errors(0) + launched.errors(1)
    assert training_result(folder / "out") == of_one_host(folder, "not-out", "train.steps=150")


@pytest.mark.parametrize(
    ("moment", "step", "options", "activity"),
    [
        ("step", 23, ["evaluation.every=0", "checkpoint.every=20"], r"(training|reading the batches), step \d+"),
        (
            "evaluation",
            3,
            ["evaluation.every=3", "evaluation.sets=[large]", "checkpoint.every=1"],
            r"(?!training|reading)[\w ]+, step 3",
        ),
    ],
)
def test_a_permanent_network_failure(launched, moment, step, options, activity):
    """Ranks and torchrun end on both hosts, with messages that name lost ranks, host and activity.

    In an evaluation ranks may wait long for each other, but a rank without heartbeats is lost nevertheless.
    """
    out = f"cut-{moment}"
    launched.start(out, "train.steps=100000", *options, *TIMEOUTS, ranks=2)
    launched.until_step(step)
    launched.network.cut(1)
    assert all(launched.wait(120)), launched.texts
    here, there = launched.network.name(0), launched.network.name(1)
    hint = RESUME_HINT.format(out=out)
    (head,), (other,) = launched.errors(0), launched.errors(1)
    ended = rf"error: ranks 2, 3 on {there} ended or hang, or the network is down \(no heartbeat for \d+ s\)"
    assert re.fullmatch(f"{ended} while {activity}{hint}", head), launched.texts
    # The step is logged by host 0: on a slow machine host 1 may not have begun to evaluate when the network fails.
    lost = rf"error: rank [23] on {there} lost contact with {here} while [\w ]+, step \d+: that host or the network "
    assert re.match(lost, other), launched.texts
    assert re.search(hint, other)


def test_a_restart_after_a_network_failure(launched, folder):
    """With --max-restarts both hosts restart when the network is back, and resume from the checkpoint."""
    options = ["train.steps=120", "checkpoint.every=20", "evaluation.every=0"]
    launched.start("healed", *options, *TIMEOUTS, restarts=3)
    launched.until_step(23)
    launched.network.cut(1)
    launched.until(lambda: launched.errors(0), 120)
    launched.network.heal(1)
    assert launched.wait(400) == [0, 0], launched.texts
    assert "resuming from healed/checkpoints/step-" in launched.text(0)
    assert training_result(folder / "healed") == of_one_host(folder, "not-cut", *options)


def test_a_killed_rank_on_the_other_host(launched, folder):
    """torchrun counts restarts separately on each host: the next ranks must not read the earlier failure."""
    options = ["train.steps=60", "checkpoint.every=20", "evaluation.every=0"]
    launched.start("killed", *options, restarts=1)
    launched.until_step(23)
    psutil.Process(launched.agents[1].pid).children()[0].kill()
    assert launched.wait(300) == [0, 0], launched.texts
    assert launched.text(0).count("resuming from ") == 1
    assert launched.text(0).count("error: rank 1 ") <= 1, "reported again by the next ranks"
    assert training_result(folder / "killed") == of_one_host(folder, "not-killed", *options)
