"""Measures the memory of a process without mapped files."""

import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MB = 10**6


def anonymous_mb() -> float:
    """Anonymous memory of this process, MB."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / MB


@contextmanager
def freed_memory() -> Iterator[None]:
    """200 MB that this process has freed, and that glibc keeps within the block."""
    blocks = [bytearray(b"1") * 100_000 for _ in range(2000)]  # smaller than those that glibc maps alone
    last = blocks.pop()  # glibc returns by itself what is above the last block in use
    blocks.clear()
    yield
    del last


@contextmanager
def memory_growth(peaks: list[float]) -> Iterator[None]:
    """Append the peak growth of memory within the block in MB, sampled every two milliseconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed before must not hide new allocations
    before = peak = anonymous_mb()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    peaks.append(max(peak, anonymous_mb()) - before)
