"""What a run says on its standard output: a live display on a terminal, plain lines anywhere else."""

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

from embedtrain.tracking.figures import ROOMY, Figure, Pace, duration, fit, step_figures
from embedtrain.tracking.progress import PhaseLine, ProgressLine, styled_line
from embedtrain.tracking.stream import UnbreakableStream
from embedtrain.tracking.table import EvaluationTable, Results

LONG_PHASE = 1.0  # seconds; the end of a shorter phase is not worth a line
BETWEEN_COUNTS = 10.0  # seconds between a log's lines on work that goes on


class Console:
    """Notes, phases, steps and evaluations as a person reads them.

    A terminal gets a display at its bottom that is kept up to date, with all that is logged scrolling above it.
    A log file, a pipe or a dumb terminal gets one line per event, without escape codes, as it happens.
    """

    def __init__(self, *, speaks: bool = True, terminal: RichConsole | None = None) -> None:
        """Say things on standard output.

        Args:
            speaks: False makes every method silent, as on all ranks but the first.
            terminal: where to say them instead.
        """
        # Whether stdout is a terminal is asked of stdout: rich alone would believe FORCE_COLOR, and fill a
        # log file with escape codes.
        self._rich = terminal or RichConsole(
            file=cast(TextIO, UnbreakableStream(sys.stdout)),
            force_terminal=sys.stdout is not None and sys.stdout.isatty(),
            force_jupyter=False,
            highlight=False,
        )
        self._speaks = speaks
        self._is_live = speaks and self._rich.is_terminal and self._rich.is_interactive
        self._live: Live | None = None
        self._phase: PhaseLine | None = None
        self._row: Mapping[str, float] | None = None
        self._pace: Pace | None = None
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
    def counted(self) -> Iterator[Callable[[str, int, int], None]]:
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
        self._pace = Pace(total_steps, start_step, started)
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
        figures = step_figures(row, self._total_steps, None if self._is_live else left)
        if self._is_live:
            figures = fit(figures, self._rich.width - 1, 2, self._column_width)
        else:
            figures = [figure for figure in figures if figure.rank < ROOMY]
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
        self.remember(results)

    def remember(self, results: Results) -> None:
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
            figures = step_figures(row, self._total_steps, left)
            lines.append(ProgressLine(figures, self._total_steps, self._live_widths))
        if phase is not None:
            lines.append(phase)
        return Group(*lines)

    def _column_width(self, figure: Figure) -> int:
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
