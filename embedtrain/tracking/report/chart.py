"""Line plots: one figure over steps, a line for each run, with its values as a table for those who do not see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from embedtrain.tracking.report.axis import Axis, marks, step_axis, value_axis
from embedtrain.tracking.report.names import Form, written
from embedtrain.tracking.report.runs import Series
from embedtrain.tracking.report.series import smoothed, spread, thinned
from embedtrain.tracking.report.svg import element

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 46.0, 370.0, 8.0, 166.0
TABLE_ROWS = 16
NUM_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """The course of a figure in one run, and the run's colour."""

    label: str
    colour: int
    series: Series


@dataclass(frozen=True, slots=True)
class Legend:
    """A line's colour, name and last value."""

    label: str
    colour: int
    value: str


@dataclass(frozen=True, slots=True)
class Table:
    """Values behind a plot."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot as the page needs it.

    Attributes:
        title: what is plotted.
        meaning: what that is, in a line.
        picture: SVG.
        legend: for each run its last value.
        table: some of the values.
        points: for the page's script: where values lie, and how they are written.
        remark: what the picture does not show.
    """

    title: str
    meaning: str
    picture: Markup
    legend: tuple[Legend, ...]
    table: Table
    points: Mapping[str, object]
    remark: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    meaning: str = "",
    form: Form = Form.plain,
    most: int = 300,
    steps: tuple[int, int] | None = None,
) -> Chart:
    """A plot of one figure.

    Args:
        title: what it is.
        lines: at least one, each with a point at least.
        meaning: what it says.
        form: how values are written.
        most: about how many points of a line are drawn.
        steps: the first and the last that are shown; default: those of the lines.
    """
    smooth = [smoothed(line.series) for line in lines]
    drawn = [
        (thinned(line.series, most), soft and thinned(soft, most)) for line, soft in zip(lines, smooth, strict=True)
    ]
    own = np.concatenate([line.series.steps for line in lines])
    x = step_axis(*(steps or (int(own.min()), int(own.max()))), LEFT, RIGHT)
    y = value_axis(np.concatenate([raw.finite for raw, _ in drawn]), BOTTOM, TOP, form)
    shapes: list[Markup] = [_frame(x, y, form)]
    for line, (raw, soft) in zip(lines, drawn, strict=True):
        colour = f"c{line.colour % NUM_COLOURS}"
        if soft is not None:
            shapes.append(_path(raw, x, y, f"line raw {colour}"))
        shapes.append(_path(raw if soft is None else soft, x, y, f"line {colour}"))
        shapes += _lonely(raw, x, y, colour)
    missing = sum(len(line.series.values) - len(line.series.finite) for line in lines)
    remarks = [f"{missing:,} without a finite value"] * bool(missing)
    remarks += ["bold: moving mean"] * any(soft is not None for soft in smooth) + ["logarithmic"] * y.log
    legend = tuple(Legend(line.label, line.colour % NUM_COLOURS, written(_last(line.series), form)) for line in lines)
    told = "; ".join(f"{one.label}: {_told(line.series, form)}" for one, line in zip(legend, lines, strict=True))
    picture = element(
        "svg",
        element("desc", f"{title} over steps. {told}"),
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title} over steps. {told}",
        class_="plot",
    )
    points = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [TOP, BOTTOM],
        "form": form.value,
        "lines": [
            {"name": line.label, "colour": line.colour % NUM_COLOURS, "at": _pairs(soft or raw, y)}
            for line, (raw, soft) in zip(lines, drawn, strict=True)
        ],
    }
    return Chart(title, meaning, picture, legend, _table(lines, form), points, "; ".join(remarks))


def _frame(x: Axis, y: Axis, form: Form) -> Markup:
    """Grid lines with their numbers, and the steps below."""
    parts = []
    for tick, text in zip(y.ticks, marks(y, form), strict=True):
        at = y.place(tick)
        parts.append(element("path", d=f"M{LEFT:g} {at:.1f}H{RIGHT:g}", class_="grid"))
        parts.append(element("text", text, x=LEFT - 6, y=at + 3.5, text_anchor="end"))
    for tick, text in zip(x.ticks, marks(x, Form.plain), strict=True):
        at = x.place(tick)
        anchor = "end" if at > RIGHT - 12 else "start" if at < LEFT + 8 else "middle"
        parts.append(element("text", text, x=at, y=BOTTOM + 16, text_anchor=anchor))
    return element("g", *parts, class_="axes", aria_hidden="true")


def _path(series: Series, x: Axis, y: Axis, kind: str) -> Markup:
    """A line that breaks off where a value is missing."""
    finite = np.isfinite(series.values)
    across = x.at(series.steps.astype(np.float64))
    up = y.at(np.where(finite, series.values, y.low))
    parts, pen = [], "M"
    for place, good in enumerate(finite):
        if good:
            parts.append(f"{pen}{across[place]:.1f} {up[place]:.1f}")
            pen = "L"
        else:
            pen = "M"
    return element("path", d="".join(parts), class_=kind)


def _lonely(series: Series, x: Axis, y: Axis, colour: str) -> list[Markup]:
    """Points that no line leads to; all of them where they are few."""
    finite = np.isfinite(series.values)
    before, behind = np.concatenate([[False], finite[:-1]]), np.concatenate([finite[1:], [False]])
    alone = finite & (~(before | behind) | (len(finite) <= 12))
    return [
        element(
            "circle",
            cx=x.place(float(series.steps[at])),
            cy=y.place(float(series.values[at])),
            r=2.4,
            class_=f"dot {colour}",
        )
        for at in np.flatnonzero(alone)
    ]


def _pairs(series: Series, y: Axis) -> list[list[float]]:
    """Step, value, and height in the plot of each point that has a value."""
    finite = np.isfinite(series.values)
    up = y.at(np.where(finite, series.values, y.low))
    return [
        [int(step), float(f"{value:.5g}"), round(float(height), 1)]
        for step, value, height, good in zip(series.steps, series.values, up, finite, strict=True)
        if good
    ]


def _last(series: Series) -> float | None:
    return float(series.finite[-1]) if len(series.finite) else None


def _told(series: Series, form: Form) -> str:
    values: NDArray[np.float64] = series.finite
    if not len(values):
        return "no finite value"
    first, last, low, high = (
        written(float(value), form) for value in (values[0], values[-1], values.min(), values.max())
    )
    where = f"from {first} at step {series.steps[0]} to {last} at step {series.steps[-1]}"
    return f"{where}, lowest {low}, highest {high}"


def _table(lines: Sequence[Line], form: Form) -> Table:
    courses = [dict(zip(line.series.steps.tolist(), line.series.values.tolist(), strict=True)) for line in lines]
    steps = sorted(set().union(*courses))
    rows = [
        (f"{steps[at]:,}", *(written(course.get(steps[at]), form) for course in courses))
        for at in spread(len(steps), TABLE_ROWS)
    ]
    return Table(("step", *(line.label for line in lines)), tuple(rows))
