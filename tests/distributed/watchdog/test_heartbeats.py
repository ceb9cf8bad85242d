"""An unresponsive store blocks nobody, and is used again when it responds."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from embedtrain.distributed.watchdog.watchdog import Heartbeat, HeartbeatStore
from embedtrain.distributed.world import World


def use_suspended_store(world: World) -> dict[str, object]:
    """The process of rank 1 hosts the store and is suspended, which looks like an unreachable host."""
    hosted = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    port, host_pid = world.gather((hosted.port, os.getpid()))[1]
    results: dict[str, object] = {}
    if world.rank == 0:
        store = HeartbeatStore(TCPStore("127.0.0.1", port, None, False), 0, 2, reports_alone=True)
        store.publish(Heartbeat(1, 1, "training", 3, 0.0, ""))
        results["before"] = store.failure(), store.is_unresponsive
        os.kill(host_pid, signal.SIGSTOP)
        try:
            while not _is_stopped(host_pid):  # on a busy machine its threads respond for a moment after the signal
                time.sleep(0.01)
            started = time.monotonic()
            failure, ended = store.failure(), time.monotonic()
            results["suspended"] = failure, store.heartbeats()
            results["seconds"] = ended - started, time.monotonic() - ended
            results["state"] = store.is_unresponsive, store.is_lost
        finally:
            os.kill(host_pid, signal.SIGCONT)
        while store.is_unresponsive and time.monotonic() - started < 30:
            time.sleep(0.05)
        results["after"] = store.heartbeats(), store.is_unresponsive, store.is_lost
    world.barrier()
    return results


def _is_stopped(pid: int) -> bool:
    threads = (status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(text.rpartition(")")[2].split()[0] == "T" for text in threads)


def test_an_unreachable_store(ranks):
    results, _ = ranks(2, use_suspended_store)
    assert results["before"] == (None, False)
    assert results["suspended"] == (None, None)
    first, second = results["seconds"]
    assert first > 4
    assert second < 4, "only the first request waits for a reply"
    assert results["state"] == (True, False)
    assert results["after"] == ({}, False, False)
