"""The line of a training step on the terminal: which metrics it shows, their format, and the live progress bar."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from embedtrain.utils.formatting import printable

WAIT_METRICS = ("data_wait", "communication")
# Ranks of metrics: the loss returns others than its value and `accuracy`; diagnostics are printed on request.
_LOSS_METRIC_RANK, _DIAGNOSTIC_RANK = 9, 10
_MISSING = "-"
_GAP = 2
_ONLY_IN_LOGGED_LINES = {"grad_norm"}
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 10, 40


@dataclass(frozen=True)
class MetricText:
    """One `label value` of a line. The lower `rank`, the longer it stays when the line is too narrow."""

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


def _loss_metric(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.1e}"


# key, label, format, rank
_COLUMNS: list[tuple[str, str, Callable[[float], str], int]] = [
    ("loss", "loss", lambda value: f"{value:.4f}", 1),
    ("accuracy", "accuracy", _loss_metric, 2),
    ("grad_norm", "grad_norm", lambda value: f"{value:.2f}" if abs(value) < 1000 else f"{value:.1e}", 8),
    ("lr", "lr", lambda value: f"{value:.1e}", 4),
    ("samples_per_s", "samples/s", rate, 5),
    ("tokens_per_s", "tokens/s", rate, 7),
    ("memory_gib", "memory", lambda value: f"{value:.1f} GiB", 6),
    ("mfu", "mfu", lambda value: f"{value:.1%}", 10),
    ("matmul_fraction", "of matmul", lambda value: f"{value:.1%}", 10),
    ("padding", "padding", lambda value: f"{value:.1%}", 11),
    ("data_wait", "waiting for data", lambda value: f"{value:.0%}", 12),
    ("communication", "communication", lambda value: f"{value:.0%}", 13),
    ("positive_similarity", "positive", lambda value: f"{value:.3f}", 14),
    ("hardest_negative_similarity", "hardest negative", lambda value: f"{value:.3f}", 15),
    ("false_negatives", "false negatives", lambda value: f"{value:.2%}", 16),
    ("uniformity", "uniformity", lambda value: f"{value:.2f}", 17),
    ("alignment", "alignment", lambda value: f"{value:.3f}", 18),
]
# The others are shown instead of model_tflops.
_KNOWN_KEYS = {"step", "model_tflops", *(key for key, *_ in _COLUMNS)}


def step_metrics(
    row: Mapping[str, float],
    total_steps: int,
    remaining: float | None,
    *,
    columns: Iterable[str] | None = None,
    verbose: bool = False,
) -> list[MetricText]:
    """The metrics of a logged step, in the order in which they are printed.

    Args:
        row: metrics by key. `padding`, `mfu`, `data_wait` and `communication` are fractions (0.031 is 3.1 %),
            `memory_gib` is GiB. Unknown keys are metrics of the loss (temperature, a source's loss, a component's
            value); they follow the accuracy, and are dropped first if the line is too narrow.
        total_steps: 0 if unknown.
        remaining: seconds until training ends, if known.
        columns: keys that a line without a terminal has, also where the row lacks a value; None: those of the row.
        verbose: whether to include diagnostics, and all metrics of the loss in a line without a terminal.
    """
    step = int(row["step"])
    metrics = [MetricText("step", "step", f"{step}/{total_steps}" if total_steps else str(step), 0)]
    keys = dict.fromkeys(row if columns is None else columns)
    of_loss = [key for key in keys if key not in _KNOWN_KEYS] if verbose or columns is None else []

    def add(key: str, label: str, form: Callable[[float], str], rank: int) -> None:
        value = row.get(key)
        if value is not None and not math.isnan(value):
            metrics.append(MetricText(key, label, form(value) if math.isfinite(value) else str(value), rank))
        elif columns is not None or key == "loss":
            metrics.append(MetricText(key, label, _MISSING if value is None else str(value), rank))

    for key, label, form, rank in _COLUMNS:
        if key in keys and (verbose or rank < _DIAGNOSTIC_RANK):
            add(key, label, form, rank)
        if key == "accuracy":
            for name in of_loss:
                add(name, printable(name), _loss_metric, _LOSS_METRIC_RANK)
    if remaining is not None:
        metrics.append(MetricText("left", "left", _clock(remaining), 3))
    elif columns is not None:
        metrics.append(MetricText("left", "left", _MISSING, 3))
    return metrics


def fit(metrics: Iterable[MetricText], width: int, gap: int, size: Callable[[MetricText], int]) -> list[MetricText]:
    """The metrics of the lowest ranks that fit into `width` columns with `gap` between them."""
    metrics = list(metrics)
    chosen, used = set(), -gap
    for metric in sorted(metrics, key=lambda metric: metric.rank):
        used += gap + size(metric)
        if used > width:  # a narrower metric of a higher rank would come and go from line to line
            break
        chosen.add(metric.key)
    of_sources = {metric.key for metric in metrics if metric.key.startswith("loss/")}
    if not of_sources <= chosen:  # the losses of some sources only would mislead
        chosen -= of_sources
    return [metric for metric in metrics if metric.key in chosen]


def _clock(seconds: float) -> str:
    """`2:10`, `1:02:10`, `3d 4h`: narrower than format_duration, so that the line has space for metrics."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class StepTimer:
    """Estimates the remaining time from the last steps, including their evaluations and checkpoints."""

    def __init__(self, total_steps: int, start_step: int, now: float) -> None:
        self.total_steps = total_steps
        self._times: deque[tuple[int, float]] = deque([(start_step, now)], maxlen=20)

    def observe(self, step: int, now: float) -> None:
        """`step` steps are done at time `now` (seconds)."""
        if step > self._times[-1][0]:
            self._times.append((step, now))

    def remaining(self, now: float) -> float | None:
        """Seconds from `now` until the last step is done; None before the first step."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step == first_step or not self.total_steps:
            return None
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        return max(0.0, (self.total_steps - last_step) * seconds_per_step - (now - last_time))


class ProgressLine:
    """One line with a progress bar and the metrics that fit beside it."""

    def __init__(self, metrics: list[MetricText], total_steps: int, widths: dict[str, int]) -> None:
        """`widths` stores the largest width of each metric so far, so that the line does not jitter."""
        self._widths = widths
        self._metrics = [
            metric for metric in metrics if metric.key not in _ONLY_IN_LOGGED_LINES and metric.rank < _LOSS_METRIC_RANK
        ]
        self._total_steps = total_steps
        self._step = int(metrics[0].value.split("/")[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich with the available width."""
        width = options.max_width - 1  # a full last column makes some terminals break the line
        beside_bar = width - _MIN_BAR_WIDTH - _GAP
        texts = {metric.key: self._padded(metric) for metric in self._metrics}
        shown = fit(self._metrics, beside_bar, _GAP, lambda metric: texts[metric.key].cell_len)
        used = sum(texts[metric.key].cell_len + _GAP for metric in shown)
        line = Table.grid(padding=(0, _GAP, 0, 0))
        cells: list[ProgressBar | Text] = []
        if self._total_steps:
            bar = min(_MAX_BAR_WIDTH, width - used if shown else width)
            line.add_column(width=bar)
            cells.append(ProgressBar(self._total_steps, self._step, bar, complete_style="cyan"))
        for metric in shown:
            line.add_column(no_wrap=True, overflow="crop")
            cells.append(texts[metric.key])
        line.add_row(*cells)
        yield line

    def _padded(self, metric: MetricText) -> Text:
        text = _styled(metric)
        missing = self._widths.get(metric.key, 0) - text.cell_len
        self._widths[metric.key] = text.cell_len + max(0, missing)
        if metric.key == "step":
            text.pad_left(max(0, missing))
        else:
            text.pad_right(max(0, missing))
        return text


class PhaseLine:
    """One line with the current activity and its duration so far."""

    def __init__(self, text: str, started: float, console: Console) -> None:
        # The dotted spinner is not ASCII.
        self._spinner = Spinner("line" if console.options.ascii_only else "dots", style="cyan")
        self.text = text
        self.started = started

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich with the available width."""
        now = console.get_time()
        seconds = f"  {_clock(now - self.started)}"
        text = Text(self.text)
        text.truncate(max(1, options.max_width - 3 - len(seconds)), overflow="ellipsis")
        yield _joined(self._spinner.render(now), text, Text(seconds, style="dim"))


def _joined(spinner: Any, text: Text, seconds: Text) -> Text:
    line = spinner.copy() if isinstance(spinner, Text) else Text()
    line.append(" ").append_text(text).append_text(seconds)
    line.no_wrap, line.overflow = True, "crop"
    return line


def _styled(metric: MetricText) -> Text:
    match metric.key:
        case "samples_per_s" | "tokens_per_s":
            return Text.assemble(metric.value, (f" {metric.label}", "dim"))
        case "memory_gib":
            return Text(metric.value)
        case "step":  # without its label: it is next to the bar
            return Text(metric.value, style="bold")
        case "loss":
            return Text.assemble((f"{metric.label} ", "dim"), (metric.value, "bold"))
        case "left":
            return Text.assemble((f"{metric.label} ", "dim"), (metric.value, "cyan"))
        case _:
            return Text.assemble((f"{metric.label} ", "dim"), metric.value)


def styled_line(metrics: list[MetricText], widths: dict[str, int]) -> Text:
    """A logged step as one line.

    `widths` stores the largest width of each column so far, so that the metrics of a run are aligned.
    """
    line = Text()
    for metric in metrics:
        widths[metric.key] = max(widths.get(metric.key, 0), len(metric.text))
        is_wait = metric.key in WAIT_METRICS
        line.append("  " if line else "").append(f"{metric.label} ", style="yellow" if is_wait else "dim")
        line.append(metric.value, style="yellow" if is_wait else "bold" if metric.key == "loss" else "")
        line.append(" " * (widths[metric.key] - len(metric.text)))
    line.rstrip()
    return line
