"""How much memory a process takes for what it does, counted without files that are mapped."""

import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MB = 10**6


def anonymous_mb() -> float:
    """MB of this process that no file stands behind."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MB


@contextmanager
def memory_growth(found: list[float]) -> Iterator[None]:
    """Add the most that memory grew by in the block, looked at every two milliseconds; MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    before = peak = anonymous_mb()
    over = threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    found.append(max(peak, anonymous_mb()) - before)
