"""Two hosts train as one does; a cable that is out for seconds changes nothing; one that is cut ends both, in words."""

import re
import time

import pytest

from tests.faults.runs import learnt
from tests.hosts.launched import of_one_host

pytestmark = pytest.mark.hosts


def test_plain(launched, folder):
    """Two hosts of two ranks each learn what four ranks of one host learn, bit for bit."""
    launched.start("plain", "train.steps=12", "evaluation.every=4", ranks=2)
    assert launched.wait(240) == [0, 0], launched.texts
    assert learnt(folder / "plain") == of_one_host(
        folder, "one-host", "train.steps=12", "evaluation.every=4", ranks=4
    )


def test_out_for_seconds(launched, folder):
    launched.start("out", "train.steps=150")
    launched.until_step(20)
    launched.network.cut(1)
    at = launched.last_step
    time.sleep(8.0)
    assert launched.last_step <= at + 1, "the cable was not out"
    launched.network.heal(1)
    assert launched.wait(240) == [0, 0], launched.texts
    assert learnt(folder / "out") == of_one_host(folder, "not-out", "train.steps=150")
