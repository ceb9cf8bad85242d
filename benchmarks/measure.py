"""Shared by all tables: the clock, interleaved rounds, checks, Markdown."""

import contextlib
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import torch

ROUNDS = 3
T = TypeVar("T")


class WrongResult(Exception):
    """The results of two implementations differ, so their speeds cannot be compared."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """The result of a call and its seconds."""

    value: T
    seconds: float


def seconds() -> float:
    """CPU seconds of this process, which other load does not stretch; wall seconds if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure_call(call: Callable[[], T], device: torch.device) -> tuple[T, float, float]:
    """The result of a call, its extra memory in MiB, and its seconds.

    Memory is allocated memory on a GPU, resident memory (VmHWM, reset first) on a CPU; time is CPU time, or the GPU's.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        value = call()
        end_event.record()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        return value, extra / 2**20, start_event.elapsed_time(end_event) / 1000
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _resident("VmRSS"), time.process_time()
    value = call()
    return value, (_resident("VmHWM") - before) / 2**20, time.process_time() - start


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@contextlib.contextmanager
def peak_rss_anon() -> Iterator[list[float]]:
    """Sample the anonymous memory of this process a hundred times a second; the list has the peak in MiB afterwards."""
    peak, stop = [rss_anon()], threading.Event()

    def sample() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], rss_anon())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield peak
    stop.set()
    sampler.join()
    peak[0] = max(peak[0], rss_anon())


def rss_anon(pid: int | str = "self") -> float:
    """Anonymous memory of a process in MiB: without mapped pages of files, which the system can reclaim at any time."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("this kernel does not report RssAnon")


def interleave(*calls: Callable[[int], T]) -> list[list[Timed[T]]]:
    """Call each function once per round with the round's number, alternating which goes first.

    Round 0 warms up and is not returned. The result has a list of rounds for each function.
    """
    timed: list[list[Timed[T]]] = [[] for _ in calls]
    for round_number in range(ROUNDS + 1):
        for position in range(len(calls)):
            index = (position + round_number) % len(calls)
            start = seconds()
            value = calls[index](round_number)
            timed[index].append(Timed(value, seconds() - start))
    return [rounds[1:] for rounds in timed]


def ratio(ours: Sequence[Timed[T]], theirs: Sequence[Timed[T]]) -> str:
    """Seconds of theirs divided by seconds of ours: the median, the smallest and the largest of the rounds."""
    ratios = sorted(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def speed(rounds: Sequence[Timed[T]], tokens: Sequence[int]) -> float:
    """Median of real tokens per second."""
    return statistics.median(n / timed.seconds for n, timed in zip(tokens, rounds, strict=True))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise WrongResult(message)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def unit() -> str:
    """Unit of `seconds`."""
    return "s" if torch.cuda.is_available() else "CPU s"


def bf16_units() -> tuple[str, ...]:
    """Units of this CPU that multiply bf16; without any, bf16 is slower than fp32."""
    units = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "bf16"}  # the last is ARM's
    return tuple(name for flag, name in units.items() if flag in _cpu("flags", "Features").split())


def machine() -> str:
    """Cores, CPU, GPU and versions, in one line."""
    cpu = f"{_cpu('model name') or platform.machine()} ({', '.join(bf16_units()) or 'no bf16 units'})"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    return f"{os.cpu_count()} cores, {cpu}{gpu}; Python {platform.python_version()}, {versions}; 1 thread per process"


def _cpu(*names: str) -> str:
    """The first value in /proc/cpuinfo under one of `names`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), "")
