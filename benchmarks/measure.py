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


def speeds(ours: Sequence[Timed[T]], theirs: Sequence[Timed[T]], tokens: Sequence[int]) -> tuple[str, str, str]:
    """Median real tokens a second of both sides, and the median ratio with its smallest and largest."""
    medians = [
        statistics.median(n / one.seconds for n, one in zip(tokens, side, strict=True)) for side in (ours, theirs)
    ]
    ratios = sorted(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{medians[0]:,.0f}", f"{medians[1]:,.0f}", ratio


def require(right: bool, message: str) -> None:
    if not right:
        raise WrongResult(message)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def unit() -> str:
    """What `seconds` counts."""
    return "s" if torch.cuda.is_available() else "CPU s"


def machine() -> str:
    cpu = platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    return f"{os.cpu_count()} cores, {cpu}{gpu}; Python {platform.python_version()}, {versions}; 1 thread a process"
