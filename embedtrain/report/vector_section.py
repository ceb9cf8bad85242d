"""The section of the page about forms of vectors: bytes of a document against the main metric, a plot per set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from embedtrain.report.axes import Axis, NumberFormat, format_value, tick_labels, value_axis
from embedtrain.report.chart import BOTTOM, HEIGHT, LEFT, NUM_COLOURS, RIGHT, TOP, WIDTH, element
from embedtrain.report.runs import Run
from embedtrain.tracking.vector_table import VectorRow, vector_rows

_TICKS = 6


@dataclass(frozen=True, slots=True)
class VectorSection:
    """A set: its plot, and a row of cells per form and run."""

    set_name: str
    metric: str
    picture: Markup  # SVG
    rows: tuple[tuple[str, VectorRow], ...]  # with the label of the run


def vector_sections(runs: Sequence[Run]) -> list[VectorSection]:
    """All sets of which several forms of vectors were compared, with the values of each run's last evaluation."""
    by_set: dict[str, list[tuple[int, VectorRow]]] = {}
    for number, run in enumerate(runs):
        results = {
            name: {metric: float(series.finite[-1]) for metric, series in metrics.items() if len(series.finite)}
            for name, metrics in run.evaluations.items()
        }
        for row in vector_rows(results, run.datasets):
            by_set.setdefault(row.set_name, []).append((number, row))
    return [
        VectorSection(
            name, rows[0][1].metric, _picture(name, rows), tuple((runs[number].label, row) for number, row in rows)
        )
        for name, rows in by_set.items()
    ]


def _picture(name: str, rows: Sequence[tuple[int, VectorRow]]) -> Markup:
    """Bytes on a logarithmic axis; a dot per form, and a line along the best form that takes at most so many bytes."""
    metric = rows[0][1].metric
    x = _byte_axis([row.bytes for _, row in rows])
    y = value_axis(np.array([row.value for _, row in rows]), BOTTOM, TOP, NumberFormat.plain)
    shapes = [_frame(x, y, metric)]
    for run in dict.fromkeys(number for number, _ in rows):
        own = sorted((row for number, row in rows if number == run), key=lambda row: (row.bytes, -row.value))
        colour, best, path = f"c{run % NUM_COLOURS}", -math.inf, ""
        for row in own:
            if row.value > best:
                best = row.value
                path += f"{'L' if path else 'M'}{x.position(row.bytes):.1f} {y.position(row.value):.1f}"
        shapes.append(element("path", d=path, class_=f"line {colour}"))
        for row in own:
            title = element("title", f"{row.label}: {row.bytes:,} bytes, {format_value(row.value)}")
            position = {"cx": x.position(row.bytes), "cy": y.position(row.value)}
            shapes.append(element("circle", title, **position, r=2.8, class_=f"dot {colour}"))
    summary = "; ".join(f"{row.label} {row.bytes:,} bytes {format_value(row.value)}" for _, row in rows)
    text = f"{name}: {metric} over bytes per document. {summary}"
    return element(
        "svg", element("desc", text), *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=text, class_="plot",
    )  # fmt: skip


def _byte_axis(sizes: Sequence[int]) -> Axis:
    """Powers of two."""
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    last = max(last, first + 1)
    every = -(-(last - first) // _TICKS)
    ticks = tuple(2.0**power for power in range(first, last + 1, every))
    return Axis(2.0**first, 2.0**last, LEFT, RIGHT, ticks, log=True)


def _frame(x: Axis, y: Axis, unit: str) -> Markup:
    parts = [
        element("text", unit, x=4, y=TOP - 11, class_="axis"),
        element("text", "bytes per document", x=(LEFT + RIGHT) / 2, y=BOTTOM + 33, text_anchor="middle", class_="axis"),
    ]
    for tick, text in zip(y.ticks, tick_labels(y, NumberFormat.plain), strict=True):
        height = y.position(tick)
        parts.append(element("path", d=f"M{LEFT:g} {height:.1f}H{RIGHT:g}", class_="grid"))
        parts.append(element("text", text, x=LEFT - 6, y=height + 3.5, text_anchor="end"))
    for tick in x.ticks:
        position = x.position(tick)
        anchor = "end" if position > RIGHT - 12 else "start" if position < LEFT + 8 else "middle"
        parts.append(element("text", f"{tick:,.0f}", x=position, y=BOTTOM + 16, text_anchor=anchor))
    return element("g", *parts, class_="axes", aria_hidden="true")
