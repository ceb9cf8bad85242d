"""A page of facts, tables and texts: laid out for a terminal's width, whole lines without codes anywhere else."""

import io
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console as RichConsole
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class SafeStream(io.TextIOBase):
    """Passes text on; once the other end is gone (closed pipe, closed terminal, full disk) it swallows it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write `text`; characters that the encoding lacks become `?`."""
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        """Whether a terminal is behind it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The stream's file descriptor.

        Raises:
            OSError: there is none.
        """
        if self._stream is None:
            raise OSError("there is no stream")
        return self._stream.fileno()


_INDENT = "  "
_GAP = 2  # between columns
_BETWEEN = " … "
# What would move the cursor or turn the line's direction instead of being seen.
_UNSEEN = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
_UNSEEN |= {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_UNSEEN |= {ord("\n"): "↵", ord("\r"): "", ord("\t"): "⇥"}


class Page:
    """Prints on standard output.

    Args:
        terminal: where to print instead.
    """

    def __init__(self, terminal: RichConsole | None = None) -> None:
        self._rich = terminal or RichConsole(
            file=cast(TextIO, SafeStream(sys.stdout)),
            force_terminal=sys.stdout is not None and sys.stdout.isatty(),
            force_jupyter=False,
            highlight=False,
        )

    def heading(self, text: str) -> None:
        """Begin something new."""
        if self._rich.is_terminal:
            self._rich.print()
            self._rich.rule(Text(escape_control(text), style="bold"), align="left", style="dim", characters="─")
        else:
            self._plain("", f"== {escape_control(text)} ==")

    def subheading(self, text: str) -> None:
        """Begin a part of it."""
        if self._rich.is_terminal:
            self._rich.print()
            self._rich.print(Text(f"{_INDENT}{escape_control(text)}", style="bold cyan"))
        else:
            self._plain("", escape_control(text))

    def facts(self, facts: Sequence[tuple[str, str]], style: str = "") -> None:
        """Lines of a label and what there is to say; a label may be empty."""
        facts = [(label, escape_control(text)) for label, text in facts]
        if not self._rich.is_terminal:
            width = max(map(cell_len, (label for label, _ in facts)), default=0)
            self._plain(*(f"{_INDENT}{_padded(label, width)}  {text}" for label, text in facts))
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in facts:
            grid.add_row(Text(label), Text(text, style=style))
        self._rich.print(Padding(grid, (0, 0, 0, len(_INDENT))))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Figures: the first column on the left, the others on the right. None is ever shortened."""
        lines = [list(header), *([escape_control(cell) for cell in row] for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        if not self._rich.is_terminal or self._rich.width < len(_INDENT) + sum(widths) + _GAP * (len(widths) - 1):
            for line in lines:
                first, *others = zip(line, widths, strict=True)
                told = [_padded(*first), *(" " * (width - cell_len(cell)) + cell for cell, width in others)]
                self._plain(f"{_INDENT}{(' ' * _GAP).join(told)}".rstrip())
            return
        table = Table(
            box=SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),  # the box has a column of its own
            show_edge=False,
            pad_edge=False,
            header_style="dim",
            border_style="dim",
        )
        for place, name in enumerate(header):
            table.add_column(Text(name), justify="right" if place else "left", no_wrap=True)
        for line in lines[1:]:
            table.add_row(*(Text(cell, style="" if place else "bold") for place, cell in enumerate(line)))
        self._rich.print(Padding(table, (0, 0, 0, len(_INDENT))))

    def texts(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Lines of a label, a figure and a text; on a terminal what does not fit is left out of the text's middle."""
        rows = [(label, figure, escape_control(text)) for label, figure, text in rows]
        widths = [max((cell_len(row[place]) for row in rows), default=0) for place in (0, 1)]
        for label, figure, text in rows:
            before = f"{_INDENT}{_padded(label, widths[0])}  "
            told = f"{' ' * (widths[1] - cell_len(figure))}{figure}  "
            if not self._rich.is_terminal:
                self._plain(before + told + text)
                continue
            room = self._rich.width - cell_len(before + told)
            line = Text.assemble((before, "cyan"), (told, "dim"), _styled(shorten_middle(text, room)))
            self._rich.print(line, no_wrap=True, overflow="crop")

    def note(self, text: str, style: str = "") -> None:
        """A sentence."""
        if self._rich.is_terminal:
            self._rich.print(Padding(Text(escape_control(text), style=style), (0, 0, 0, len(_INDENT))))
        else:
            self._plain(f"{_INDENT}{escape_control(text)}")

    def _plain(self, *lines: str) -> None:
        for line in lines:
            self._rich.file.write(f"{line}\n")
        self._rich.file.flush()


def escape_control(text: str) -> str:
    """The text on one line, its control characters as signs that are seen."""
    return text.translate(_UNSEEN)


def shorten_middle(text: str, width: int) -> str:
    """At most `width` columns of a text: its beginning and its end."""
    if cell_len(text) <= width or width <= 0:
        return text
    room = max(0, width - cell_len(_BETWEEN))
    # Before cells are counted: texts may be long, and only the ends matter.
    begin = chop_cells(text[:width], max(2, room - room // 2))[0]
    end = chop_cells(text[: -width - 1 : -1], max(2, room // 2))[0][::-1]
    return f"{begin}{_BETWEEN}{end}"


def _styled(text: str) -> Text:
    styled = Text(text)
    begin, between, _ = text.partition(_BETWEEN)
    if between:
        styled.stylize("bold yellow", len(begin), len(begin) + len(between))
    return styled


def _padded(text: str, width: int) -> str:
    # Not str.ljust: a Chinese character takes two columns.
    return text + " " * (width - cell_len(text))
