"""Standard output for people: pages of facts, tables and texts, and the tables of an evaluation."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console as RichConsole
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embedtrain.tracking.metrics import DatasetInfo
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


Results = Mapping[str, Mapping[str, float]]

_EVALUATION_GAP = 3  # between columns of an evaluation; what rich inserts for SIMPLE_HEAD with a padding of one
_NAME_WIDTH = 24
_END_WIDTH = 13  # of a longer name


class EvaluationTable:
    """A table of sets with the same metrics: a row per set, a column per metric, and the change of each value.

    A set without an entry in `datasets` has no kind.
    """

    def __init__(
        self, results: Results, previous: Results, metrics: tuple[str, ...], datasets: Mapping[str, DatasetInfo]
    ) -> None:
        self._results, self._previous, self._metrics = results, previous, metrics
        self._kinds = {name: datasets[name].label for name in results if name in datasets}

    @classmethod
    def of(
        cls, results: Results, previous: Results, datasets: Mapping[str, DatasetInfo] | None = None
    ) -> list["EvaluationTable"]:
        """One table for each combination of metrics in `results`, in order."""
        groups: dict[tuple[str, ...], dict[str, Mapping[str, float]]] = {}
        for name, metrics in results.items():
            groups.setdefault(tuple(metrics), {})[name] = metrics
        return [cls(sets, previous, metrics, datasets or {}) for metrics, sets in groups.items()]

    def plain_lines(self) -> list[str]:
        """Aligned lines with every metric and every change."""
        rows = self._cells(len(self._metrics), len(self._metrics), shortened=False)
        widths = _widths(rows)
        return [
            "  ".join(pad(cell.plain, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]

    def for_terminal(self, width: int) -> tuple[Table, list[str]]:
        """The table in at most `width` columns, and the metrics that do not fit."""
        count = len(self._metrics)
        # First all metrics but the main one lose their change, then the last metrics are dropped.
        choices = [(count, count), *((number, 1) for number in range(count, 0, -1)), (1, 0), (0, 0)]
        rows: list[list[Text]] = []
        num_metrics = 0
        for shortened, (num_metrics, num_changes) in [(False, choices[0]), *((True, choice) for choice in choices)]:
            rows = self._cells(num_metrics, num_changes, shortened=shortened)
            if sum(_widths(rows)) + _EVALUATION_GAP * (len(rows[0]) - 1) <= width:
                break
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        for cell in rows[0]:
            table.add_column(cell, no_wrap=True, overflow="ellipsis")
        for row in rows[1:]:
            table.add_row(*row)
        return table, list(self._metrics[num_metrics:])

    def _cells(self, num_metrics: int, num_changes: int, *, shortened: bool) -> list[list[Text]]:
        """Header and rows with the first `num_metrics` metrics, and a change for the first `num_changes` of them."""
        names = self._metrics[:num_metrics]
        rows = [[Text("set"), *[Text("kind")][: len(self._kinds)], *(Text(printable(name)) for name in names)]]
        for set_name, metrics in self._results.items():
            previous = self._previous.get(set_name, {})
            row = [_shortened(set_name) if shortened else Text(printable(set_name))]
            if self._kinds:
                row.append(Text(printable(self._kinds.get(set_name, ""))))
            for index, name in enumerate(names):
                cell = Text(_value(metrics[name]), style="bold" if index == 0 else "")
                if index < num_changes and isinstance(metrics[name], float) and name in previous:
                    cell.append("  ").append(_change(metrics[name] - previous[name]))
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
    """A name without its middle if it is long: those of the subsets of a task of mteb differ at their end."""
    text = Text(printable(name))
    end = text[-_END_WIDTH:] if text.cell_len > _NAME_WIDTH else Text()
    while end.cell_len > _END_WIDTH:  # letters of two columns
        end = end[1:]
    text.truncate(_NAME_WIDTH - end.cell_len, overflow="ellipsis")
    return text + end


def _widths(rows: list[list[Text]]) -> list[int]:
    return [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]


_RIGHT = 2  # columns before the numbers


@dataclass(frozen=True, slots=True)
class VectorRow:
    """A form of the vectors of a set."""

    set_name: str  # without the form
    label: str
    bytes: int  # of a document that every search reads
    rescore_bytes: int
    metric: str  # the main one
    value: float
    whole: float  # the metric of the whole float vectors
    smaller: float  # so many times fewer bytes than those take

    @property
    def kept(self) -> str:
        """What is left of the metric of float vectors."""
        return f"{self.value / self.whole:.1%}" if self.whole > 0 else "—"

    @property
    def rescoring(self) -> str:
        """Bytes of the copy with which documents are scored again."""
        return f"{self.rescore_bytes:,}" if self.rescore_bytes else ""


def vector_rows(results: Mapping[str, Mapping[str, float]], datasets: Mapping[str, DatasetInfo]) -> list[VectorRow]:
    """The rows of sets of which several forms of vectors were compared, each after the whole vectors of its set."""
    rows = []
    for name, metrics in results.items():
        whole = datasets[name].vectors if name in datasets else None
        metric = next(iter(metrics), None)
        if whole is None or metric is None or name.endswith(f"@{whole.label}"):
            continue
        forms = {
            result: info.vectors for result, info in datasets.items() if result.startswith(f"{name}@") and info.vectors
        }
        is_compared = any(result in results and result == f"{name}@{form.label}" for result, form in forms.items())
        for result in (name, *forms) if is_compared else ():
            size = datasets[result].vectors
            if size is not None and result in results and metric in results[result]:
                label = f"{size.label} (float)" if size.label.isdigit() else size.label
                value, smaller = results[result][metric], whole.bytes / size.bytes
                rows.append(
                    VectorRow(name, label, size.bytes, size.rescore_bytes, metric, value, metrics[metric], smaller)
                )
    return rows


def is_form(name: str, datasets: Mapping[str, DatasetInfo]) -> bool:
    """Whether a row of an evaluation is another form of the vectors of a set than the whole float vectors."""
    vectors = datasets[name].vectors if name in datasets else None
    return vectors is not None and name.endswith(f"@{vectors.label}")


def vector_lines(results: Mapping[str, Mapping[str, float]], datasets: Mapping[str, DatasetInfo]) -> list[str]:
    """The table in Markdown, with its heading; empty if there is nothing to compare."""
    rows = vector_rows(results, datasets)
    lines = ["### Compressed vectors", "", "| set | vectors | bytes | smaller | rescored from | metric | of float |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        cells = [row.set_name, row.label, f"{row.bytes:,}", f"{row.smaller:.4g}x", row.rescoring]
        lines.append(f"| {' | '.join([*cells, f'{row.metric} {row.value:.4f}', row.kept])} |")
    return [*lines, ""] if rows else []


def without_forms(
    results: Mapping[str, Mapping[str, float]], datasets: Mapping[str, DatasetInfo]
) -> dict[str, Mapping[str, float]]:
    """The results of the whole vectors."""
    return {name: metrics for name, metrics in results.items() if not is_form(name, datasets)}


class VectorTable:
    """The rows for a terminal and for a log."""

    def __init__(self, rows: list[VectorRow]) -> None:
        metrics = list(dict.fromkeys(row.metric for row in rows))
        head = ["set", "vectors", "bytes", "smaller", "rescored from", metrics[0] if len(metrics) == 1 else "metric"]
        self._cells = [[*head, "of float"]]
        for row in rows:
            value = f"{row.value:.4f}" if len(metrics) == 1 else f"{row.metric} {row.value:.4f}"
            cells = [row.set_name, row.label, f"{row.bytes:,}", f"{row.smaller:.4g}x", row.rescoring, value, row.kept]
            self._cells.append([printable(cell) for cell in cells])

    def plain_lines(self) -> list[str]:
        """Aligned lines."""
        widths = [max(map(len, column)) for column in zip(*self._cells, strict=True)]
        return ["  ".join(map(pad, row, widths)).rstrip() for row in self._cells]

    def for_terminal(self) -> Table:
        """The table."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        for number, name in enumerate(self._cells[0]):
            table.add_column(
                Text(name), no_wrap=True, overflow="ellipsis", justify="left" if number < _RIGHT else "right"
            )
        for row in self._cells[1:]:
            table.add_row(*map(Text, row))
        return table
