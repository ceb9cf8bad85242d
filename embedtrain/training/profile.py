"""Profiles of steps: how ranks spend their time, the fraction of it in exposed communication, traces for Perfetto.

On a GPU, exposed communication is the time of NCCL kernels during which no other kernel runs, measured by
torch.profiler, which is started only where the recipe asks for it. Profiling CPU operators would slow the step down by
a fifth and take seconds to process. On a CPU communication does not overlap with computation, because the main thread
itself waits for it, so these waits are timed. The two functions of torch in which it waits are replaced meanwhile
(checked on 2.13).
"""

import contextlib
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile, record_function

from embedtrain.config.recipe import TrackingConfig
from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World
from embedtrain.tracking.tracker import Tracker
from embedtrain.utils.files import atomic_write, make_folder

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
ROWS_BETWEEN = 100  # logged rows from one measurement of communication to the next
_MAX_OPERATORS = 8
_MAX_RANKS = 8  # of the printed table

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


class _TorchProfiler:
    """torch's profiler, started.

    It may fail, because the process is profiled already or the driver does not permit it: training continues without.
    """

    def __init__(self, activities: Sequence[ProfilerActivity]) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it starts and stops
        self.problem: str | None = None
        self._profiler: profile | None = None
        try:
            self._profiler = profile(activities=activities)
            self._profiler.start()
        except Exception as error:
            self._profiler, self.problem = None, f"steps could not be profiled: {_one_line(error)}"

    def stop(self) -> profile | None:
        """The profile, of which a driver may now refuse the results; None if it could not be started."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler


@contextlib.contextmanager
def gpu_profile(device: torch.device) -> Iterator[Callable[[], float]]:
    """Profile the GPU during the block; the yielded function returns the seconds of exposed NCCL kernels, or NaN."""
    profiler, events = _TorchProfiler([ProfilerActivity.CUDA]), list[Any]()
    try:
        yield lambda: exposed_nccl_seconds(events)
        if profiler.problem is None:
            torch.cuda.synchronize(device)
    finally:
        with contextlib.suppress(Exception):
            stopped = profiler.stop()
            events += [] if stopped is None else stopped.events()


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


@dataclass
class TimeShares:
    """How one rank spent its time in the profiled steps: fractions of `seconds` that add up to 1."""

    seconds: float  # from requesting the batches of a step to its end, summed over steps
    compute: float  # GPU: kernels other than NCCL's; CPU: the parts of a step, excluding waits
    # Exposed collectives, counted for as long as the last rank to enter each of them spent in it. Includes `ranks` if
    # the two cannot be separated.
    communication: float
    ranks: float  # the rest of the time in exposed collectives: waiting for a rank that entered later
    data: float  # waiting for batches
    rest: float  # everything else: Python, kernel launches, logging
    # Fractions of encode, loss, backward, ...; their sum is `compute` on a CPU, host time on a GPU.
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class RankTiming:
    """Measurements of one rank."""

    seconds: float  # duration of the steps
    spans: dict[str, float]  # seconds of each span
    exposed: float  # seconds in collectives without overlapping computation
    computed: float | None  # seconds of other kernels; None on a CPU
    collectives: list[float]  # seconds of each collective
    operators: list[tuple[str, float, int]]  # name, seconds and calls of the longest operators
    problem: str | None = None  # why there is no trace


@dataclass
class _CurrentProfile:
    """The profile of consecutive steps, while they run."""

    first: int  # step
    torch_profiler: _TorchProfiler | None  # None if neither kernels nor a trace are wanted
    last: int = 0
    seconds: float = 0.0
    clock: Clock = field(default_factory=Clock)

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"steps-{self.first}-{self.last}" if self.last > self.first else f"step-{self.first}"


class StepProfiler:
    """Measures how steps spend their time; failures only cause a warning.

    Steps in `tracking.profile` are measured in full; consecutive ones share a profile. Every rank times them, and those
    in `tracking.profile_ranks` also write a trace. Of other steps, one in `rows_between` logged rows measures the
    fraction of its time in exposed communication, if `tracking.communication` is true, or null on a CPU.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        world: World,
        directory: Path,
        tracker: Tracker,
        *,
        log_every: int,
        rows_between: int = ROWS_BETWEEN,
    ) -> None:
        self._tracking, self._world, self._directory, self._tracker = tracking, world, directory, tracker
        self._current: _CurrentProfile | None = None
        wanted = tracking.communication
        self._measures_communication = world.size > 1 and (world.device.type == "cpu" if wanted is None else wanted)
        self._interval = rows_between * log_every  # steps from one measurement of communication to the next
        self._num_steps = 0  # without those in `tracking.profile`
        self._communication: float | None = None

    @property
    def _trace_ranks(self) -> Sequence[int]:
        ranks = self._tracking.profile_ranks
        return range(self._world.size) if ranks is None else ranks

    @property
    def _writes_trace(self) -> bool:
        return self._world.rank in self._trace_ranks

    def report_skipped_steps(self, completed: int, total: int) -> None:
        """Report which of the steps will not be profiled in a run of `total` steps of which `completed` are done."""
        earlier = sorted({step for step in self._tracking.profile if step <= completed})
        beyond = sorted({step for step in self._tracking.profile if step > total})
        if earlier:
            self._tracker.note(f"tracking.profile: {_list_steps(earlier)} already complete and not profiled")
        if beyond:
            self._tracker.warn(f"tracking.profile: {_list_steps(beyond)} beyond the last step of the run, {total}")
        missing = [rank for rank in self._trace_ranks if rank >= self._world.size]
        if self._tracking.profile and missing:
            self._tracker.warn(
                f"tracking.profile_ranks={list(self._trace_ranks)}: there are {self._world.size} ranks, counted from 0"
            )

    @contextlib.contextmanager
    def profile_step(self, step: int, *, last: bool = False) -> Iterator[None]:
        """Enter around a step and its batches. The end of the last of consecutive steps is a collective.

        The profile also ends if the step is `last`, followed by something else, such as an evaluation.
        """
        steps = self._tracking.profile
        if step not in steps:
            yield
            return
        current = self._current = self._current or self._start(step)
        current.last = step
        started = time.perf_counter()
        with active_clock(current.clock), timed_waits(current.clock), record_function(f"step {step}"):
            yield
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)  # otherwise its kernels would count for later work
        current.seconds += time.perf_counter() - started
        if last or step + 1 not in steps:
            self._finish(current)

    @contextlib.contextmanager
    def measure_communication(self) -> Iterator[None]:
        """Enter around every step after its batches, on every rank. If it is measured, the end is a collective.

        If the step is profiled, the next one is measured instead.
        """
        if self._current is not None:
            yield
            return
        self._num_steps += 1
        is_due = (
            self._num_steps >= FIRST_MEASURED_STEP and (self._num_steps - FIRST_MEASURED_STEP) % self._interval == 0
        )
        if not is_due or not self._measures_communication:
            yield
            return
        started = time.perf_counter()
        measure = gpu_profile(self._world.device) if self._world.device.type == "cuda" else timed_waits()
        with measure as seconds:
            yield
        fraction = seconds() / (time.perf_counter() - started)
        mean = float(gather_vector(torch.tensor([fraction], device=self._world.device)).mean())
        self._communication = mean if math.isfinite(mean) else None  # a rank could not be profiled

    def pop_communication(self) -> dict[str, float]:
        """The mean over ranks of the last measured step, if there was one since the last call."""
        fraction, self._communication = self._communication, None
        return {} if fraction is None else {"communication": fraction}

    def __enter__(self) -> "StepProfiler":
        """Enter around the training loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report the steps so far if the run ends early; after an error, only stop the profiler."""
        if self._current is not None and kind is None:
            self._finish(self._current)
        elif self._current is not None and self._current.torch_profiler is not None:
            with contextlib.suppress(Exception):
                self._current.torch_profiler.stop()

    def _start(self, step: int) -> _CurrentProfile:
        activities = [ProfilerActivity.CPU] if self._writes_trace else []
        if self._world.device.type == "cuda":  # on every rank: the table needs the time in collectives
            activities.append(ProfilerActivity.CUDA)
        return _CurrentProfile(step, _TorchProfiler(activities) if activities else None)

    def _finish(self, current: _CurrentProfile) -> None:
        self._current = None
        timings = self._world.gather(self._stop(current), RankTiming)
        if self._world.is_main:
            for problem in dict.fromkeys(timing.problem for timing in timings if timing.problem is not None):
                self._tracker.warn(f"tracking.profile: {problem}")
            self._print(current.name, current.last - current.first + 1, timings)

    def _stop(self, current: _CurrentProfile) -> RankTiming:
        """Stop the profiler, write this rank's trace, and return its measurements."""
        clock, on_gpu = current.clock, self._world.device.type == "cuda"
        timing = RankTiming(current.seconds, dict(clock.seconds), clock.waited, None, list(clock.waits), [])
        if current.torch_profiler is None:
            return timing
        timing.problem = current.torch_profiler.problem
        try:
            profiler = current.torch_profiler.stop()
            if profiler is not None and on_gpu:
                _add_kernels(timing, profiler.events())
            if profiler is not None and self._writes_trace:
                timing.operators = _longest_operators(profiler.key_averages(), on_gpu=on_gpu)
                make_folder(self._directory)
                path = self._directory / f"{current.name}-rank-{self._world.rank}.json.gz"
                path.unlink(missing_ok=True)  # it may be a link
                profiler.export_chrome_trace(str(path))
        except Exception as error:
            timing.problem = f"rank {self._world.rank} has written no trace: {_one_line(error)}"
        return timing

    def _print(self, name: str, num_steps: int, timings: Sequence[RankTiming]) -> None:
        """Print the table, and write the numbers of all ranks to a file."""
        shares = time_shares(timings)
        steps = name.replace("-", " to ").replace("steps to", "steps").replace("step to", "step")
        seconds_per_step = max(timing.seconds for timing in timings) / num_steps
        self._tracker.note(f"profile of {steps} ({seconds_per_step:.3f} s each), fractions of each rank's time:")
        for line in _table(shares):
            self._tracker.note(f"  {line}")
        parts = ", ".join(f"{part} {share:.1%}" for part, share in shares[0].parts.items())
        self._tracker.note(f"  parts of a step on rank 0: {parts}")
        traced = next((rank for rank, timing in enumerate(timings) if timing.operators), None)
        if traced is not None:
            operators, seconds = timings[traced].operators, timings[traced].seconds
            self._tracker.note(f"  longest operators on rank {traced}:")
            width = max(len(operator) for operator, *_ in operators)
            for operator, operator_seconds, calls in operators:
                share = operator_seconds / seconds
                self._tracker.note(f"    {operator:<{width}}  {share:6.1%}  {calls / num_steps:8,.0f} per step")
            self._tracker.note(f"  traces: {self._directory}/{name}-rank-*.json.gz (open them at ui.perfetto.dev)")
        try:
            content = {"steps": num_steps, "ranks": [asdict(share) for share in shares]}
            with atomic_write(self._directory / f"{name}.json") as file:
                file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._tracker.warn(f"tracking.profile: the table could not be written: {_one_line(error)}")


def time_shares(timings: Sequence[RankTiming]) -> list[TimeShares]:
    """How each rank spent its time, from the measurements of all ranks.

    All ranks run the same collectives in the same order. The rank that spends the shortest time in a collective entered
    it last and waited for nobody, so its time is the transfer time; what other ranks spend beyond that is waiting.
    """
    collectives = [timing.collectives for timing in timings]
    comparable = all(len(seconds) == len(collectives[0]) for seconds in collectives)
    transfer = sum(map(min, zip(*collectives, strict=True))) if comparable else 0.0
    shares = []
    for timing in timings:
        total = max(timing.seconds, 1e-9)
        data = timing.spans.get(BATCHES, 0.0) / total
        in_collectives = sum(timing.collectives)
        waiting = 1.0 - transfer / in_collectives if comparable and in_collectives > 0 else 0.0
        exposed = timing.exposed / total
        parts = {name: seconds / total for name, seconds in timing.spans.items() if name != BATCHES}
        compute = sum(parts.values()) if timing.computed is None else timing.computed / total
        # A GPU may compute while the host waits for the next batch.
        data = min(data, max(0.0, 1.0 - compute - exposed))
        rest = 1.0 - compute - exposed - data
        communication, ranks = exposed * (1.0 - waiting), exposed * waiting
        shares.append(TimeShares(timing.seconds, compute, communication, ranks, data, rest, parts))
    return shares


def _add_kernels(timing: RankTiming, events: Iterable[Any]) -> None:
    """Replace the host's waits by the seconds of GPU kernels."""
    events = list(events)
    nccl, others = kernel_intervals(events)
    timing.computed = covered_length(others) / 1e6
    timing.exposed = exposed_nccl_seconds(events) if others else covered_length(nccl) / 1e6
    timing.collectives = [(end - start) / 1e6 for start, end in sorted(nccl)]


def _longest_operators(averages: Iterable[Any], *, on_gpu: bool) -> list[tuple[str, float, int]]:
    """Name, own seconds and calls of the operators that take the most time."""
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    annotations = ("step ", RANKS, "ProfilerStep")
    operators = [item for item in averages if not item.is_user_annotation and not item.key.startswith(annotations)]
    longest = sorted(operators, key=lambda item: getattr(item, key), reverse=True)[:_MAX_OPERATORS]
    return [(item.key[:60], getattr(item, key) / 1e6, item.count) for item in longest if getattr(item, key) > 0]


def _table(shares: Sequence[TimeShares]) -> list[str]:
    rows = [["rank", "compute", "communication", "waiting for ranks", "waiting for data", "rest"]]
    for rank, share in enumerate(shares[:_MAX_RANKS]):
        columns = (share.compute, share.communication, share.ranks, share.data, share.rest)
        rows.append([str(rank), *(f"{value:.1%}" for value in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(shares) > _MAX_RANKS:
        lines.append(f"... and {len(shares) - _MAX_RANKS} more ranks")
    return lines


def _list_steps(steps: Sequence[int]) -> str:
    numbers = ", ".join(map(str, steps))
    return f"step {numbers} is" if len(steps) == 1 else f"steps {numbers} are"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
