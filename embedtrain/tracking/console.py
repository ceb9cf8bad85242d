"""What a run prints on standard output: a live display on a terminal, plain lines anywhere else."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from embedtrain.tracking.evaluation_table import EvaluationTable, Results, VectorTable, vector_rows, without_forms
from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.tracking.pages import standard_output
from embedtrain.tracking.step_line import (
    WAIT_METRICS,
    MetricText,
    PhaseLine,
    ProgressLine,
    StepTimer,
    fit,
    step_metrics,
    styled_line,
)
from embedtrain.utils.formatting import format_count, format_duration, mask_passwords, printable
from embedtrain.utils.streams import SafeStream

LONG_PHASE = 1.0  # seconds; the end of a shorter phase gets no line
PROGRESS_INTERVAL = 10.0  # seconds between a log's lines about progress


class Console:
    """Prints notes, phases, steps and evaluations.

    A terminal gets a live display at the bottom, with everything that is logged scrolling above it. A log file, a
    pipe or a dumb terminal gets one line per event, without escape codes, as it happens. If not `enabled`, every method
    is silent, as on all ranks but the first. `verbose` adds diagnostics to the lines of steps (`tracking.verbose`).
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
        """Print warnings."""
        for text in texts:
            self._print(Text.assemble(("warning: ", "bold yellow"), printable(mask_passwords(text))))

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show what the block does while it runs, and print how long it took."""
        text, started, outer = printable(text), self._now(), self._phase
        if self._is_live:
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
            if self._is_live:
                if activity != current_activity or self._phase is not line:  # a phase in the block replaces the line
                    started = self._now()
                current_activity = activity
                self._phase = line = PhaseLine(text, started, self._rich)
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
        self._print(styled_line(metrics, self._widths))

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

    def _column_width(self, metric: MetricText) -> int:
        return max(self._widths.get(metric.key, 0), len(metric.text))


def _restore_streams() -> None:
    # A forked child (a loader's worker) must not print through the display: a thread that the child does not have
    # may have held the display's lock at the fork, and printing would wait forever.
    for name in ("stdout", "stderr"):
        proxied = getattr(getattr(sys, name), "rich_proxied_file", None)
        if proxied is not None:
            setattr(sys, name, proxied)
