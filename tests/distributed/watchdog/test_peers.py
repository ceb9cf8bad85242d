"""Ranks agree on a name for this start over a store that holds entries of earlier starts."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from embedtrain.distributed.watchdog.peers import LocalProcesses, _pid_namespace, agree_on_attempt, hosts_by_rank
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, LostContact


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))


def agree(world: World, port: int) -> str:
    return agree_on_attempt(connect(port), world.rank, world.size, timeout=30)


def agree_without(world: World, port: int, missing: int) -> str:
    """The error of this rank while one rank does not take part."""
    if world.rank != missing:
        try:
            agree_on_attempt(connect(port), world.rank, world.size, timeout=1.5)
        except LostContact as error:
            return str(error)
    return ""


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def test_each_start_has_its_own_name(ranks, store):
    """Even if a rank of an earlier start only announced itself."""
    first = ranks(3, agree, store.port)
    store.set("attempt/of/2", "a rank that has ended")
    second = ranks(3, agree, store.port)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_threads_look_at_processes_while_others_are_found():
    """The watchdog's thread and the main thread both look, while ranks are still joining."""
    store, process = HashStore(), psutil.Process()
    processes = LocalProcesses(store, 0, range(200))
    ended = list(range(7, 200, 7))

    def look() -> str:
        deadline = time.monotonic() + 60
        while processes.ended() != ended and time.monotonic() < deadline:
            processes.describe(range(200))
        return processes.describe(range(200))

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(look) for _ in range(3)]
        for rank in range(1, 200):
            created = process.create_time() - (rank in ended)
            store.set(f"who/{rank}", json.dumps([_pid_namespace(), process.pid, created]))
            time.sleep(0.002)
        descriptions = [future.result() for future in futures]
    assert processes.ended() == ended
    assert all(text.count(f"its process {process.pid} is running") > 150 for text in descriptions)


def test_a_missing_rank_is_named(ranks, store):
    errors = ranks(3, agree_without, store.port, 2)
    assert f"rank 0 on {socket.gethostname()} waited 2 s for rank 2 while joining the process group" in errors[0]
    assert errors[1] == "", "rank 0 has answered it"


@pytest.mark.parametrize(
    ("hosts", "local", "fault"),
    [
        ("aabb", [(0, 2), (0, 2), (2, 4), (2, 4)], ""),
        ("aaaa", [(0, 2), (0, 2), (2, 4), (2, 4)], ""),  # two launchers
        ("aab", [(0, 2), (0, 2), (2, 3)], ""),
        ("abab", [(0, 2), (1, 3), (1, 3), (2, 4)], "LOCAL_RANK=0 and LOCAL_WORLD_SIZE=2 of rank 0 "),  # --map-by node
        ("aabb", [(0, 2), (0, 2), (2, 6), (2, 6)], "LOCAL_RANK=0 and LOCAL_WORLD_SIZE=4 of rank 2 "),
    ],
)
def test_ranks_are_on_the_hosts_that_the_launcher_says(hosts, local, fault):
    """If not, every rank raises the same error: weights would be sharded over hosts, and replicated within them."""
    store, found = HashStore(), []
    for rank, (host, ranks) in enumerate(zip(hosts, local, strict=True)):
        store.set(f"who/{rank}", json.dumps([f"{host} pid:[1]", 1, 1.0, *ranks]))
    for rank in range(len(hosts)):
        try:
            found.append(hosts_by_rank(store, rank, len(hosts)))
        except ConfigError as error:
            found.append(str(error))
    assert all(result == found[0] for result in found)
    if fault:
        assert str(found[0]).startswith(fault)
        assert "--map-by ppr:" in str(found[0])
    else:
        assert found[0] == list(hosts)
