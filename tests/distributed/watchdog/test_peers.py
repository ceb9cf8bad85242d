"""Ranks agree on a name for this start over a store that holds entries of earlier starts."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.peers import agree_on_attempt
from embedtrain.distributed.world import World
from embedtrain.errors import LostContact


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


def test_a_missing_rank_is_named(ranks, store):
    errors = ranks(3, agree_without, store.port, 2)
    assert f"rank 0 on {socket.gethostname()} waited 2 s for rank 2 while joining the process group" in errors[0]
    assert errors[1] == "", "rank 0 has answered it"
