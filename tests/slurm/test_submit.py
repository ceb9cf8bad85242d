"""The script that submit writes, on a real SLURM with two nodes: limits, preemption, lost nodes, arrays, errors."""

import json

import pytest

from tests.faults.runs import learnt
from tests.slurm.jobs import TWO

pytestmark = pytest.mark.slurm


def test_two_nodes_learn_what_two_local_ranks_learn(jobs, folder, undisturbed):
    number = jobs.submit("two", *TWO)
    log = jobs.done("two", number)
    assert "on 2 ranks (cpu)" in log, log
    assert "submit: done" in log
    assert learnt(folder / "two") == undisturbed
    assert "SLURM_" not in (folder / "two" / "recipe.yaml").read_text()
