"""Threads that watch over this process: one that fails says so and ends the process."""

import os
import sys
import threading
import traceback
from collections.abc import Callable


def start_monitor(name: str, watch: Callable[[], None]) -> threading.Thread:
    """Start `watch` in a daemon thread, which ends the process with exit code 1 if `watch` raises.

    A rank without its watchdog would be declared lost by the others, with nothing in its own output; one that no longer
    listens to signals could not be stopped.
    """

    def run() -> None:
        try:
            watch()
        except BaseException:
            traceback.print_exc()
            rank = os.environ.get("RANK", "0")
            print(f"error: rank {rank} ends because its thread {name!r} failed, see above", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
