"""Numbers as people read them: the figures of a step, their form, and which go first when a line is too long."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

WAIT_METRICS = ("data_wait", "communication")
MIN_WAIT_SHOWN = 0.05
LOSS_METRIC_RANK = 10  # rank of what a loss tells besides its value
OPTIONAL_RANK = 13  # from this rank on only a wide terminal shows a figure; a log file has no width to fill


@dataclass(frozen=True)
class MetricText:
    """One `label value` of a line; the lower `rank`, the longer it stays when space runs out."""

    key: str
    label: str
    value: str
    rank: int

    @property
    def text(self) -> str:
        """What is printed."""
        return f"{self.label} {self.value}"


def rate(value: float) -> str:
    """A number per second: `71,344`, `812`, `3.4`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# key, label, form, rank
_COLUMNS: list[tuple[str, str, Callable[[float], str], int]] = [
    ("loss", "loss", lambda value: f"{value:.4f}", 1),
    ("grad_norm", "grad_norm", lambda value: f"{value:.2f}" if abs(value) < 1000 else f"{value:.1e}", 7),
    ("lr", "lr", lambda value: f"{value:.1e}", 3),
    ("samples_per_s", "samples/s", rate, 4),
    ("tokens_per_s", "tokens/s", rate, 6),
    ("padding", "padding", lambda value: f"{value:.1%}", 8),
    ("memory_gib", "memory", lambda value: f"{value:.1f} GiB", 5),
    ("mfu", "mfu", lambda value: f"{value:.1%}", 9),
    ("data_wait", "waiting for data", lambda value: f"{value:.0%}", 9),
    ("communication", "communication", lambda value: f"{value:.0%}", 9),
    ("positive_similarity", "positive", lambda value: f"{value:.3f}", 11),
    ("hardest_negative_similarity", "hardest negative", lambda value: f"{value:.3f}", 12),
    ("false_negatives", "false negatives", lambda value: f"{value:.2%}", OPTIONAL_RANK),
    ("uniformity", "uniformity", lambda value: f"{value:.2f}", OPTIONAL_RANK + 1),
    ("alignment", "alignment", lambda value: f"{value:.3f}", OPTIONAL_RANK + 2),
]
_OF_BATCHES = {key for key, *_, rank in _COLUMNS if rank > LOSS_METRIC_RANK}  # NaN where a batch has nothing to measure

_KNOWN = {"step", "model_tflops", *(key for key, *_ in _COLUMNS)}  # of which mfu says as much


def _measure(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.1e}"


def step_metrics(row: Mapping[str, float], total_steps: int, left: float | None) -> list[MetricText]:
    """The figures of a logged step, in the order they are printed.

    Args:
        row: `padding`, `mfu`, `data_wait` and `communication` are shares (0.031 is 3.1 %), `memory_gib` is GiB, `lr`
            and others as they are.
            Keys that are unknown here are the loss's own measures (accuracy, temperature, a part's value); they
            follow the loss, and are the first to go where space runs out.
        total_steps: 0 when it is not known.
        left: seconds until training ends, if known.
    """
    step = int(row["step"])
    figures = [MetricText("step", "step", f"{step}/{total_steps}" if total_steps else str(step), 0)]
    for key, label, form, rank in _COLUMNS:
        value = row.get(key)
        # A loader that keeps up is no news; one that does not is why a GPU idles.
        if value is None or (key in WAIT_METRICS and value < MIN_WAIT_SHOWN):
            continue
        if key in _OF_BATCHES and math.isnan(value):
            continue
        figures.append(MetricText(key, label, form(value) if math.isfinite(value) else str(value), rank))
        if key == "loss":
            figures += [
                MetricText(name, name, _measure(row[name]), LOSS_METRIC_RANK) for name in row if name not in _KNOWN
            ]
    if left is not None:
        figures.append(MetricText("left", "left", duration(left), 2))
    return figures


def fit(figures: Iterable[MetricText], width: int, gap: int, size: Callable[[MetricText], int]) -> list[MetricText]:
    """Those figures that fit into `width` columns with `gap` between them, the more important ones first."""
    figures = list(figures)
    chosen, used = set(), -gap
    for figure in sorted(figures, key=lambda figure: figure.rank):
        if used + gap + size(figure) <= width:
            used += gap + size(figure)
            chosen.add(figure.key)
    return [figure for figure in figures if figure.key in chosen]


def duration(seconds: float) -> str:
    """`2:10`, `1:02:10`, `3d 4h`."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class StepTimer:
    """How long the rest will take, by how long the last steps took (evaluations and checkpoints among them)."""

    def __init__(self, total_steps: int, start_step: int, now: float) -> None:
        self._total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque([(start_step, now)], maxlen=20)

    def observe(self, step: int, now: float) -> None:
        """`step` steps are done at time `now` (seconds)."""
        if step > self._seen[-1][0]:
            self._seen.append((step, now))

    def left(self, now: float) -> float | None:
        """Seconds from `now` until the last step is done; None before the first step."""
        (first_step, first_time), (last_step, last_time) = self._seen[0], self._seen[-1]
        if last_step == first_step or not self._total_steps:
            return None
        seconds_a_step = (last_time - first_time) / (last_step - first_step)
        return max(0.0, (self._total_steps - last_step) * seconds_a_step - (now - last_time))
