"""A store that does not answer holds nobody up, and is asked again once it does."""

import os
import signal
import time
from datetime import timedelta

from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.heartbeats import Heartbeat, HeartbeatStore
from embedtrain.distributed.world import World


def out_of_reach(world: World) -> dict[str, object]:
    """Rank 1's process holds the store, and is suspended as a host is that nobody reaches."""
    held = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    port, other = world.gather((held.port, os.getpid()))[1]
    seen: dict[str, object] = {}
    if world.rank == 0:
        board = HeartbeatStore(TCPStore("127.0.0.1", port, None, False), 0, 2, reports_alone=True)
        board.publish(Heartbeat(1, 1, "training", 3, 0.0, ""))
        seen["before"] = board.failure(), board.is_unresponsive
        os.kill(other, signal.SIGSTOP)
        try:
            began = time.monotonic()
            seen["asked"] = board.failure()
            seen["again"] = board.heartbeats()
            seen["took"] = time.monotonic() - began
            seen["silent"] = board.is_unresponsive, board.is_lost
        finally:
            os.kill(other, signal.SIGCONT)
        time.sleep(1.0)
        seen["after"] = board.heartbeats(), board.is_unresponsive, board.is_lost
    world.barrier()
    return seen


def test_a_store_out_of_reach(ranks):
    seen, _ = ranks(2, out_of_reach)
    assert seen["before"] == (None, False)
    assert (seen["asked"], seen["again"]) == (None, None)
    assert 4 < seen["took"] < 8, "asked twice, waited for once"
    assert seen["silent"] == (True, False)
    assert seen["after"] == ({}, False, False)
