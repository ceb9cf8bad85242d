"""Line plots: one figure over steps, a line for each run, with its values as a table for those who do not see it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from embedtrain.tracking.report.names import NumberFormat, written
from embedtrain.tracking.report.runs import Series

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` lie from `start` to `end`; `ticks` are marked."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where values lie."""
        low, high, x = np.float64(self.low), np.float64(self.high), values
        if self.log:
            low, high, x = np.log10(low), np.log10(high), np.log10(x)
        placed: NDArray[np.float64] = self.start + (x - low) / (high - low) * (self.end - self.start)
        return placed

    def place(self, value: float) -> float:
        """Where one value lies."""
        return float(self.at(np.array([value]))[0])


def value_axis(values: NDArray[np.float64], start: float, end: float, form: NumberFormat) -> Axis:
    """An axis for finite values; logarithmic where they span so much that all but a few would lie on a line.

    Shares and rates never are: how far they lie from nothing is what one wants to see.
    """
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if (
        form in (NumberFormat.plain, NumberFormat.small)
        and low > 0
        and high > 200 * low
        and high > 50 * float(np.median(values))
    ):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, -(-(last - first) // 5))
        ticks = tuple(10.0**power for power in range(first, last + 1, every))
        return Axis(10.0**first, 10.0**last, start, end, ticks, log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = min(0.0, low * 1.25), max(0.0, high * 1.25)  # one value, told by how far it is from nothing
        high = high if high > low else 1.0
    ticks = round_numbers(low, high, 4)
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks)


def step_axis(low: int, high: int, start: float, end: float) -> Axis:
    """An axis for whole steps."""
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
    """What is written at ticks: as many digits as tell neighbours apart."""
    return _percent(axis.ticks) if form is NumberFormat.share else _numbers(axis.ticks)


def _percent(ticks: Sequence[float]) -> list[str]:
    return [f"{text}%" for text in _numbers([tick * 100 for tick in ticks])]


def _numbers(ticks: Sequence[float]) -> list[str]:
    largest = max(map(abs, ticks), default=0.0)
    apart = min((b - a for a, b in itertools.pairwise(ticks)), default=largest or 1.0)
    if largest >= 10_000:
        return [_large(tick) for tick in ticks]
    if largest and largest < 1e-3:
        return ["0" if tick == 0 else f"{tick:.1e}".replace(".0e", "e").replace("e-0", "e-") for tick in ticks]
    if apart <= 0 or ticks[-1] > 500 * apart:  # powers of ten, or one value
        return [f"{tick:g}" for tick in ticks]
    digits = next((n for n in range(7) if abs(apart * 10**n - round(apart * 10**n)) < 1e-6), 6)
    return [f"{tick:.{digits}f}" for tick in ticks]


def _large(value: float) -> str:
    for divisor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor:
            return f"{value / divisor:g}{unit}"
    return f"{value:g}"


SMOOTHED_FROM = 60  # points; below that every one of them can be seen


def smoothed(series: Series) -> Series | None:
    """The mean around each point, over a fiftieth of the course; None where there are too few points to need it.

    Points without a value stay so, and count in no mean.
    """
    count = len(series.values)
    if count < SMOOTHED_FROM:
        return None
    width = max(5, count // 50) | 1
    finite = np.isfinite(series.values)
    kernel = np.ones(width)
    sums = np.convolve(np.where(finite, series.values, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(float), kernel, mode="same")
    return Series(series.steps, np.where(finite, sums / np.maximum(counts, 1.0), np.nan))


def thinned(series: Series, most: int) -> Series:
    """At most about `most` points: of each stretch the lowest and the highest, so that no spike is lost.

    The first and the last point stay, and a stretch with a point without a value keeps one such point.
    """
    count = len(series.steps)
    if count <= most:
        return series
    keep: set[int] = {0, count - 1}
    for part in np.array_split(np.arange(count), max(1, most // 2)):
        values = series.values[part]
        finite = np.isfinite(values)
        if not finite.all():
            keep.add(int(part[int(np.argmin(finite))]))
        if finite.any():
            keep.add(int(part[int(np.argmin(np.where(finite, values, np.inf)))]))
            keep.add(int(part[int(np.argmax(np.where(finite, values, -np.inf)))]))
    places: NDArray[np.int64] = np.array(sorted(keep), dtype=np.int64)
    return Series(series.steps[places], series.values[places])


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, the first and the last among them."""
    if count <= most or most < 2:
        return list(range(min(count, most)))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


_RENAMED = {"class_": "class"}


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element: children that are no Markup are escaped, and so are all values of attributes.

    Args:
        tag: its name.
        children: in their order.
        attributes: `class_` is `class`, and other underscores are hyphens; None leaves one out.
    """
    parts = [
        f' {_RENAMED.get(name, name.replace("_", "-"))}="{escape(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    ]
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{tag}{''.join(parts)}>{inner}</{tag}>")  # noqa: S704  # all of it was escaped above


def _short(value: object) -> object:
    """Coordinates to a tenth: nobody sees more, and the file stays small."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return value


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
    form: NumberFormat = NumberFormat.plain,
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


def _frame(x: Axis, y: Axis, form: NumberFormat) -> Markup:
    """Grid lines with their numbers, and the steps below."""
    parts = []
    for tick, text in zip(y.ticks, tick_labels(y, form), strict=True):
        at = y.place(tick)
        parts.append(element("path", d=f"M{LEFT:g} {at:.1f}H{RIGHT:g}", class_="grid"))
        parts.append(element("text", text, x=LEFT - 6, y=at + 3.5, text_anchor="end"))
    for tick, text in zip(x.ticks, tick_labels(x, NumberFormat.plain), strict=True):
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


def _told(series: Series, form: NumberFormat) -> str:
    values: NDArray[np.float64] = series.finite
    if not len(values):
        return "no finite value"
    first, last, low, high = (
        written(float(value), form) for value in (values[0], values[-1], values.min(), values.max())
    )
    where = f"from {first} at step {series.steps[0]} to {last} at step {series.steps[-1]}"
    return f"{where}, lowest {low}, highest {high}"


def _table(lines: Sequence[Line], form: NumberFormat) -> Table:
    courses = [dict(zip(line.series.steps.tolist(), line.series.values.tolist(), strict=True)) for line in lines]
    steps = sorted(set().union(*courses))
    rows = [
        (f"{steps[at]:,}", *(written(course.get(steps[at]), form) for course in courses))
        for at in spread(len(steps), TABLE_ROWS)
    ]
    return Table(("step", *(line.label for line in lines)), tuple(rows))
