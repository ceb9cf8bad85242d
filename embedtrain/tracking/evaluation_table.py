"""The table of an evaluation's results, for a terminal and for a log."""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.tracking.pages import pad
from embedtrain.utils.formatting import printable

Results = Mapping[str, Mapping[str, float]]

_GAP = 3  # between columns of an evaluation; what rich inserts for SIMPLE_HEAD with a padding of one
_NAME_WIDTH = 24


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
        rows = self._cells(len(self._metrics), len(self._metrics))
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
        for num_metrics, num_changes in choices:
            rows = self._cells(num_metrics, num_changes)
            if sum(_widths(rows)) + _GAP * (len(rows[0]) - 1) <= width:
                break
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        for cell in rows[0]:
            table.add_column(cell, no_wrap=True, overflow="ellipsis")
        for row in rows[1:]:
            table.add_row(*row)
        return table, list(self._metrics[num_metrics:])

    def _cells(self, num_metrics: int, num_changes: int) -> list[list[Text]]:
        """Header and rows with the first `num_metrics` metrics, and a change for the first `num_changes` of them."""
        names = self._metrics[:num_metrics]
        rows = [[Text("set"), *[Text("kind")][: len(self._kinds)], *(Text(printable(name)) for name in names)]]
        for set_name, metrics in self._results.items():
            previous = self._previous.get(set_name, {})
            row = [_shortened(set_name)]
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
    text = Text(printable(name))
    text.truncate(_NAME_WIDTH, overflow="ellipsis")
    return text


def _widths(rows: list[list[Text]]) -> list[int]:
    return [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
