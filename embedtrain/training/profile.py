"""Profiles of chosen steps: a trace for Perfetto from chosen ranks, and a table of how all ranks spent their time."""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from embedtrain.config.tracking import TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.timing import (
    BATCHES,
    RANKS,
    Clock,
    active_clock,
    covered_length,
    exposed_nccl_seconds,
    kernel_intervals,
    timed_waits,
)
from embedtrain.utils.files import atomic_write, make_folder

_MAX_OPERATORS = 8
_MAX_RANKS = 8


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


class StepProfiler:
    """Profiles the steps in `tracking.profile`; consecutive steps share a profile.

    Every rank times its steps; those in `tracking.profile_ranks` also write a trace. Failures only cause a warning.
    """

    def __init__(self, tracking: TrackingConfig, world: World, directory: Path, tracker: Tracker) -> None:
        self._steps, self._world, self._directory, self._tracker = set(tracking.profile), world, directory, tracker
        ranks = tracking.profile_ranks
        self._trace_ranks = range(world.size) if ranks is None else ranks
        self._writes_trace = world.rank in self._trace_ranks
        self._first: int | None = None  # step of the current profile
        self._last = 0
        self._seconds = 0.0
        self._clock = Clock()
        self._profiler: Any = None
        self._problem: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether a step is being profiled."""
        return self._first is not None

    def report_skipped_steps(self, completed: int, total: int) -> None:
        """Report which of the steps will not be profiled in a run of `total` steps of which `completed` are done."""
        earlier = sorted(step for step in self._steps if step <= completed)
        beyond = sorted(step for step in self._steps if step > total)
        if earlier:
            self._tracker.note(f"tracking.profile: {_list_steps(earlier)} already complete and not profiled")
        if beyond:
            self._tracker.warn(f"tracking.profile: {_list_steps(beyond)} beyond the last step of the run, {total}")
        missing = [rank for rank in self._trace_ranks if rank >= self._world.size]
        if self._steps and missing:
            self._tracker.warn(
                f"tracking.profile_ranks={list(self._trace_ranks)}: there are {self._world.size} ranks, counted from 0"
            )

    @contextlib.contextmanager
    def profile_step(self, step: int, *, last: bool = False) -> Iterator[None]:
        """Enter around a step and its batches. The end of the last of consecutive steps is a collective.

        The profile also ends if the step is `last`, followed by something else, such as an evaluation.
        """
        if step not in self._steps:
            yield
            return
        if self._first is None:
            self._first = step
            self._start()
        self._last = step
        started = time.perf_counter()
        with active_clock(self._clock), timed_waits(self._clock), torch.profiler.record_function(f"step {step}"):
            yield
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)  # otherwise its kernels would count for later work
        self._seconds += time.perf_counter() - started
        if last or step + 1 not in self._steps:
            self._finish()

    def __enter__(self) -> "StepProfiler":
        """Enter around the training loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report the steps so far if the run ends early; after an error, only stop the profiler."""
        if self._first is not None and kind is None:
            self._finish()
        elif self._profiler is not None:
            with contextlib.suppress(Exception):
                self._profiler.stop()

    def _start(self) -> None:
        self._clock, self._seconds, self._problem = Clock(), 0.0, None
        activities = [ProfilerActivity.CPU] if self._writes_trace else []
        if self._world.device.type == "cuda":  # on every rank: the table needs the time in collectives
            activities.append(ProfilerActivity.CUDA)
        if not activities:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it starts and stops
        try:
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        except Exception as error:  # the process is profiled already, or the driver does not permit it
            self._profiler, self._problem = None, f"steps could not be profiled: {_one_line(error)}"

    def _finish(self) -> None:
        assert self._first is not None
        name = f"steps-{self._first}-{self._last}" if self._last > self._first else f"step-{self._first}"
        num_steps, self._first = self._last - self._first + 1, None
        timings = self._world.gather(self._stop(name), RankTiming)
        if self._world.is_main:
            for problem in dict.fromkeys(timing.problem for timing in timings if timing.problem is not None):
                self._tracker.warn(f"tracking.profile: {problem}")
            self._print(name, num_steps, timings)

    def _stop(self, name: str) -> RankTiming:
        """Stop the profiler, write this rank's trace, and return its measurements."""
        profiler, self._profiler = self._profiler, None
        clock, on_gpu = self._clock, self._world.device.type == "cuda"
        timing = RankTiming(
            self._seconds, dict(clock.seconds), clock.waited, None, list(clock.waits), [], self._problem
        )
        if profiler is None:
            return timing
        try:
            profiler.stop()
            if on_gpu:
                _add_kernels(timing, profiler.events())
            if self._writes_trace:
                timing.operators = _longest_operators(profiler.key_averages(), on_gpu=on_gpu)
                make_folder(self._directory)
                path = self._directory / f"{name}-rank-{self._world.rank}.json.gz"
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
