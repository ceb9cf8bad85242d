"""What evaluations say: each set's main figure over steps, and a table of all figures with their changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.tracking.report.chart import Chart, Line, line_chart
from embedtrain.tracking.report.names import NumberFormat, written
from embedtrain.tracking.report.runs import Run, Series

_MEAN = "mean"  # what the means over sets are reported under
_LINES_OF_OTHERS = 60  # points of a line that is folded away


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in one run, in words; `direction` is `up`, `down` or empty."""

    first: str
    best: str
    last: str
    change: str
    direction: str


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """One evaluation set: what is plotted first, the other plots, and for each metric a cell for each run."""

    name: str
    main: Chart
    others: tuple[Chart, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class MainMetric:
    """The figure a run is known by: what it is, and its value before and after."""

    name: str
    before: str | None
    after: str
    change: str
    direction: str


def evaluation_sections(runs: Sequence[Run]) -> list[EvaluationSection]:
    """All evaluation sets of all runs, the mean first."""
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    names.sort(key=lambda name: name != _MEAN)
    found = []
    for name in names:
        metrics = list(dict.fromkeys(metric for run in runs for metric in run.evaluations.get(name, {})))
        charts = [_chart(name, metric, runs) for metric in metrics]
        some = [(metric, chart) for metric, chart in zip(metrics, charts, strict=True) if chart is not None]
        if some:
            rows = tuple((metric, tuple(_cell(run, name, metric) for run in runs)) for metric, _ in some)
            found.append(EvaluationSection(name, some[0][1], tuple(chart for _, chart in some[1:]), rows))
    return found


def main_metric(run: Run) -> MainMetric | None:
    """By what the best step is chosen where that is asked for, else the mean's or the first set's main metric."""
    best = run.option("checkpoint", "best")
    name, _, metric = best.partition("/") if isinstance(best, str) else ("", "", "")
    if metric not in run.evaluations.get(name, {}):
        name = _MEAN if _MEAN in run.evaluations else next(iter(run.evaluations), "")
        metric = next(iter(run.evaluations.get(name, {})), "")
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    exported = run.sessions[-1].exported if run.sessions else None
    after = _value_at(series, exported) if exported is not None else None
    after = float(series.finite[-1]) if after is None else after
    before = float(series.finite[0]) if len(series.finite) > 1 else None
    change, direction = _change(before, after)
    return MainMetric(
        f"{name} {metric}", None if before is None else written(before), written(after), change, direction
    )


def _chart(name: str, metric: str, runs: Sequence[Run]) -> Chart | None:
    lines = [
        Line(run.label, number, run.evaluations[name][metric])
        for number, run in enumerate(runs)
        if metric in run.evaluations.get(name, {}) and len(run.evaluations[name][metric].steps)
    ]
    if not lines:
        return None
    return line_chart(f"{name} · {metric}", lines, most=_LINES_OF_OTHERS)


def _cell(run: Run, name: str, metric: str) -> Cell | None:
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    best = int(values.argmax())
    change, direction = _change(float(values[0]) if len(values) > 1 else None, float(values[-1]))
    return Cell(
        _at(float(values[0]), int(steps[0])),
        _at(float(values[best]), int(steps[best])),
        _at(float(values[-1]), int(steps[-1])),
        change,
        direction,
    )


def _at(value: float, step: int) -> str:
    return f"{written(value, NumberFormat.plain)} @ {step:,}"


def _value_at(series: Series, step: int) -> float | None:
    found = series.values[(series.steps == step) & np.isfinite(series.values)]
    return float(found[0]) if len(found) else None


def _change(before: float | None, after: float) -> tuple[str, str]:
    if before is None:
        return "", ""
    change = after - before
    text = written(abs(change))
    direction = "" if float(text.replace(",", "")) == 0 else "up" if change > 0 else "down"
    return f"{'−' if change < 0 else '+'}{text}", direction
