"""Two hosts train as one does; a cable that is out for seconds changes nothing; one that is cut ends both, in words."""

import re
import time

import psutil
import pytest

from tests.faults.runs import training_result
from tests.hosts.launched import of_one_host

pytestmark = pytest.mark.hosts
# A step's patience is that of a fast network; what comes before the first step takes its time on a busy machine.
PATIENCE = ["parallel.timeout=200", "parallel.step_timeout=10"]
GOES_ON = r"; the newest complete checkpoint is {out}/checkpoints/step-\d+: the same command resumes from it"


def test_plain(launched, folder):
    """Two hosts of two ranks each learn what four ranks of one host learn, bit for bit."""
    options = ["train.steps=12", "evaluation.every=4"]
    launched.start("plain", *options, ranks=2)
    assert launched.wait(300) == [0, 0], launched.texts
    assert training_result(folder / "plain") == of_one_host(folder, "one-host", *options, ranks=4)


def test_out_for_seconds(launched, folder):
    """The network goes on where it stopped, and so does the run."""
    launched.start("out", "train.steps=150", "parallel.step_timeout=60")
    launched.until_step(22)
    launched.network.cut(1)
    at = launched.last_step
    time.sleep(8.0)
    assert launched.last_step <= at + 1, "the cable was not out"
    launched.network.heal(1)
    assert launched.wait(300) == [0, 0], launched.texts
    assert not launched.errors(0) + launched.errors(1)
    assert training_result(folder / "out") == of_one_host(folder, "not-out", "train.steps=150")


@pytest.mark.parametrize(
    ("moment", "step", "options", "doing"),
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
def test_cut_for_good(launched, moment, step, options, doing):
    """Both sides end, ranks and torchrun, and each says who was lost, where and doing what.

    In an evaluation ranks may wait for each other for long; one that gives no sign of life is gone nonetheless.
    """
    out = f"cut-{moment}"
    launched.start(out, "train.steps=100000", *options, *PATIENCE, ranks=2)
    launched.until_step(step)
    launched.network.cut(1)
    assert all(launched.wait(120)), launched.texts
    here, there = launched.network.name(0), launched.network.name(1)
    goes_on = GOES_ON.format(out=out)
    (head,), (other,) = launched.errors(0), launched.errors(1)
    ended = rf"error: ranks 2, 3 on {there} ended or hangs, or the network is out \(no sign of life for \d+ s\)"
    assert re.fullmatch(f"{ended} while {doing}{goes_on}", head), launched.texts
    lost = rf"error: rank [23] on {there} lost contact with {here} while {doing}: the network between them is out, or "
    assert re.match(lost, other), launched.texts
    assert re.search(goes_on, other)


def test_healed(launched, folder):
    """With --max-restarts both hosts begin again once the cable is back, and go on from the checkpoint to the end."""
    options = ["train.steps=120", "checkpoint.every=20", "evaluation.every=0"]
    launched.start("healed", *options, *PATIENCE, restarts=3)
    launched.until_step(23)
    launched.network.cut(1)
    launched.until(lambda: launched.errors(0), 120)
    launched.network.heal(1)
    assert launched.wait(400) == [0, 0], launched.texts
    assert "resuming from healed/checkpoints/step-" in launched.text(0)
    assert training_result(folder / "healed") == of_one_host(folder, "not-cut", *options)


def test_a_rank_of_the_other_host_is_killed(launched, folder):
    """torchrun counts restarts on each host by itself: the ranks that come next are not told of those before them."""
    options = ["train.steps=60", "checkpoint.every=20", "evaluation.every=0"]
    launched.start("killed", *options, restarts=1)
    launched.until_step(23)
    psutil.Process(launched.agents[1].pid).children()[0].kill()
    assert launched.wait(300) == [0, 0], launched.texts
    assert launched.text(0).count("resuming from ") == 1
    assert launched.text(0).count("error: rank 1 ") <= 1, "said again by the ranks that came next"
    assert training_result(folder / "killed") == of_one_host(folder, "not-killed", *options)
