"""The tables of an evaluation, for a terminal and for a log: results of sets, and forms of vectors."""

from collections.abc import Mapping
from dataclasses import dataclass

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
