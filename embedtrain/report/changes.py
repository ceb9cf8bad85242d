"""Differences between two evaluations, with intervals by a paired bootstrap, and the outcome of a run in words.

Efron and Tibshirani, "An Introduction to the Bootstrap" (1993); for rankings Sakai, "Evaluating Evaluation Metrics
Based on the Bootstrap" (SIGIR 2006). Queries are drawn with replacement; a resample has the same queries for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.report.chart import NumberFormat, format_value
from embedtrain.report.runs import MEAN, RunRecords, Series, read_runs
from embedtrain.tracking.metrics import MainChange, QueryMetrics, main_changes, query_metrics_path, read_query_metrics

RESAMPLES = 2000
CONFIDENCE = 0.95
_MAX_CELLS = 1 << 22  # of the differences that are drawn at a time


def _resampled_means(differences: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Differences of queries [Q] to their means in each resample: [RESAMPLES]. The same for the same arguments."""
    generator, count = np.random.default_rng(seed), len(differences)
    rows = max(1, _MAX_CELLS // count)
    return np.concatenate(
        [
            differences[generator.integers(0, count, (min(rows, RESAMPLES - start), count))].mean(axis=1)
            for start in range(0, RESAMPLES, rows)
        ]
    )


def interval(differences: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The percentile interval of the mean over sets of the mean difference over the queries of each set.

    One array per set, at least one query in each: the queries of a set are drawn from that set only.
    """
    means = np.mean([_resampled_means(of_set, number) for number, of_set in enumerate(differences)], axis=0)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


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

    run: RunRecords
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


_MAX_QUERIES = 20_000  # of a set; the bootstrap over more takes seconds


def describe_outcome(run_dir: Path, step: int, *, selects_best: bool, evaluates_between: bool) -> list[str]:
    """One line per set, as of `main_changes`, which says whether `step` is worse than step 0 or not clearly different.

    A hint follows unless the run `selects_best` by a metric.
    """
    lines: list[str] = []
    worse_sets: list[MainChange] = []
    mains = main_changes(run_dir, step)
    comparable = {main.name: main.metric for main in mains if main.first_step == 0 and main.last_step == step}
    changes = changes_since_start(run_dir, step, comparable) if comparable else {}
    for main in mains:
        change = changes.get(main.name)
        interval = "" if change is None or not change.interval else change.interval.replace("−", "-")
        if interval and change is not None and change.direction == "noise":
            lines.append(f"{main}: no clear change ({CONFIDENCE:.0%} interval of the difference {interval})")
        elif not main.is_worse or main.last_step != step:
            lines.append(str(main))
        else:
            range_text = f" ({CONFIDENCE:.0%} interval of the difference {interval})" if interval else ""
            which = "" if worse_sets else ": the exported model is below the one before training"
            lines.append(f"{main}, which is worse{range_text}{which}")
            worse_sets.append(main)
    if worse_sets and not selects_best:
        also = "" if evaluates_between else ", with evaluation.every=STEPS to have several to choose from"
        first = worse_sets[0]
        lines.append(f"checkpoint.best_metric={first.name}/{first.metric} exports the best evaluated step{also}")
    return lines


def changes_since_start(run_dir: Path, step: int, metrics: Mapping[str, str]) -> dict[str, Change]:
    """The changes from step 0 to `step` with their intervals, as set -> change; `metrics` names the metric of each set.

    A set is left out where a value is missing, or where its queries are too many to draw from.
    """
    try:
        (run,) = read_runs([run_dir])
    except Exception:  # an interval is not worth losing the run
        return {}
    comparisons = Comparisons()
    changes = {}
    for name, metric in metrics.items():
        names = [other for other in run.evaluations if other != MEAN] if name == MEAN else [name]
        if sum(run.datasets[other].counts.get("queries", 0) for other in names if other in run.datasets) > _MAX_QUERIES:
            continue
        change = comparisons.change(name, metric, Evaluated(run, 0), Evaluated(run, step))
        if change is not None:
            changes[name] = change
    return changes
