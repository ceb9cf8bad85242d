"""Timing of a step: spans of its parts, the fraction in exposed communication, and the rates behind `mfu`.

On a GPU, exposed communication is the time of NCCL kernels during which no other kernel runs, measured by
torch.profiler. Profiling CPU operators would slow the step down by a fifth and take seconds to process. On a CPU
communication does not overlap with computation, because the main thread itself waits for it, so these waits are timed.
The two functions of torch in which it waits are replaced meanwhile (checked on 2.13).
"""

import contextlib
import functools
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile, record_function

from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World

# Names of spans.
BATCHES = "waiting for batches"
ENCODE, LOSS, BACKWARD, NORM, AGREE, OPTIMIZER = (
    "encode",
    "loss",
    "backward",
    "gradient norm",
    "agreement of the ranks",
    "optimizer",
)
RANKS = "waiting for other ranks"

FIRST_MEASURED_STEP = 3  # earlier steps select kernels and algorithms
ROWS_BETWEEN = 100  # logged rows from one measurement to the next

Intervals = list[tuple[float, float]]


class Clock:
    """Seconds of each span of this rank, excluding waits for collectives, and the seconds of each wait."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.waits: list[float] = []
        self.waited = 0.0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of a step. Spans must not be nested."""
        started, waited = time.perf_counter(), self.waited
        try:
            with record_function(name):
                yield
        finally:
            seconds = time.perf_counter() - started - (self.waited - waited)
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Time a wait for a collective."""
        started = time.perf_counter()
        try:
            with record_function(RANKS):
                yield
        finally:
            self.waits.append(time.perf_counter() - started)
            self.waited += self.waits[-1]


_clock: Clock | None = None


def span(name: str) -> AbstractContextManager[None]:
    """Time a part of a step while a clock is active; otherwise it costs nothing."""
    return contextlib.nullcontext() if _clock is None else _clock.span(name)


@contextlib.contextmanager
def active_clock(clock: Clock) -> Iterator[None]:
    """Use this clock for the spans of the block."""
    global _clock  # noqa: PLW0603 - one process takes one step at a time
    _clock = clock
    try:
        yield
    finally:
        _clock = None


class CommunicationMeter:
    """Measures exposed communication in some steps."""

    def __init__(self, world: World, log_every: int, *, rows_between: int = ROWS_BETWEEN) -> None:
        self._world, self._interval = world, rows_between * log_every
        self._steps = 0
        self._fraction: float | None = None

    @contextlib.contextmanager
    def measure_step(self, *, already_profiled: bool = False) -> Iterator[None]:
        """Enter around every step, on every rank. If the step is measured, the end is a collective.

        If a profiler measures this step already, the next one is measured instead.
        """
        if already_profiled:
            yield
            return
        self._steps += 1
        is_due = self._steps >= FIRST_MEASURED_STEP and (self._steps - FIRST_MEASURED_STEP) % self._interval == 0
        if not is_due or self._world.size == 1:
            yield
            return
        started = time.perf_counter()
        measure = gpu_profile(self._world.device) if self._world.device.type == "cuda" else timed_waits()
        with measure as seconds:
            yield
        fraction = seconds() / (time.perf_counter() - started)
        mean = float(gather_vector(torch.tensor([fraction], device=self._world.device)).mean())
        self._fraction = mean if math.isfinite(mean) else None  # a rank could not be profiled

    def pop(self) -> dict[str, float]:
        """The mean over ranks of the last measured step, if there was one since the last call."""
        fraction, self._fraction = self._fraction, None
        return {} if fraction is None else {"communication": fraction}


@contextlib.contextmanager
def timed_waits(clock: Clock | None = None) -> Iterator[Callable[[], float]]:
    """Time this thread's waits for collectives during the block; the yielded function returns their seconds."""
    thread, active = threading.get_ident(), clock or Clock()

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return wait(*args, **kwargs)
            with active.wait():
                return wait(*args, **kwargs)

        return timed_wait

    wait_work, wait_tensor = Work.wait, functional.wait_tensor
    Work.wait, functional.wait_tensor = timed(wait_work), timed(wait_tensor)  # type: ignore[method-assign]
    try:
        yield lambda: active.waited
    finally:
        Work.wait, functional.wait_tensor = wait_work, wait_tensor  # type: ignore[method-assign]


@contextlib.contextmanager
def gpu_profile(device: torch.device) -> Iterator[Callable[[], float]]:
    """Profile the GPU during the block; the yielded function returns the seconds of exposed NCCL kernels, or NaN."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it starts and stops
    events: list[Any] = []
    try:
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
    except Exception:  # the process is profiled already, or the driver does not permit it: training continues
        yield lambda: math.nan
        return
    try:
        yield lambda: exposed_nccl_seconds(events)
        torch.cuda.synchronize(device)
    finally:
        with contextlib.suppress(Exception):
            profiler.stop()
            events += profiler.events()


def kernel_intervals(events: Iterable[Any]) -> tuple[Intervals, Intervals]:
    """Microseconds of the kernels in a profile: those of NCCL, and all others."""
    nccl: Intervals = []
    others: Intervals = []
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kind = nccl if "nccl" in event.name.lower() else others
            kind.append((event.time_range.start, event.time_range.end))
    return nccl, others


def exposed_nccl_seconds(events: Iterable[Any]) -> float:
    """Seconds in which only NCCL kernels ran; NaN if the profile has no other kernel."""
    nccl, others = kernel_intervals(events)
    return (covered_length(nccl + others) - covered_length(others)) / 1e6 if others else math.nan


def covered_length(intervals: Intervals) -> float:
    """The length of the union of intervals."""
    total, end_so_far = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return total


# TFLOP/s of dense products in bf16 with sums in fp32, by the name of the device: what the datasheets say, half of the
# figure where that is for sparse matrices.
_BF16_PEAKS = (
    (r"B200", 2250.0),
    (r"H200 NVL", 835.0),
    (r"GH200|H200|H100 80GB HBM3|H100 SXM", 989.4),
    (r"H100 NVL", 835.0),
    (r"H100 PCIe", 756.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)


@dataclass(frozen=True, slots=True)
class FlopsReference:
    """FLOP/s of one device in dense products, of the type that the model computes in; None if it is not known."""

    peak: float | None = None  # of the datasheet: the reference of `mfu`
    matmul: float | None = None  # measured: the reference of `matmul_fraction`


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense peak of the datasheet; None for other types than bf16, other devices, and parts of a device (MIG)."""
    if dtype != torch.bfloat16 or "MIG" in device_name:
        return None
    return next(
        (tflops * 1e12 for name, tflops in _BF16_PEAKS if re.search(rf"\b({name})\b", device_name)),
        None,
    )


# Sizes n of n x n matrices, of which the largest that fits into `SECONDS` is measured. Small ones do not fill a GPU.
SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
SECONDS = {"cuda": 0.4, "cpu": 0.06}
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """The measured rate."""

    flops: float  # floating point operations per second of one rank, the mean over ranks
    size: int  # n
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.flops / 1e12:,.3g} TFLOP/s per rank in products of {self.size} x {self.size} matrices in {kind}"


def matmul_rate(world: World, dtype: torch.dtype) -> MatmulRate:
    """Measure the rate on all ranks at the same time, within half a second. A collective."""
    sizes, device = SIZES[world.device.type], world.device
    _seconds(sizes[0], dtype, device, rounds=1)  # warm-up: selects kernels, loads libraries
    once = _seconds(sizes[0], dtype, device, rounds=1)
    fitting = [n for n in sizes if once * (n / sizes[0]) ** 3 * (ROUNDS + 1) <= SECONDS[device.type]]
    size = min(world.gather(max(fitting, default=sizes[0])))
    local = 2.0 * size**3 / _seconds(size, dtype, device, rounds=ROUNDS)
    rates = gather_vector(torch.tensor([local], dtype=torch.float64, device=device))
    if device.type == "cuda":  # the matrices do not count as memory of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return MatmulRate(float(rates.mean()), size, dtype)


def _seconds(size: int, dtype: torch.dtype, device: torch.device, *, rounds: int) -> float:
    """Seconds of one product: the median of `rounds`, after a warm-up."""
    # Random numbers, because zeros take less power and are multiplied faster.
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=source) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return statistics.median(time_product(left, right, out) for _ in range(rounds))


def time_product(left: Tensor, right: Tensor, out: Tensor) -> float:
    """Seconds of one product."""
    if left.device.type != "cuda":
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
