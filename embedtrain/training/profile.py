"""What chosen steps spend their time on: a trace for Perfetto from chosen ranks, and a table of all ranks' shares."""

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

from embedtrain.config.recipe import TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.communication import Intervals, covered_length, exposed_nccl_seconds, timed_waits
from embedtrain.training.spans import BATCHES, RANKS, Clock, active_clock

LONGEST = 8  # operators told
_RANKS_TOLD = 8


@dataclass
class TimeShares:
    """What one rank's time went to in the steps profiled together; shares of `seconds` that add up to 1.

    Attributes:
        seconds: from before the steps' batches were asked for to their end, what lies between steps left out.
        compute: on a GPU kernels other than NCCL's; on a CPU the parts of a step, less what they wait.
        communication: in collectives, with nothing computed beside, as long as the rank that was in each of them for
            the shortest time; without `ranks` where that cannot be told apart: all of them.
        ranks: in collectives beyond that: waiting for a rank that came later.
        data: waiting for batches.
        rest: what is left: Python, launching kernels, logging.
        parts: of `compute` on a CPU, of the host's time on a GPU: encode, loss, backward, ...
    """

    seconds: float
    compute: float
    communication: float
    ranks: float
    data: float
    rest: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class RankTiming:
    """What one rank has to tell after the steps."""

    seconds: float
    spans: dict[str, float]
    alone: float  # seconds in collectives with nothing computed beside
    computed: float | None  # seconds of other kernels; None on a CPU
    collectives: list[float]  # the seconds of each
    operators: list[tuple[str, float, int]]  # seconds and calls of the longest
    problem: str | None = None


class StepProfiler:
    """Profiles the steps that `tracking.profile` names; neighbouring ones together.

    Every rank clocks its steps; those of `tracking.profile_ranks` write a trace as well. Nothing that fails here stops
    training.

    Args:
        tracking: which steps and ranks.
        world: the ranks.
        directory: where traces are written.
        tracker: says the table.
    """

    def __init__(self, tracking: TrackingConfig, world: World, directory: Path, tracker: Tracker) -> None:
        self._steps, self._world, self._directory, self._tracker = set(tracking.profile), world, directory, tracker
        ranks = tracking.profile_ranks
        self._asked_ranks = range(world.size) if ranks is None else ranks
        self._writes = world.rank in self._asked_ranks
        self._first: int | None = None  # of the steps being profiled
        self._last = 0
        self._seconds = 0.0
        self._clock = Clock()
        self._profiler: Any = None
        self._problem: str | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is being profiled."""
        return self._first is not None

    def report_skipped_steps(self, done: int, total: int) -> None:
        """Say which of the steps will not be profiled: the run has `done` behind it, of `total`."""
        over = sorted(step for step in self._steps if step <= done)
        beyond = sorted(step for step in self._steps if step > total)
        if over:
            self._tracker.note(f"tracking.profile: {_listed(over)} done already, and not profiled")
        if beyond:
            self._tracker.warn(f"tracking.profile: {_listed(beyond)} beyond the run's last step, {total}")
        missing = [rank for rank in self._asked_ranks if rank >= self._world.size]
        if self._steps and missing:
            self._tracker.warn(
                f"tracking.profile_ranks={list(self._asked_ranks)}: there are {self._world.size} ranks, counted from 0"
            )

    @contextlib.contextmanager
    def of_step(self, step: int, *, last: bool = False) -> Iterator[None]:
        """Around a step, its batches included. A collective after the last of neighbouring steps.

        Args:
            step: counted from 1.
            last: what comes after it, an evaluation, does not belong into the same trace.
        """
        if step not in self._steps:
            yield
            return
        if self._first is None:
            self._first = step
            self._begin()
        self._last = step
        began = time.perf_counter()
        with active_clock(self._clock), timed_waits(self._clock), torch.profiler.record_function(f"step {step}"):
            yield
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)  # else its kernels would count for what comes after it
        self._seconds += time.perf_counter() - began
        if last or step + 1 not in self._steps:
            self._end()

    def __enter__(self) -> "StepProfiler":
        """Use it around the steps."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A run that ends before the steps do tells of those it did; one that fails lets go of the profiler."""
        if self._first is not None and kind is None:
            self._end()
        elif self._profiler is not None:
            with contextlib.suppress(Exception):
                self._profiler.stop()

    def _begin(self) -> None:
        self._clock, self._seconds, self._problem = Clock(), 0.0, None
        on_gpu = self._world.device.type == "cuda"
        activities = [ProfilerActivity.CPU] if self._writes else []
        activities += [ProfilerActivity.CUDA] if on_gpu else []  # of every rank, for how long it is in collectives
        if not activities:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on the terminal that it starts and stops
        try:
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        except Exception as error:  # somebody else profiles this process, or the driver does not let us
            self._profiler, self._problem = None, f"steps could not be profiled: {_one_line(error)}"

    def _end(self) -> None:
        assert self._first is not None
        steps = f"steps-{self._first}-{self._last}" if self._last > self._first else f"step-{self._first}"
        number, self._first = self._last - self._first + 1, None
        measured = self._measured(steps)
        found: list[RankTiming] = self._world.gather(measured)
        if self._world.is_main:
            for problem in dict.fromkeys(one.problem for one in found if one.problem is not None):
                self._tracker.warn(f"tracking.profile: {problem}")
            self._tell(steps, number, found)

    def _measured(self, steps: str) -> RankTiming:
        """What this rank has seen; writes its trace."""
        profiler, self._profiler = self._profiler, None
        clock = self._clock
        found = RankTiming(self._seconds, dict(clock.seconds), clock.waited, None, list(clock.waits), [], self._problem)
        if profiler is None:
            return found
        try:
            profiler.stop()
            if self._world.device.type == "cuda":
                _add_kernels(found, profiler.events())
            if self._writes:
                found.operators = _longest(profiler.key_averages(), on_gpu=self._world.device.type == "cuda")
                self._directory.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(self._directory / f"{steps}-rank-{self._world.rank}.json.gz"))
        except Exception as error:
            found.problem = f"rank {self._world.rank} has written no trace: {_one_line(error)}"
        return found

    def _tell(self, steps: str, number: int, found: Sequence[RankTiming]) -> None:
        """The table on the terminal, and the same figures of all ranks in a file."""
        shares = time_shares(found)
        told = steps.replace("-", " to ").replace("steps to", "steps").replace("step to", "step")
        each = max(one.seconds for one in found) / number
        self._tracker.note(f"profile of {told} ({each:.3f} s each), shares of each rank's time:")
        for line in _table(shares):
            self._tracker.note(f"  {line}")
        parts = ", ".join(f"{name} {share:.1%}" for name, share in shares[0].parts.items())
        self._tracker.note(f"  rank 0's parts of a step: {parts}")
        traced = next((rank for rank, one in enumerate(found) if one.operators), None)
        if traced is not None:
            self._tracker.note(f"  longest operators of rank {traced}:")
            widest = max(len(name) for name, *_ in found[traced].operators)
            for name, seconds, calls in found[traced].operators:
                share = seconds / found[traced].seconds
                self._tracker.note(f"    {name:<{widest}}  {share:6.1%}  {calls / number:8,.0f} a step")
            self._tracker.note(f"  traces: {self._directory}/{steps}-rank-*.json.gz, to be opened at ui.perfetto.dev")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            content = {"steps": number, "ranks": [asdict(one) for one in shares]}
            (self._directory / f"{steps}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._tracker.warn(f"tracking.profile: the shares could not be written: {_one_line(error)}")


def time_shares(found: Sequence[RankTiming]) -> list[TimeShares]:
    """Each rank's shares, from what all ranks have measured.

    All ranks run the same collectives in the same order. The rank that is in one for the shortest time came last and
    waited for nobody: so long it takes by itself, and what others are in it beyond that they wait.
    """
    told = [one.collectives for one in found]
    comparable = all(len(one) == len(told[0]) for one in told)
    least = sum(map(min, zip(*told, strict=True))) if comparable else 0.0
    shares = []
    for one in found:
        total = max(one.seconds, 1e-9)
        data = one.spans.get(BATCHES, 0.0) / total
        in_collectives = sum(one.collectives)
        late = 1.0 - least / in_collectives if comparable and in_collectives > 0 else 0.0
        alone = one.alone / total
        parts = {name: seconds / total for name, seconds in one.spans.items() if name != BATCHES}
        compute = sum(parts.values()) if one.computed is None else one.computed / total
        # A GPU may compute while the host waits for the next batch.
        data = min(data, max(0.0, 1.0 - compute - alone))
        rest = 1.0 - compute - alone - data
        shares.append(TimeShares(one.seconds, compute, alone * (1.0 - late), alone * late, data, rest, parts))
    return shares


def _add_kernels(found: RankTiming, events: Iterable[Any]) -> None:
    """Seconds of a GPU's kernels, by whether they compute or communicate."""
    events = list(events)
    ours: Intervals = []
    others: Intervals = []
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kind = ours if "nccl" in event.name.lower() else others
            kind.append((event.time_range.start, event.time_range.end))
    found.computed = covered_length(others) / 1e6
    found.alone = exposed_nccl_seconds(events) if others else covered_length(ours) / 1e6
    found.collectives = [(end - start) / 1e6 for start, end in sorted(ours)]


def _longest(averages: Iterable[Any], *, on_gpu: bool) -> list[tuple[str, float, int]]:
    """Name, seconds of its own and calls of the operators that take most time."""
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    ours = ("step ", RANKS, "ProfilerStep")
    real = [one for one in averages if not one.is_user_annotation and not one.key.startswith(ours)]
    top = sorted(real, key=lambda one: getattr(one, key), reverse=True)[:LONGEST]
    return [(one.key[:60], getattr(one, key) / 1e6, one.count) for one in top if getattr(one, key) > 0]


def _table(shares: Sequence[TimeShares]) -> list[str]:
    heads = ["rank", "compute", "communication", "waiting for ranks", "waiting for data", "rest"]
    rows = [heads]
    for rank, one in enumerate(shares[:_RANKS_TOLD]):
        of = (one.compute, one.communication, one.ranks, one.data, one.rest)
        rows.append([str(rank), *(f"{share:.1%}" for share in of)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(shares) > _RANKS_TOLD:
        lines.append(f"... and {len(shares) - _RANKS_TOLD} more ranks")
    return lines


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps))
    return f"step {shown} is" if len(steps) == 1 else f"steps {shown} are"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
