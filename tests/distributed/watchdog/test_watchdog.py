"""Ranks find out which of them is lost or late, and one of them reports it."""

import os
import socket
import subprocess
import sys
import time
import unittest.mock
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.watchdog import Watchdog, activity, current_activity, set_activity
from embedtrain.distributed.world import World
from embedtrain.errors import DataError, EmbedtrainError, FailedElsewhere, LostContact, Stopped

HOST = socket.gethostname()


def start_watchdog(world: World, port: int) -> Watchdog:
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    watchdog = Watchdog(store, world.rank, world.size, range(world.size), timeout=60.0, store_on_rank_0=False)
    watchdog.start()
    world.barrier()
    watchdog.learn_hosts()
    return watchdog


def fail(world: World, port: int, errors: dict[int, Exception]) -> tuple[str, int | None, list[str]]:
    """The error that leaves the guard, the reporting rank, and the notes of the error. A rank without error is late."""
    watchdog = start_watchdog(world, port)
    set_activity("training", 13)
    result: tuple[str, int | None, list[str]] = ("", None, [])
    try:
        with watchdog.guard():
            if world.rank in errors:
                raise errors[world.rank]
            time.sleep(6.0)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        result = f"{type(error).__name__}: {error}", getattr(error, "reporting_rank", None), notes
    world.barrier()
    watchdog.close()
    return result


def stop(world: World, port: int) -> tuple[str, int | None, list[str]]:
    return fail(world, port, {world.rank: Stopped("stopped by SIGTERM", 75)})


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def test_a_late_rank_is_reported_once(ranks, store):
    lost = LostContact("Timed out waiting 8000ms")
    first, second, late = ranks(3, fail, store.port, {0: lost, 1: lost})
    assert late == ("", None, [])
    assert first[0] == second[0]
    assert first[0].startswith(f'LostContact: rank 2 on {HOST} hangs: alive, but in "training, step 13" for ')
    assert first[1] == second[1] in (0, 1), "one of them reports"


def test_the_cause_is_reported_instead_of_its_consequences(ranks, store):
    consequence = FailedElsewhere("rank 1 failed while reading: DataError: no sheep")
    errors = {0: consequence, 1: DataError("no sheep"), 2: LostContact("Socket closed")}
    results = ranks(3, fail, store.port, errors)
    assert [reporting_rank for _, reporting_rank, _ in results] == [1, 1, 1]
    assert results[2][0] == "LostContact: no sheep"


def test_an_unexpected_error_has_its_message_below_its_traceback(ranks, store):
    lost, failed = ranks(2, fail, store.port, {0: LostContact("Socket closed"), 1: ValueError("wolves")})
    message = f"rank 1 on {HOST} failed while training, step 13: ValueError: wolves"
    assert failed[2] == [f"error: {message}"]
    assert lost[:2] == (f"LostContact: {message}", 1)


def test_a_stop_is_not_a_failure(ranks, store):
    assert ranks(2, stop, store.port) == [("Stopped: stopped by SIGTERM", None, [])] * 2


def upload(world: World, port: int, seconds: float, error: str) -> str:
    """A long action of rank 0; all time-outs are shorter."""
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    watchdog = Watchdog(store, world.rank, world.size, range(world.size), timeout=1.0, store_on_rank_0=False)
    watchdog.start()

    def act() -> None:
        time.sleep(seconds)
        if error:
            raise DataError(error)

    impatient = world.new_cpu_group(timeout=seconds * 30 / 40)
    with unittest.mock.patch("embedtrain.distributed.world.PROGRESS_SECONDS", seconds / 20):
        started = time.monotonic()
        try:
            impatient.run_on_main("uploading", act)
            # A rank may begin a moment later than the first.
            outcome = "waited" if time.monotonic() - started > seconds * 30 / 40 else "went on"
        except EmbedtrainError as failure:
            outcome = str(failure)
    watchdog.close()
    dist.destroy_process_group(impatient.group)
    return outcome


def test_an_upload_may_take_longer_than_ranks_wait(ranks, store):
    """40 minutes with a time-out of 30, both scaled; the watchdog's is shorter."""
    assert ranks(3, upload, store.port, 6.0, "") == ["waited"] * 3
    first, second = ranks(2, upload, store.port, 0.1, "no space for sheep")
    assert first == "no space for sheep"
    assert second == "rank 0 failed while uploading: DataError: no space for sheep"


def test_a_monitor_that_fails_ends_the_process():
    program = (
        "import time; from embedtrain.distributed.signals import start_monitor\n"
        "start_monitor('watchdog', lambda: {}['wolves']); time.sleep(60); print('unnoticed')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"RANK": "3"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and not ended.stdout
    assert "KeyError: 'wolves'" in ended.stderr
    assert ended.stderr.endswith("error: rank 3 ends because its thread 'watchdog' failed, see above\n")


def test_activities():
    set_activity("training", 7)
    with activity("evaluating dev"):
        assert str(current_activity()) == "evaluating dev, step 7"
    assert str(current_activity()) == "training, step 7"
    with pytest.raises(ValueError, match="wolves"), activity("evaluating dev"):
        raise ValueError("wolves")
    assert str(current_activity()) == "evaluating dev, step 7", "the activity that failed"
