"""Ranks find out which of them is gone or late, and one speaks for all."""

import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.activity import activity, current_activity, note
from embedtrain.distributed.watchdog.watchdog import Watchdog
from embedtrain.distributed.world import World
from embedtrain.errors import DataError, FailedElsewhere, LostContact, Stopped


def watched(world: World, port: int) -> Watchdog:
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    watch = Watchdog(store, world.rank, world.size, range(world.size), patience=60.0, store_on_rank_0=False)
    watch.start()
    world.barrier()
    watch.learn_hosts()
    return watch


def fail(world: World, port: int, errors: dict[int, Exception]) -> tuple[str, int | None, list[str]]:
    """What a rank raises out of the guard, who tells it, and its notes; who has no error is late."""
    watch = watched(world, port)
    note("training", 13)
    answer: tuple[str, int | None, list[str]] = ("", None, [])
    try:
        with watch.guard():
            if world.rank in errors:
                raise errors[world.rank]
            time.sleep(6.0)
    except Exception as error:
        answer = (
            f"{type(error).__name__}: {error}",
            getattr(error, "reporting_rank", None),
            getattr(error, "__notes__", []),
        )
    world.barrier()
    watch.close()
    return answer


def stop(world: World, port: int) -> tuple[str, int | None, list[str]]:
    return fail(world, port, {world.rank: Stopped("stopped by SIGTERM", 75)})


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def test_a_late_rank_is_named_by_one(ranks, store):
    lost = LostContact("Timed out waiting 8000ms")
    first, second, late = ranks(3, fail, store.port, {0: lost, 1: lost})
    assert late == ("", None, [])
    assert first[0] == second[0]
    assert first[0].startswith(
        f"LostContact: rank 2 on {socket.gethostname()} hangs: alive, but has been in training, step 13, for "
    )
    assert first[1] == second[1] in (0, 1), "one of them speaks"


def test_the_cause_is_told_before_what_follows_from_it(ranks, store):
    follows = FailedElsewhere("rank 1 failed while reading: DataError: no sheep")
    answers = ranks(3, fail, store.port, {0: follows, 1: DataError("no sheep"), 2: LostContact("Socket closed")})
    assert [answer[1] for answer in answers] == [1, 1, 1]
    assert answers[2][0] == "LostContact: no sheep"


def test_what_nobody_foresaw_has_its_sentence_below_its_traceback(ranks, store):
    one, other = ranks(2, fail, store.port, {0: LostContact("Socket closed"), 1: ValueError("wolves")})
    sentence = f"rank 1 on {socket.gethostname()} failed while training, step 13: ValueError: wolves"
    assert other[2] == [f"error: {sentence}"]
    assert one[:2] == (f"LostContact: {sentence}", 1)


def test_a_stop_is_no_failure(ranks, store):
    assert ranks(2, stop, store.port) == [("Stopped: stopped by SIGTERM", None, [])] * 2


def test_notes():
    note("training", 7)
    with activity("evaluating dev"):
        assert str(current_activity()) == "evaluating dev, step 7"
    assert str(current_activity()) == "training, step 7"
    with pytest.raises(ValueError, match="wolves"), activity("evaluating dev"):
        raise ValueError("wolves")
    assert str(current_activity()) == "evaluating dev, step 7", "what was being done when it failed"
