"""Differences between two evaluations, with a confidence interval where both have the same queries."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.report.axes import NumberFormat, format_value
from embedtrain.report.bootstrap import interval
from embedtrain.report.runs import MEAN, Run, Series
from embedtrain.tracking.query_metrics import QueryMetrics, query_metrics_path, read_query_metrics

# A mean of values per query differs from the logged one by rounding only.
_TOLERANCE = 1e-6
_TINY = 1e-3  # values below it are shown with an exponent
_ROUNDING = 1e-12  # a difference below it is 0 but for rounding


@dataclass(frozen=True, slots=True)
class Change:
    """A difference, formatted; `direction` is `up`, `down` or `noise`, and empty if that is unknown."""

    text: str
    interval: str  # empty if unknown
    direction: str
    num_queries: int  # over which the interval was estimated; 0 without one

    @classmethod
    def of(cls, before: float, after: float, differences: list[NDArray[np.float64]] | None) -> "Change":
        """`differences` are those of each set's queries."""
        # Differences of usual values have four digits, however small; those of tiny values would be all zeros.
        form = NumberFormat.small if max(abs(before), abs(after)) < _TINY else NumberFormat.plain
        text = _signed(after - before, form)
        if differences is None:
            return cls(text, "", "", 0)
        if not any(of_set.any() for of_set in differences):
            return cls("0", "", "noise", 0)
        low, high = (0.0 if abs(end) < _ROUNDING else end for end in interval(differences))
        direction = "up" if low > 0 else "down" if high < 0 else "noise"
        return cls(text, f"{_signed(low, form)} to {_signed(high, form)}", direction, sum(map(len, differences)))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of one run."""

    run: Run
    step: int


class Comparisons:
    """Compares evaluations; reads each file of query metrics once."""

    def __init__(self) -> None:
        self._files: dict[Path, QueryMetrics | None] = {}

    def change(self, name: str, metric: str, before: Evaluated, after: Evaluated) -> Change | None:
        """The difference of a metric of the set `name`; None if one of them lacks a finite value."""
        values = [_value(of, name, metric) for of in (before, after)]
        if values[0] is None or values[1] is None:
            return None
        return Change.of(values[0], values[1], self._differences(name, metric, before, after))

    def _differences(
        self, name: str, metric: str, before: Evaluated, after: Evaluated
    ) -> list[NDArray[np.float64]] | None:
        """Of each set that the value is a mean of; None if not all have the same queries in both evaluations."""
        names = _sets_of(name, metric, before)
        if not names or names != _sets_of(name, metric, after):
            return None
        differences = []
        for set_name in names:
            one, other = self._by_query(set_name, metric, before), self._by_query(set_name, metric, after)
            if one is None or other is None or one.keys() != other.keys():
                return None
            differences.append(np.array([other[query] - value for query, value in one.items()]))
        return differences

    def _by_query(self, name: str, metric: str, of: Evaluated) -> Mapping[str, float] | None:
        """The metric of each query, if the files are those of this evaluation."""
        path = query_metrics_path(of.run.directory, of.step, name)
        if path not in self._files:
            self._files[path] = read_query_metrics(path)
        measured, value = self._files[path], _value(of, name, metric)
        if measured is None or metric not in measured.metrics or value is None:
            return None
        values = measured.values[:, list(measured.metrics).index(metric)]
        if not abs(float(values.mean()) - value) <= _TOLERANCE:  # of an earlier run in this directory
            return None
        return dict(zip(measured.queries, values.tolist(), strict=True))


def _sets_of(name: str, metric: str, of: Evaluated) -> list[str]:
    """The sets that a value is the mean over: the set itself, or those of `mean`."""
    if name != MEAN:
        return [name]
    return sorted(
        other
        for other in of.run.evaluations
        if other != MEAN and metric in of.run.evaluations[other] and _value(of, other, metric) is not None
    )


def value_at(series: Series, step: int) -> float | None:
    """The value at a step, if it is finite."""
    values = series.values[(series.steps == step) & np.isfinite(series.values)]
    return float(values[0]) if len(values) else None


def _value(of: Evaluated, name: str, metric: str) -> float | None:
    series = of.run.evaluations.get(name, {}).get(metric)
    return None if series is None else value_at(series, of.step)


def _signed(value: float, form: NumberFormat) -> str:
    """With a sign, which stays visible where all digits shown are 0: `−0.0000`; 0 itself has none."""
    if abs(value) < _ROUNDING and form is NumberFormat.plain:
        return "0"
    size = abs(value)
    digits = f"{size:.4f}" if form is NumberFormat.plain and size < _TINY else format_value(size, form)
    return digits if value == 0 else f"{'−' if value < 0 else '+'}{digits}"
