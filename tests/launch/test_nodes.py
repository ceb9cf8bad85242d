"""SLURM's compressed lists of nodes and tasks."""

import pytest

from embedtrain.distributed.srun import node_address, node_names, tasks_per_node
from embedtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("compressed", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("gpu-[008-011],login", ["gpu-008", "gpu-009", "gpu-010", "gpu-011", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
        ("a-[1,3]-ib,b.example.org", ["a-1-ib", "a-3-ib", "b.example.org"]),
    ],
)
def test_node_lists(compressed, names):
    assert node_names(compressed) == names


@pytest.mark.parametrize("compressed", ["", "n[1-", "n[4-1]", "n[a-b]", "n1,,n2", "n[1-99999999999]", "n]1"])
def test_a_list_that_cannot_be_read_is_refused(compressed):
    with pytest.raises(ConfigError, match="list of nodes"):
        node_names(compressed)


@pytest.mark.parametrize(
    ("compressed", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,8(x2)", [1, 8, 8]), ("2,1", [2, 1])]
)
def test_tasks_of_nodes(compressed, tasks):
    assert tasks_per_node(compressed) == tasks


@pytest.mark.parametrize("compressed", ["", "2(x", "2x3", "a", "-1", "2(x99999999999)"])
def test_tasks_that_cannot_be_read_are_refused(compressed):
    with pytest.raises(ConfigError, match="list of tasks"):
        tasks_per_node(compressed)


def test_a_name_that_resolves_is_an_address():
    assert node_address("localhost") == "localhost"


def test_of_one_that_does_not_slurm_is_asked(tmp_path, monkeypatch):
    """And where that knows nothing either, the name is all there is."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$4 NodeAddr=10.1.2.3 NodeHostName=$4 Version=22"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert node_address("node-of-nobody.invalid") == "10.1.2.3"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert node_address("node-of-nobody.invalid") == "node-of-nobody.invalid"
