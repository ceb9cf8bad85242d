"""Line plots as SVG: one metric over steps, a line per run, with the values as a table for accessibility; their axes.

All content is escaped, so nothing in a run can become markup.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from embedtrain.report.runs import Series

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class NumberFormat(str, Enum):
    """How a value is written."""

    plain = "plain"  # four significant digits
    fraction = "fraction"  # of 1, as a percentage
    rate = "rate"  # large numbers with commas
    small = "small"  # such as a learning rate: 2.0e-05


def format_value(value: float | None, form: NumberFormat = NumberFormat.plain) -> str:
    """A value for people; `—` if there is none."""
    if value is None or not math.isfinite(value):
        return "—"
    match form:
        case NumberFormat.fraction:
            return f"{value:.1%}"
        case NumberFormat.small:
            return "0" if value == 0 else f"{value:.1e}"
        case NumberFormat.rate:
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"
        case NumberFormat.plain:
            if value == 0 or 1e-3 <= abs(value) < 1e5:
                digits = 4 if abs(value) < 10 else 2 if abs(value) < 1000 else 0
                return f"{value:,.{digits}f}"
            return f"{value:.1e}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from `low` to `high` to positions from `start` to `end`; `ticks` are marked."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def positions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The positions of values."""
        low, high, x = np.float64(self.low), np.float64(self.high), values
        if self.log:
            low, high, x = np.log10(low), np.log10(high), np.log10(x)
        positions: NDArray[np.float64] = self.start + (x - low) / (high - low) * (self.end - self.start)
        return positions

    def position(self, value: float) -> float:
        """The position of one value."""
        return float(self.positions(np.array([value]))[0])


def value_axis(values: NDArray[np.float64], start: float, end: float, form: NumberFormat) -> Axis:
    """An axis for finite values; logarithmic if a few large values would flatten all others.

    Axes of fractions and rates are never logarithmic, because their distance from zero matters.
    """
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    can_be_log = form in (NumberFormat.plain, NumberFormat.small) and low > 0
    if can_be_log and high > 200 * low and high > 50 * float(np.median(values)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, -(-(last - first) // 5))
        ticks = tuple(10.0**power for power in range(first, last + 1, every))
        return Axis(10.0**first, 10.0**last, start, end, ticks, log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = min(0.0, low * 1.25), max(0.0, high * 1.25)  # a single value is shown relative to zero
        high = high if high > low else 1.0
    ticks = round_numbers(low, high, 4)
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks)


def step_axis(low: int, high: int, start: float, end: float) -> Axis:
    """An axis for integer steps."""
    if low == high:
        return Axis(low - 1, high + 1, start, end, (float(low),))
    ticks = tuple(tick for tick in round_numbers(low, high, 4) if low <= tick <= high and tick == int(tick))
    return Axis(low, high, start, end, ticks or (float(low), float(high)))


def round_numbers(low: float, high: float, count: int) -> tuple[float, ...]:
    """About `count` round numbers that cover `low` to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (factor * power for factor in _STEPS) if step >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1))


def tick_labels(axis: Axis, form: NumberFormat) -> list[str]:
    """The labels of the ticks, with enough digits to distinguish neighbours."""
    if form is NumberFormat.fraction:
        return [f"{text}%" for text in _numbers([tick * 100 for tick in axis.ticks])]
    return _numbers(axis.ticks)


def _numbers(ticks: Sequence[float]) -> list[str]:
    largest = max(map(abs, ticks), default=0.0)
    interval = min((b - a for a, b in itertools.pairwise(ticks)), default=largest or 1.0)
    if largest >= 10_000:
        return [_large(tick) for tick in ticks]
    if largest and largest < 1e-3:
        return ["0" if tick == 0 else f"{tick:.1e}".replace(".0e", "e").replace("e-0", "e-") for tick in ticks]
    if interval <= 0 or ticks[-1] > 500 * interval:  # powers of ten, or one value
        return [f"{tick:g}" for tick in ticks]
    digits = next((n for n in range(7) if abs(interval * 10**n - round(interval * 10**n)) < 1e-6), 6)
    return [f"{tick:.{digits}f}" for tick in ticks]


def _large(value: float) -> str:
    for divisor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor:
            return f"{value / divisor:g}{unit}"
    return f"{value:g}"


WIDTH, HEIGHT = 380, 222
LEFT, RIGHT, TOP, BOTTOM = 46.0, 370.0, 24.0, 182.0
_MAX_EPOCH_LABELS, _MAX_EPOCH_MARKS = 6, 40
TABLE_ROWS = 16
NUM_COLOURS = 8


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element; attribute values and children that are not Markup are escaped.

    In names of attributes `class_` is `class`, and other underscores are hyphens; None omits an attribute.
    """
    parts = [
        f' {"class" if name == "class_" else name.replace("_", "-")}="{escape(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    ]
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{tag}{''.join(parts)}>{inner}</{tag}>")  # noqa: S704  # all of it was escaped above


def _short(value: object) -> object:
    """Coordinates with one decimal: more is invisible, and the file stays small."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return value


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one run, with the run's colour."""

    label: str
    colour: int
    series: Series


@dataclass(frozen=True, slots=True)
class Labels:
    """What a plot shows: its title, a sentence about it, and the unit or the quantity on its vertical axis."""

    title: str
    description: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A line's colour, name and last value."""

    label: str
    colour: int
    value: str


@dataclass(frozen=True, slots=True)
class Table:
    """Values of a plot."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot for the page."""

    title: str
    description: str
    picture: Markup  # SVG
    legend: tuple[LegendEntry, ...]  # the last value of each run
    table: Table  # a sample of the values
    points: Mapping[str, object]  # positions and formatted values for the page's script
    remark: str  # what the picture does not show


def line_chart(
    labels: Labels,
    lines: Sequence[Line],
    *,
    form: NumberFormat = NumberFormat.plain,
    smooth: bool = True,
    max_points: int = 300,
    steps: tuple[int, int] | None = None,
    steps_per_epoch: float | None = None,
) -> Chart:
    """A plot of one metric.

    Args:
        lines: at least one, each with at least one point.
        smooth: draw the moving average of long lines, and the values themselves faintly.
        max_points: approximate number of points drawn per line.
        steps: the first and the last step of the axis; default: those of the lines.
        steps_per_epoch: marks the end of each epoch.
    """
    title = labels.title
    means = [line.series.smoothed() if smooth else None for line in lines]
    drawn = [
        (line.series.thinned(max_points), mean and mean.thinned(max_points))
        for line, mean in zip(lines, means, strict=True)
    ]
    all_steps = np.concatenate([line.series.steps for line in lines])
    x = step_axis(*(steps or (int(all_steps.min()), int(all_steps.max()))), LEFT, RIGHT)
    y = value_axis(np.concatenate([raw.finite for raw, _ in drawn]), BOTTOM, TOP, form)
    shapes: list[Markup] = [_frame(x, y, form, labels.unit), _epoch_marks(x, steps_per_epoch)]
    for line, (raw, mean) in zip(lines, drawn, strict=True):
        colour = f"c{line.colour % NUM_COLOURS}"
        if mean is not None:
            shapes.append(_path(raw, x, y, f"line raw {colour}"))
        shapes.append(_path(raw if mean is None else mean, x, y, f"line {colour}"))
        shapes += _isolated_points(raw, x, y, colour)
    missing = sum(len(line.series.values) - len(line.series.finite) for line in lines)
    remarks = [f"{missing:,} without a finite value"] * bool(missing)
    remarks += ["bold: moving average"] * any(mean is not None for mean in means) + ["logarithmic"] * y.log
    legend = tuple(
        LegendEntry(line.label, line.colour % NUM_COLOURS, format_value(_last(line.series), form)) for line in lines
    )
    summary = "; ".join(f"{line.label}: {_summary(line.series, form)}" for line in lines)
    picture = element(
        "svg",
        element("desc", f"{title} over steps. {summary}"),
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title} over steps. {summary}",
        class_="plot",
    )
    points = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [TOP, BOTTOM],
        "form": form.value,
        "lines": [
            {"name": line.label, "colour": line.colour % NUM_COLOURS, "points": _points(mean or raw, y)}
            for line, (raw, mean) in zip(lines, drawn, strict=True)
        ],
    }
    return Chart(title, labels.description, picture, legend, _table(lines, form), points, "; ".join(remarks))


def is_flat(lines: Sequence[Line]) -> bool:
    """Whether no line has two different values, so that a plot would show nothing."""
    values = [line.series.finite for line in lines]
    return all(not len(of) or np.ptp(of) <= 1e-9 * float(np.abs(of).max()) for of in values)


def evenly_spaced(count: int, max_indices: int) -> list[int]:
    """At most `max_indices` of `count` indices, including the first and the last."""
    if count <= max_indices or max_indices < 2:
        return list(range(min(count, max_indices)))
    return sorted({round(index * (count - 1) / (max_indices - 1)) for index in range(max_indices)})


def _frame(x: Axis, y: Axis, form: NumberFormat, unit: str) -> Markup:
    """Grid lines with their labels, the steps below, and what the axes show."""
    parts = [
        element("text", unit, x=4, y=TOP - 11, class_="axis"),
        element("text", "step", x=(LEFT + RIGHT) / 2, y=BOTTOM + 33, text_anchor="middle", class_="axis"),
    ]
    for tick, text in zip(y.ticks, tick_labels(y, form), strict=True):
        height = y.position(tick)
        parts.append(element("path", d=f"M{LEFT:g} {height:.1f}H{RIGHT:g}", class_="grid"))
        parts.append(element("text", text, x=LEFT - 6, y=height + 3.5, text_anchor="end"))
    for tick, text in zip(x.ticks, tick_labels(x, NumberFormat.plain), strict=True):
        position = x.position(tick)
        anchor = "end" if position > RIGHT - 12 else "start" if position < LEFT + 8 else "middle"
        parts.append(element("text", text, x=position, y=BOTTOM + 16, text_anchor=anchor))
    return element("g", *parts, class_="axes", aria_hidden="true")


def _epoch_marks(x: Axis, steps_per_epoch: float | None) -> Markup:
    """Dashed lines at the ends of epochs, with the number of epochs done."""
    if steps_per_epoch is None or steps_per_epoch <= 0:
        return Markup()
    first, last = max(1, math.ceil(x.low / steps_per_epoch)), math.floor(x.high / steps_per_epoch)
    every = max(1, -(-(last - first + 1) // _MAX_EPOCH_MARKS))
    marked = [epoch for epoch in range(first, last + 1) if epoch % every == 0]
    label_every = max(1, -(-len(marked) // _MAX_EPOCH_LABELS))
    parts = []
    for number, epoch in enumerate(marked):
        position = x.position(epoch * steps_per_epoch)
        parts.append(element("path", d=f"M{position:.1f} {TOP:g}V{BOTTOM:g}", class_="epoch"))
        if number % label_every == 0:
            text = f"epoch {epoch}" if number == 0 else str(epoch)
            anchor = "end" if position > RIGHT - 24 else "middle"
            parts.append(element("text", text, x=position, y=TOP - 3, text_anchor=anchor, class_="epoch"))
    return element("g", *parts, aria_hidden="true")


def _path(series: Series, x: Axis, y: Axis, class_: str) -> Markup:
    """A line that is interrupted where a value is missing."""
    finite = np.isfinite(series.values)
    across = x.positions(series.steps.astype(np.float64))
    up = y.positions(np.where(finite, series.values, y.low))
    parts, pen = [], "M"
    for index, is_finite in enumerate(finite):
        if is_finite:
            parts.append(f"{pen}{across[index]:.1f} {up[index]:.1f}")
            pen = "L"
        else:
            pen = "M"
    return element("path", d="".join(parts), class_=class_)


def _isolated_points(series: Series, x: Axis, y: Axis, colour: str) -> list[Markup]:
    """Dots for points without a neighbour, which the line does not show; for all points of a short series."""
    finite = np.isfinite(series.values)
    before, after = np.concatenate([[False], finite[:-1]]), np.concatenate([finite[1:], [False]])
    isolated = finite & (~(before | after) | (len(finite) <= 12))
    return [
        element(
            "circle",
            cx=x.position(float(series.steps[index])),
            cy=y.position(float(series.values[index])),
            r=2.4,
            class_=f"dot {colour}",
        )
        for index in np.flatnonzero(isolated)
    ]


def _points(series: Series, y: Axis) -> list[list[float]]:
    """Step, value, and height in the plot of each point that has a value."""
    finite = np.isfinite(series.values)
    up = y.positions(np.where(finite, series.values, y.low))
    return [
        [int(step), float(f"{value:.5g}"), round(float(height), 1)]
        for step, value, height, is_finite in zip(series.steps, series.values, up, finite, strict=True)
        if is_finite
    ]


def _last(series: Series) -> float | None:
    return float(series.finite[-1]) if len(series.finite) else None


def _summary(series: Series, form: NumberFormat) -> str:
    values: NDArray[np.float64] = series.finite
    if not len(values):
        return "no finite value"
    first, last, low, high = (
        format_value(float(value), form) for value in (values[0], values[-1], values.min(), values.max())
    )
    ends = f"from {first} at step {series.steps[0]} to {last} at step {series.steps[-1]}"
    return f"{ends}, lowest {low}, highest {high}"


def _table(lines: Sequence[Line], form: NumberFormat) -> Table:
    values = [dict(zip(line.series.steps.tolist(), line.series.values.tolist(), strict=True)) for line in lines]
    steps = sorted(set().union(*values))
    rows = [
        (f"{steps[index]:,}", *(format_value(of_line.get(steps[index]), form) for of_line in values))
        for index in evenly_spaced(len(steps), TABLE_ROWS)
    ]
    return Table(("step", *(line.label for line in lines)), tuple(rows))
