"""The table of an evaluation: a row per set, a column per metric, and the change since the one before."""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Results = Mapping[str, Mapping[str, float]]

_GAP = 3  # between columns; what rich puts there for SIMPLE_HEAD with a padding of one
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
            if sum(_widths(rows)) + _GAP * (len(rows[0]) - 1) <= width:
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
