"""Axes of plots: which values they cover, where their ticks are, and how numbers are written."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

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
