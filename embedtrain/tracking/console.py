"""What a run says on its standard output: a live display on a terminal, plain lines anywhere else."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from embedtrain.tracking.formatting import (
    LOSS_METRIC_RANK,
    OPTIONAL_RANK,
    WAIT_METRICS,
    MetricText,
    StepTimer,
    duration,
    fit,
    step_metrics,
)
from embedtrain.tracking.pages import SafeStream

_GAP = 2
_LEFT_OUT = {"grad_norm", "padding", "data_wait", "communication"}  # the logged lines above have them
_SHORTEST_BAR, _LONGEST_BAR = 10, 40


class ProgressLine:
    """One line, never more, of a bar as long as there is room for and the figures that fit beside it."""

    def __init__(self, figures: list[MetricText], total_steps: int, widths: dict[str, int]) -> None:
        """`widths` remembers how wide each figure ever was, so that the line does not jitter."""
        self._widths = widths
        self._figures = [figure for figure in figures if figure.key not in _LEFT_OUT and figure.rank < LOSS_METRIC_RANK]
        self._total_steps = total_steps
        self._step = int(figures[0].value.split("/")[0])

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        """Called by rich with the room there is."""
        width = options.max_width - 1  # a full last column makes some terminals break the line
        with_bar = width - _SHORTEST_BAR - _GAP
        texts = {figure.key: self._padded(figure) for figure in self._figures}
        shown = fit(self._figures, with_bar, _GAP, lambda figure: texts[figure.key].cell_len)
        taken = sum(texts[figure.key].cell_len + _GAP for figure in shown)
        line = Table.grid(padding=(0, _GAP, 0, 0))
        cells: list[ProgressBar | Text] = []
        if self._total_steps:
            bar = min(_LONGEST_BAR, width - taken if shown else width)
            line.add_column(width=bar)
            cells.append(ProgressBar(self._total_steps, self._step, bar, complete_style="cyan"))
        for figure in shown:
            line.add_column(no_wrap=True, overflow="crop")
            cells.append(texts[figure.key])
        line.add_row(*cells)
        yield line

    def _padded(self, figure: MetricText) -> Text:
        text = _styled(figure)
        missing = self._widths.get(figure.key, 0) - text.cell_len
        self._widths[figure.key] = text.cell_len + max(0, missing)
        if figure.key == "step":
            text.pad_left(max(0, missing))
        else:
            text.pad_right(max(0, missing))
        return text


class PhaseLine:
    """What is going on right now and for how long."""

    def __init__(self, text: str, started: float, console: RichConsole) -> None:
        # The dotted spinner is not ASCII.
        self._spinner = Spinner("line" if console.options.ascii_only else "dots", style="cyan")
        self.text = text
        self.started = started

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        """Called by rich with the room there is."""
        now = console.get_time()
        seconds = f"  {duration(now - self.started)}"
        text = Text(self.text)
        text.truncate(max(1, options.max_width - 3 - len(seconds)), overflow="ellipsis")
        yield _joined(self._spinner.render(now), text, Text(seconds, style="dim"))


def _joined(spinner: Any, text: Text, seconds: Text) -> Text:
    line = spinner.copy() if isinstance(spinner, Text) else Text()
    line.append(" ").append_text(text).append_text(seconds)
    line.no_wrap, line.overflow = True, "crop"
    return line


def _styled(figure: MetricText) -> Text:
    match figure.key:
        case "samples_per_s" | "tokens_per_s":
            return Text.assemble(figure.value, (f" {figure.label}", "dim"))
        case "memory_gib":
            return Text(figure.value)
        case "step":  # without its label: it stands beside the bar
            return Text(figure.value, style="bold")
        case "loss":
            return Text.assemble((f"{figure.label} ", "dim"), (figure.value, "bold"))
        case "left":
            return Text.assemble((f"{figure.label} ", "dim"), (figure.value, "cyan"))
        case _:
            return Text.assemble((f"{figure.label} ", "dim"), figure.value)


def styled_line(figures: list[MetricText], widths: dict[str, int]) -> Text:
    """A logged step as one line.

    `widths` remembers how wide each column ever was, so that a run's figures stand below each other.
    """
    line = Text()
    for figure in figures:
        widths[figure.key] = max(widths.get(figure.key, 0), len(figure.text))
        warns = figure.key in WAIT_METRICS
        line.append("  " if line else "").append(f"{figure.label} ", style="yellow" if warns else "dim")
        line.append(figure.value, style="yellow" if warns else "bold" if figure.key == "loss" else "")
        line.append(" " * (widths[figure.key] - len(figure.text)))
    line.rstrip()
    return line


Results = Mapping[str, Mapping[str, float]]

_GAP_table = 3  # between columns; what rich puts there for SIMPLE_HEAD with a padding of one
_NAME_WIDTH = 24


class EvaluationTable:
    """Sets that are measured by the same metrics, as cells; sets of another kind are another table."""

    def __init__(self, results: Results, previous: Results, metrics: tuple[str, ...]) -> None:
        self._results = results
        self._previous = previous
        self._metrics = metrics

    @classmethod
    def of(cls, results: Results, previous: Results) -> list["EvaluationTable"]:
        """One table for each kind of set in `results`, in the order in which they come."""
        kinds: dict[tuple[str, ...], dict[str, Mapping[str, float]]] = {}
        for name, figures in results.items():
            kinds.setdefault(tuple(figures), {})[name] = figures
        return [cls(sets, previous, metrics) for metrics, sets in kinds.items()]

    def plain_lines(self) -> list[str]:
        """Aligned lines with every metric and every change."""
        rows = self._cells(len(self._metrics), len(self._metrics))
        widths = _widths(rows)
        return [
            "  ".join(_padded(cell.plain, width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]

    def for_terminal(self, width: int) -> tuple[Table, list[str]]:
        """The table in at most `width` columns, and the metrics that found no room in it."""
        count = len(self._metrics)
        # First all but the main metric lose their change, then the last metrics go.
        choices = [(count, count), *((kept, 1) for kept in range(count, 0, -1)), (1, 0), (0, 0)]
        rows: list[list[Text]] = []
        kept = 0
        for kept, changes in choices:
            rows = self._cells(kept, changes)
            if sum(_widths(rows)) + _GAP_table * (len(rows[0]) - 1) <= width:
                break
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        for cell in rows[0]:
            table.add_column(cell, no_wrap=True, overflow="ellipsis")
        for row in rows[1:]:
            table.add_row(*row)
        return table, list(self._metrics[kept:])

    def _cells(self, metrics: int, changes: int) -> list[list[Text]]:
        """Heading and rows, with the first `metrics` metrics and a change for the first `changes` of them."""
        shown = self._metrics[:metrics]
        rows = [[Text("set"), *(Text(metric) for metric in shown)]]
        for name, figures in self._results.items():
            before = self._previous.get(name, {})
            row = [_shortened(name)]
            for place, metric in enumerate(shown):
                cell = Text(_value(figures[metric]), style="bold" if place == 0 else "")
                if place < changes and isinstance(figures[metric], float) and metric in before:
                    cell.append("  ").append(_change(figures[metric] - before[metric]))
                row.append(cell)
            rows.append(row)
        return rows


def _value(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,d}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def _change(change: float) -> Text:
    style = "dim" if abs(change) < 0.00005 else "not bold green" if change > 0 else "not bold red"
    return Text(f"{change:+.4f}", style=style)


def _shortened(name: str) -> Text:
    text = Text(name)
    text.truncate(_NAME_WIDTH, overflow="ellipsis")
    return text


def _widths(rows: list[list[Text]]) -> list[int]:
    return [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]


def _padded(text: str, width: int) -> str:
    # Not str.ljust: a Chinese character takes two columns.
    return text + " " * (width - cell_len(text))


LONG_PHASE = 1.0  # seconds; the end of a shorter phase is not worth a line
BETWEEN_COUNTS = 10.0  # seconds between a log's lines on work that goes on


class Console:
    """Notes, phases, steps and evaluations as a person reads them.

    A terminal gets a display at its bottom that is kept up to date, with all that is logged scrolling above it.
    A log file, a pipe or a dumb terminal gets one line per event, without escape codes, as it happens.
    """

    def __init__(self, *, enabled: bool = True, terminal: RichConsole | None = None) -> None:
        """Say things on standard output.

        Args:
            enabled: False makes every method silent, as on all ranks but the first.
            terminal: where to say them instead.
        """
        # Whether stdout is a terminal is asked of stdout: rich alone would believe FORCE_COLOR, and fill a
        # log file with escape codes.
        self._rich = terminal or RichConsole(
            file=cast(TextIO, SafeStream(sys.stdout)),
            force_terminal=sys.stdout is not None and sys.stdout.isatty(),
            force_jupyter=False,
            highlight=False,
        )
        self._speaks = enabled
        self._is_live = enabled and self._rich.is_terminal and self._rich.is_interactive
        self._live: Live | None = None
        self._phase: PhaseLine | None = None
        self._row: Mapping[str, float] | None = None
        self._pace: StepTimer | None = None
        self._total_steps = 0
        self._widths: dict[str, int] = {}  # of the columns of logged lines
        self._live_widths: dict[str, int] = {}
        self._previous: dict[str, Mapping[str, float]] = {}
        if self._is_live:
            os.register_at_fork(after_in_child=_give_streams_back)

    def note(self, text: str) -> None:
        """Say something in passing."""
        self._say(Text(text))

    def warn(self, text: str) -> None:
        """Say something the user should look at."""
        self._say(Text.assemble(("warning: ", "bold yellow"), text))

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show what is going on while the block runs, and say how long it took."""
        started, outer = self._now(), self._phase
        if self._is_live:
            self._phase = PhaseLine(text, started, self._rich)
        else:
            self._say(Text(text))  # at its start: when a run hangs, the last line of its log says where
        try:
            with self._shown():
                yield
        finally:
            self._phase = outer
        took = self._now() - started
        if self._is_live and self._row is None:
            self._say(Text.assemble(text, (f"  {took:.1f} s", "dim")))
        elif not self._is_live and took >= LONG_PHASE:
            self._say(Text(f"{text}: took {took:.1f} s"))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show how far work has come that tells (what, parts done, of how many); a log gets a line now and then."""
        outer, last = self._phase, self._now()

        def told(what: str, done: int, total: int) -> None:
            nonlocal last
            text = f"{what}  {done:,}/{total:,}"
            if self._is_live:
                shown = self._phase
                same = shown is not None and shown is not outer and shown.text.startswith(f"{what}  ")
                started = shown.started if same and shown is not None else self._now()
                self._phase = PhaseLine(text, started, self._rich)
            elif self._now() - last >= BETWEEN_COUNTS:
                last = self._now()
                self._say(Text(text))

        try:
            with self._shown():
                yield told
        finally:
            self._phase = outer

    @contextlib.contextmanager
    def training(self, total_steps: int, start_step: int = 0) -> Iterator[None]:
        """Show progress while the block trains from `start_step` (steps done before) to `total_steps`."""
        started = self._now()
        self._pace = StepTimer(total_steps, start_step, started)
        self._total_steps, self._row = total_steps, {"step": start_step}
        self._widths["step"] = len(f"step {total_steps}/{total_steps}")
        self._live_widths["step"] = len(f"{total_steps}/{total_steps}")
        try:
            with self._shown():
                yield
            done = int(self._row["step"]) - start_step
        finally:
            self._row, self._pace = None, None
        steps = "1 step" if done == 1 else f"{done} steps"
        self._say(Text(f"trained {steps} in {duration(self._now() - started)}"))

    def advance(self, step: int) -> None:
        """Move the bar to `step`, which is done but not logged."""
        if self._pace is not None:
            self._pace.observe(step, self._now())
            self._row = {**(self._row or {}), "step": step}

    def step(self, row: Mapping[str, float]) -> None:
        """Say the figures of a logged step; `figures.step_figures` tells which, and their units."""
        self.advance(int(row["step"]))
        left = self._pace.left(self._now()) if self._pace else None
        if self._pace is not None:
            self._row = row
        figures = step_metrics(row, self._total_steps, None if self._is_live else left)
        if self._is_live:
            figures = fit(figures, self._rich.width - 1, 2, self._column_width)
        else:
            figures = [figure for figure in figures if figure.rank < OPTIONAL_RANK]
        self._say(styled_line(figures, self._widths))

    def evaluation(self, step: int, results: Results, title: str | None = None) -> None:
        """Say what was measured after `step`, as `{set: {metric: value}}`, and how it changed since the last time."""
        if not self._speaks or not results:
            return
        lines: list[RenderableType] = [Text(title or f"evaluation at step {step}", style="bold")]
        for table in EvaluationTable.of(results, self._previous):
            if self._is_live:
                grid, left_out = table.for_terminal(self._rich.width - 1)
                lines.append(grid)
                if left_out:
                    lines.append(Text(f"also in metrics.jsonl: {', '.join(left_out)}", style="dim"))
            else:
                lines += [Text(f"  {line}") for line in table.plain_lines()]
        for line in lines:
            if isinstance(line, Text):
                self._say(line)
            else:
                self._rich.print(line)
        self.set_previous(results)

    def set_previous(self, results: Results) -> None:
        """Compare the next evaluation with these results, which were said before (by a run that is continued)."""
        self._previous.update(results)

    def close(self) -> None:
        """End the live display, whatever it shows."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, line: Text) -> None:
        if not self._speaks:
            return
        if self._is_live:
            self._rich.print(line)
        else:
            # Written as it is: rich would break it at the width it takes a log file to have.
            self._rich.file.write(f"{line.plain}\n")
            self._rich.file.flush()

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Keep the live display on the screen during the block; a block within a block changes nothing."""
        if not self._is_live or self._live is not None:
            yield
            return
        # A stream that the user sent elsewhere (2> errors.log) stays there.
        self._live = Live(
            console=self._rich,
            get_renderable=self._display,
            transient=True,
            refresh_per_second=5,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        # Visible again: a rank that torchrun kills could not bring the cursor back, and the user's shell would
        # be left without one.
        self._rich.show_cursor(True)
        try:
            yield
        finally:
            self.close()

    def _display(self) -> RenderableType:
        """What the live display shows now; called by rich several times a second, from a thread of its own."""
        lines: list[RenderableType] = []
        row, pace, phase = self._row, self._pace, self._phase
        if row is not None:
            left = pace.left(self._now()) if pace is not None else None
            figures = step_metrics(row, self._total_steps, left)
            lines.append(ProgressLine(figures, self._total_steps, self._live_widths))
        if phase is not None:
            lines.append(phase)
        return Group(*lines)

    def _column_width(self, figure: MetricText) -> int:
        return max(self._widths.get(figure.key, 0), len(figure.text))

    def _now(self) -> float:
        return self._rich.get_time() if self._is_live else time.monotonic()


def _give_streams_back() -> None:
    # In a forked child (a loader's worker) what is printed must not go through the display: the display's lock
    # may have been held at the fork, by a thread that the child does not have, and printing would wait for ever.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)
