"""Standard output for people: pages of facts, tables and texts."""

import sys
from collections.abc import Sequence
from typing import TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console as RichConsole
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embedtrain.utils.formatting import printable
from embedtrain.utils.streams import SafeStream

_INDENT = "  "
_GAP = 2  # between columns
_ELLIPSIS = " … "
# Texts of rows often have several lines.
_SIGNS = {ord("\n"): "↵", ord("\r"): "", ord("\t"): "⇥"}


def standard_output() -> RichConsole:
    """A rich console on standard output."""
    # Asks stdout itself whether it is a terminal: rich would obey FORCE_COLOR, and fill a log file with escape codes.
    return RichConsole(
        file=cast(TextIO, SafeStream(sys.stdout, styled=True)),
        force_terminal=sys.stdout is not None and sys.stdout.isatty(),
        force_jupyter=False,
        highlight=False,
    )


class Page:
    """Prints headings, facts, tables and texts: laid out on a terminal, whole lines without escape codes elsewhere."""

    def __init__(self, terminal: RichConsole | None = None) -> None:
        self._rich = terminal or standard_output()

    def heading(self, text: str) -> None:
        """Print the heading of a section."""
        if self._rich.is_terminal:
            self._rich.print()
            self._rich.rule(Text(escape_control(text), style="bold"), align="left", style="dim", characters="─")
        else:
            self._plain("", f"== {escape_control(text)} ==")

    def subheading(self, text: str) -> None:
        """Print the heading of a subsection."""
        if self._rich.is_terminal:
            self._rich.print()
            self._rich.print(Text(f"{_INDENT}{escape_control(text)}", style="bold cyan"))
        else:
            self._plain("", escape_control(text))

    def facts(self, facts: Sequence[tuple[str, str]], style: str = "") -> None:
        """Print lines of a label and a text; a label may be empty."""
        facts = [(escape_control(label), escape_control(text)) for label, text in facts]
        if not self._rich.is_terminal:
            width = max(map(cell_len, (label for label, _ in facts)), default=0)
            self._plain(*(f"{_INDENT}{pad(label, width)}  {text}" for label, text in facts))
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in facts:
            grid.add_row(Text(label), Text(text, style=style))
        self._rich.print(Padding(grid, (0, 0, 0, len(_INDENT))))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of numbers: the first column on the left, the others on the right, nothing shortened."""
        lines = [[escape_control(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        if not self._rich.is_terminal or self._rich.width < len(_INDENT) + sum(widths) + _GAP * (len(widths) - 1):
            for line in lines:
                first, *numbers = zip(line, widths, strict=True)
                cells = [pad(*first), *(" " * (width - cell_len(cell)) + cell for cell, width in numbers)]
                self._plain(f"{_INDENT}{(' ' * _GAP).join(cells)}".rstrip())
            return
        table = Table(
            box=SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),  # the box has a column of its own
            show_edge=False,
            pad_edge=False,
            header_style="dim",
            border_style="dim",
        )
        for index, name in enumerate(lines[0]):
            table.add_column(Text(name), justify="right" if index else "left", no_wrap=True)
        for line in lines[1:]:
            table.add_row(*(Text(cell, style="" if index else "bold") for index, cell in enumerate(line)))
        self._rich.print(Padding(table, (0, 0, 0, len(_INDENT))))

    def texts(self, rows: Sequence[tuple[str, str, str]], plain_width: int | None = None) -> None:
        """Print lines of a label, a number and a text.

        A terminal shows the beginning and the end of long texts. Elsewhere they are whole, or of at most
        `plain_width` columns.
        """
        rows = [(escape_control(label), number, escape_control(text)) for label, number, text in rows]
        widths = [max((cell_len(row[column]) for row in rows), default=0) for column in (0, 1)]
        for label, number, text in rows:
            left = f"{_INDENT}{pad(label, widths[0])}  "
            middle = f"{' ' * (widths[1] - cell_len(number))}{number}  "
            if not self._rich.is_terminal:
                self._plain(left + middle + (text if plain_width is None else shorten_middle(text, plain_width)))
                continue
            available = self._rich.width - cell_len(left + middle)
            line = Text.assemble((left, "cyan"), (middle, "dim"), _styled(shorten_middle(text, available)))
            self._rich.print(line, no_wrap=True, overflow="crop")

    def note(self, text: str, style: str = "") -> None:
        """Print a sentence."""
        if self._rich.is_terminal:
            self._rich.print(Padding(Text(escape_control(text), style=style), (0, 0, 0, len(_INDENT))))
        else:
            self._plain(f"{_INDENT}{escape_control(text)}")

    def _plain(self, *lines: str) -> None:
        for line in lines:
            self._rich.file.write(f"{line}\n")
        self._rich.file.flush()


def escape_control(text: str) -> str:
    """The text on one line, with visible signs for control characters."""
    return printable(text.translate(_SIGNS))


def shorten_middle(text: str, width: int) -> str:
    """At most `width` columns of a text: its beginning and its end."""
    if cell_len(text) <= width or width <= 0:
        return text
    available = max(0, width - cell_len(_ELLIPSIS))
    # Slice first: texts may be long, counting cells is slow, and only the ends matter.
    begin = chop_cells(text[:width], max(2, available - available // 2))[0]
    end = chop_cells(text[: -width - 1 : -1], max(2, available // 2))[0][::-1]
    return f"{begin}{_ELLIPSIS}{end}"


def pad(text: str, width: int) -> str:
    """The text with spaces up to `width` columns."""
    # Not str.ljust: a Chinese character takes two columns.
    return text + " " * (width - cell_len(text))


def _styled(text: str) -> Text:
    styled = Text(text)
    begin, ellipsis, _ = text.partition(_ELLIPSIS)
    if ellipsis:
        styled.stylize("bold yellow", len(begin), len(begin) + len(ellipsis))
    return styled
