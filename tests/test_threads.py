"""Threads of ranks that share a machine: told by real processes in which OpenMP reads its environment."""

import os
import subprocess
import sys

import pytest

from embedtrain.cli import num_usable_cores, set_threads

SCRIPT = """
from embedtrain.cli import enter

def act(options):
    import torch
    print("threads", torch.get_num_threads())

enter(lambda arguments: None, act)
"""


ASLEEP = 0  # turns that a thread waits awake


def told(**environment: str) -> tuple[int, int]:
    """Threads that torch has in a door's process, and for how many turns one spins, as OpenMP says itself."""
    ours = ("OMP_", "LOCAL_WORLD_SIZE", "GOMP_", "MKL_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    given |= {"OMP_DISPLAY_ENV": "VERBOSE", **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, check=True)
    turns = next(line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    return int(done.stdout.split()[1]), int(turns.split("'")[1])


def test_ranks_share_the_cores_and_wait_asleep():
    assert told(LOCAL_WORLD_SIZE=str(max(2, num_usable_cores()))) == (1, ASLEEP)


def test_what_the_user_has_set_stays():
    threads = min(2, num_usable_cores())
    given = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "ACTIVE"}
    found, turns = told(LOCAL_WORLD_SIZE=str(max(2, num_usable_cores())), **given)
    assert found == threads
    assert turns > 1e6


@pytest.mark.skipif(num_usable_cores() < 2, reason="one core is one thread in any case")
def test_who_is_alone_has_all_cores():
    threads, turns = told(LOCAL_WORLD_SIZE="1")
    assert threads > 1
    assert turns > ASLEEP
    assert told() == (threads, turns)


@pytest.mark.parametrize(
    ("given", "threads", "policy"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, str(max(1, num_usable_cores() // 2)), "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "4096"}, "1", "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "7"}, "7", "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_WAIT_POLICY": "active"}, str(max(1, num_usable_cores() // 2)), "active"),
        ({"LOCAL_WORLD_SIZE": "1"}, None, None),
        ({"LOCAL_WORLD_SIZE": "two"}, None, None),
        ({}, None, None),
    ],
)
def test_only_what_is_open_is_set(given, threads, policy):
    environment = dict(given)
    set_threads(environment)
    assert (environment.get("OMP_NUM_THREADS"), environment.get("OMP_WAIT_POLICY")) == (threads, policy)
    assert {name: environment[name] for name in given} == given


@pytest.mark.parametrize("door", ["__main__", "evaluate", "mine", "export", "search"])
def test_doors_load_no_torch_before_it_is_set(door):
    script = f"import sys, embedtrain.{door}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
