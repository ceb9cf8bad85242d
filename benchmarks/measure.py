"""What all tables share: the clock, interleaved rounds, checks, Markdown."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import torch

ROUNDS = 3
T = TypeVar("T")


class WrongResult(Exception):
    """The two sides disagree, so their speed says nothing."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What one call gave and how long it took."""

    value: T
    seconds: float


def seconds() -> float:
    """CPU seconds of this process, which neighbours on the machine do not stretch; with a GPU, the wall's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def interleave(*calls: Callable[[int], T]) -> list[list[Timed[T]]]:
    """Call each with the round's number, round by round, who goes first in turns; each one's rounds in order.

    Round 0 warms up and is left out.
    """
    timed: list[list[Timed[T]]] = [[] for _ in calls]
    for number in range(ROUNDS + 1):
        for turn in range(len(calls)):
            place = (turn + number) % len(calls)
            began = seconds()
            value = calls[place](number)
            timed[place].append(Timed(value, seconds() - began))
    return [rounds[1:] for rounds in timed]


def ratio(ours: Sequence[Timed[T]], theirs: Sequence[Timed[T]]) -> str:
    """How many times theirs took of what ours took: the median of the rounds, with the smallest and the largest."""
    found = sorted(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def speed(side: Sequence[Timed[T]], tokens: Sequence[int]) -> float:
    """Median real tokens a second."""
    return statistics.median(n / one.seconds for n, one in zip(tokens, side, strict=True))


def require(right: bool, message: str) -> None:
    if not right:
        raise WrongResult(message)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def unit() -> str:
    """What `seconds` counts."""
    return "s" if torch.cuda.is_available() else "CPU s"


def bf16_units() -> tuple[str, ...]:
    """What this machine's CPU has to multiply bf16 with; without any of it bf16 is slower than fp32."""
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "bf16"}  # the last is ARM's
    return tuple(name for flag, name in known.items() if flag in _cpu("flags", "Features").split())


def machine() -> str:
    """Cores, CPU, GPU and versions, in one line."""
    cpu = f"{_cpu('model name') or platform.machine()} ({', '.join(bf16_units()) or 'no bf16 units'})"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    return f"{os.cpu_count()} cores, {cpu}{gpu}; Python {platform.python_version()}, {versions}; 1 thread a process"


def _cpu(*names: str) -> str:
    """What Linux says of the first core."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), "")
