"""Ranks agree on which start of them this is, over a store that knows of earlier ones."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.attempt import agree_on_attempt
from embedtrain.distributed.world import World
from embedtrain.errors import LostContact


def connected(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))


def agreed(world: World, port: int) -> str:
    return agree_on_attempt(connected(port), world.rank, world.size, timeout=30)


def agreed_but_for(world: World, port: int, missing: int) -> str:
    if world.rank == missing:
        return ""
    try:
        agree_on_attempt(connected(port), world.rank, world.size, timeout=1.5)
    except LostContact as error:
        return str(error)
    return ""


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def test_every_attempt_has_a_name_of_its_own(ranks, store):
    """Also where a rank of an attempt before came no further than to say that it is there."""
    first = ranks(3, agreed, store.port)
    store.set("attempt/of/2", "a rank that is dead")
    second = ranks(3, agreed, store.port)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_who_does_not_come_is_named(ranks, store):
    told = ranks(3, agreed_but_for, store.port, 2)
    assert "has waited for rank 2 for 2 s while meeting the others" in told[0]
    assert told[1] == "", "it has heard from rank 0"
