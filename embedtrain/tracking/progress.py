"""The live line at the bottom of a terminal: bar, step, figures, time left, and what is going on right now."""

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from embedtrain.tracking.figures import MEASURES, WAITS, Figure, duration, fit

_GAP = 2
_LEFT_OUT = {"grad_norm", "padding", "data_wait", "communication"}  # the logged lines above have them
_SHORTEST_BAR, _LONGEST_BAR = 10, 40


class ProgressLine:
    """One line, never more, of a bar as long as there is room for and the figures that fit beside it."""

    def __init__(self, figures: list[Figure], total_steps: int, widths: dict[str, int]) -> None:
        """`widths` remembers how wide each figure ever was, so that the line does not jitter."""
        self._widths = widths
        self._figures = [figure for figure in figures if figure.key not in _LEFT_OUT and figure.rank < MEASURES]
        self._total_steps = total_steps
        self._step = int(figures[0].value.split("/")[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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

    def _padded(self, figure: Figure) -> Text:
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

    def __init__(self, text: str, started: float, console: Console) -> None:
        # The dotted spinner is not ASCII.
        self._spinner = Spinner("line" if console.options.ascii_only else "dots", style="cyan")
        self.text = text
        self.started = started

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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


def _styled(figure: Figure) -> Text:
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


def styled_line(figures: list[Figure], widths: dict[str, int]) -> Text:
    """A logged step as one line.

    `widths` remembers how wide each column ever was, so that a run's figures stand below each other.
    """
    line = Text()
    for figure in figures:
        widths[figure.key] = max(widths.get(figure.key, 0), len(figure.text))
        warns = figure.key in WAITS
        line.append("  " if line else "").append(f"{figure.label} ", style="yellow" if warns else "dim")
        line.append(figure.value, style="yellow" if warns else "bold" if figure.key == "loss" else "")
        line.append(" " * (widths[figure.key] - len(figure.text)))
    line.rstrip()
    return line
