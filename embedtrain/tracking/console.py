"""What a run prints on standard output: a live display on a terminal and in a notebook, plain lines anywhere else."""

import contextlib
import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.tracking.pages import EvaluationTable, Results, VectorTable, standard_output, vector_rows, without_forms
from embedtrain.utils.formatting import format_count, format_duration, mask_passwords, printable
from embedtrain.utils.streams import NoOutput, SafeStream, warn_caller

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

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
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

    def __init__(self, text: str, started: float, console: RichConsole) -> None:
        # The dotted spinner is not ASCII.
        self._spinner = Spinner("line" if console.options.ascii_only else "dots", style="cyan")
        self.text = text
        self.started = started

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
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


class _NotebookOutput:
    """An output of a cell of Jupyter, which is replaced in place.

    It needs no widgets: every front end of Jupyter updates what has a `display_id`.
    """

    INTERVAL = 0.2  # seconds between updates

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = -math.inf

    @property
    def is_shown(self) -> bool:
        """Whether there is an output."""
        return self._handle is not None

    def show(self, content: RenderableType, now: float, *, is_final: bool = False) -> None:
        """Replace the output, unless the last time was a moment ago."""
        if now - self._last < self.INTERVAL and not is_final:
            return
        self._last = now
        from IPython import display  # of the kernel; no dependency of this package

        jupyter: Any = display
        # Not as rich writes to Jupyter: it would add an output instead of replacing this one.
        console = RichConsole(
            file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH, force_terminal=True, force_jupyter=False
        )
        console.print(content)
        html = jupyter.HTML(console.export_html(inline_styles=True, code_format=_NOTEBOOK_HTML))
        if self._handle is None:
            self._handle = jupyter.display(html, display_id=True)
        else:
            self._handle.update(html)


def _notebook_output() -> _NotebookOutput | None:
    """The output of a cell; None where standard output is none, or was redirected, as by `quiet`."""
    return _NotebookOutput() if type(sys.stdout).__module__ == "ipykernel.iostream" else None


_NOTEBOOK_WIDTH, _NOTEBOOK_LINES = 160, 8
_NOTEBOOK_HTML = '<pre style="background:none;line-height:normal;overflow-x:auto">{code}</pre>'
LONG_PHASE = 1.0  # seconds; the end of a shorter phase gets no line
PROGRESS_INTERVAL = 10.0  # seconds between a log's lines about progress


class Console:
    """Prints notes, phases, steps and evaluations.

    A terminal gets a live display at the bottom, with everything that is logged scrolling above it. A cell of a
    notebook gets one output that is replaced in place: the last logged steps, and the progress below them. A log file,
    a pipe or a dumb terminal gets one line per event, without escape codes, as it happens. If not `enabled`, every
    method is silent, as on all ranks but the first. `verbose` adds diagnostics to the lines of steps
    (`tracking.verbose`).
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        verbose: bool = False,
        terminal: RichConsole | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._rich = terminal or standard_output()
        self._enabled, self._verbose = enabled, verbose
        self._is_live = enabled and self._rich.is_terminal and self._rich.is_interactive
        self._notebook = _notebook_output() if enabled and terminal is None else None
        self._last_steps: deque[Text] = deque(maxlen=_NOTEBOOK_LINES)  # in a notebook
        self._depth = 0  # of displays in a notebook
        self._now = clock or (self._rich.get_time if self._is_live else time.monotonic)
        self._live: Live | None = None
        self._phase: PhaseLine | None = None
        self._row: Mapping[str, float] | None = None
        self._timer: StepTimer | None = None
        self._widths: dict[str, int] = {}  # of the columns of logged lines
        self._columns: dict[str, None] = {}  # of lines without a terminal, which scripts read: once there, they stay
        self._previous: dict[str, Mapping[str, float]] = {}
        self._previous_step: int | None = None
        if self._is_live:
            os.register_at_fork(after_in_child=_restore_streams)

    def note(self, text: str) -> None:
        """Print a message."""
        self._print(Text(printable(mask_passwords(text))))

    def warn(self, *texts: str) -> None:
        """Print warnings; without a standard output (`quiet`), give them to Python's `warnings`."""
        for text in texts:
            if self._enabled and isinstance(sys.stdout, NoOutput):
                warn_caller(printable(mask_passwords(text)))
            self._print(Text.assemble(("warning: ", "bold yellow"), printable(mask_passwords(text))))

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show what the block does while it runs, and print how long it took."""
        text, started, outer = printable(text), self._now(), self._phase
        if self._is_live or self._notebook is not None:
            self._phase = PhaseLine(text, started, self._rich)
        else:
            self._print(Text(text))  # at its start: when a run hangs, the last line of its log says where
        try:
            with self._display():
                yield
        finally:
            self._phase = outer
        seconds = self._now() - started
        if self._is_live and self._row is None:
            self._print(Text.assemble(text, (f"  {seconds:.1f} s", "dim")))
        elif not self._is_live and seconds >= LONG_PHASE:
            self._print(Text(f"{text}: took {seconds:.1f} s"))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show progress that the block reports as (activity, parts done, total); a log gets a line now and then."""
        outer, last_line = self._phase, self._now()
        current_activity, line, started = "", outer, last_line

        def report(activity: str, done: int, total: int) -> None:
            nonlocal current_activity, line, started, last_line
            text = f"{printable(activity)}  {done:,}/{total:,}"
            if self._is_live or self._notebook is not None:
                if activity != current_activity or self._phase is not line:  # a phase in the block replaces the line
                    started = self._now()
                current_activity = activity
                self._phase = line = PhaseLine(text, started, self._rich)
                self._update_notebook()
            elif self._now() - last_line >= PROGRESS_INTERVAL:
                last_line = self._now()
                self._print(Text(text))

        try:
            with self._display():
                yield report
        finally:
            self._phase = outer

    @contextlib.contextmanager
    def training(self, total_steps: int, start_step: int = 0) -> Iterator[None]:
        """Show progress while the block trains from `start_step` (steps done before) to `total_steps`."""
        started = self._now()
        self._timer = StepTimer(total_steps, start_step, started)
        self._row = {"step": start_step}
        self._widths["step"] = len(f"step {total_steps}/{total_steps}")
        try:
            with self._display():
                yield
            done = int(self._row["step"]) - start_step
        finally:
            self._row, self._timer = None, None
        self._print(Text(f"trained {format_count(done, 'step')} in {format_duration(self._now() - started)}"))

    def advance(self, step: int) -> None:
        """Move the bar to `step`, which is done but not logged."""
        if self._timer is not None:
            self._timer.observe(step, self._now())
            self._row = {**(self._row or {}), "step": step}
            self._update_notebook()

    def step(self, row: Mapping[str, float]) -> None:
        """Print the metrics of a logged step; `step_metrics` selects and formats them."""
        self.advance(int(row["step"]))
        remaining = self._timer.remaining(self._now()) if self._timer else None
        if self._timer is not None:
            self._row = row
        if self._is_live:
            metrics = step_metrics(row, self._total_steps, None, verbose=self._verbose)
            if not self._verbose:  # otherwise the terminal breaks long lines
                metrics = fit(metrics, self._rich.width - 1, 2, self._column_width)
        else:
            self._columns |= dict.fromkeys((*row, *WAIT_METRICS))
            metrics = step_metrics(row, self._total_steps, remaining, columns=self._columns, verbose=self._verbose)
        line = styled_line(metrics, self._widths)
        if self._notebook is None:
            self._print(line)
        else:
            line.no_wrap, line.overflow = True, "ignore"  # the output scrolls
            self._last_steps.append(line)
            self._update_notebook()

    def evaluation(
        self,
        step: int,
        results: Results,
        *,
        datasets: Mapping[str, DatasetInfo] | None = None,
        title: str | None = None,
        footer: str = "",
    ) -> None:
        """Print the results of the evaluation after `step`, as `{set: {metric: value}}`, and their changes.

        With `datasets`, by set, a column shows the kind of each set, and whether only a subset was measured. `footer`
        is a line below the tables.
        """
        if not self._enabled or not results:
            return
        title = title or f"evaluation at step {step}{', before training' if step == 0 else ''}"
        measured = {info.precision: None for name in results if (info := (datasets or {}).get(name)) and info.precision}
        if measured:
            title += f", in {' and '.join(measured)}"
        if self._previous_step is not None and any(name in self._previous for name in results):
            title += f" (changes since step {self._previous_step})"
        lines: list[RenderableType] = [Text(printable(title), style="bold")]
        for table in EvaluationTable.of(without_forms(results, datasets or {}), self._previous, datasets or {}):
            if self._is_live:
                grid, omitted = table.for_terminal(self._rich.width - 1)
                lines.append(grid)
                if omitted:
                    lines.append(Text(printable(f"also in metrics.jsonl: {', '.join(omitted)}"), style="dim"))
            else:
                lines += [Text(f"  {line}") for line in table.plain_lines()]
        if rows := vector_rows(results, datasets or {}):
            forms = VectorTable(rows)
            lines.append(Text("vectors, by the bytes of a document:", style="dim" if self._is_live else ""))
            lines += [forms.for_terminal()] if self._is_live else [Text(f"  {line}") for line in forms.plain_lines()]
        if footer:
            lines.append(Text(printable(f"  {footer}"), style="dim"))
        for line in lines:
            if isinstance(line, Text):
                self._print(line)
            else:
                self._rich.print(line)
        self.set_previous(step, results)

    def set_previous(self, step: int, results: Results) -> None:
        """Compare the next evaluation with these results of `step`, as when a run resumes."""
        self._previous.update(results)
        self._previous_step = step

    def close(self) -> None:
        """End the live display."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _total_steps(self) -> int:
        return 0 if self._timer is None else self._timer.total_steps

    def _print(self, line: Text) -> None:
        if not self._enabled:
            return
        if self._is_live:
            self._rich.print(line)
        else:
            # Not through rich, which would wrap it at the width that it assumes for a log file.
            self._rich.file.write(f"{line.plain}\n")
            self._rich.file.flush()

    @contextlib.contextmanager
    def _display(self) -> Iterator[None]:
        """Keep the live display on the screen during the block; in a nested block it stays."""
        if self._notebook is not None:
            self._depth += 1
            try:
                self._update_notebook()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._notebook.is_shown:
                    self._notebook.show(Group(*self._last_steps), self._now(), is_final=True)
            return
        if not self._is_live or self._live is not None:
            yield
            return
        live_widths = {"step": len(f"{self._total_steps}/{self._total_steps}")}
        # A stream that the user redirected (2> errors.log) stays redirected.
        self._live = Live(
            console=self._rich,
            get_renderable=lambda: self._render(live_widths),
            transient=True,
            refresh_per_second=5,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        for name in ("stdout", "stderr"):
            if isinstance(stream := getattr(sys, name), FileProxy):
                setattr(sys, name, SafeStream(cast(TextIO, stream)))  # rich would interpret escape sequences
        # Show the cursor again: a rank that torchrun kills could not restore it, and the user's shell would have none.
        self._rich.show_cursor(True)
        try:
            yield
        finally:
            self.close()

    def _render(self, widths: dict[str, int]) -> RenderableType:
        """The live display; rich calls this several times a second, in its own thread."""
        lines: list[RenderableType] = []
        row, timer, phase = self._row, self._timer, self._phase
        if row is not None:
            remaining = timer.remaining(self._now()) if timer is not None else None
            lines.append(ProgressLine(step_metrics(row, self._total_steps, remaining), self._total_steps, widths))
        if phase is not None:
            lines.append(phase)
        return Group(*lines)

    def _update_notebook(self) -> None:
        has_content = self._row is not None or self._phase is not None
        if self._notebook is not None and self._depth and has_content:
            live = self._render({"step": len(f"{self._total_steps}/{self._total_steps}")})
            self._notebook.show(Group(*self._last_steps, live), self._now())

    def _column_width(self, metric: MetricText) -> int:
        return max(self._widths.get(metric.key, 0), len(metric.text))


def _restore_streams() -> None:
    # A forked child (a loader's worker) must not print through the display: a thread that the child does not have
    # may have held the display's lock at the fork, and printing would wait forever.
    for name in ("stdout", "stderr"):
        proxied = getattr(getattr(sys, name), "rich_proxied_file", None)
        if proxied is not None:
            setattr(sys, name, proxied)
