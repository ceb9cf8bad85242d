"""The sections of the page about metrics: plots of training metrics, and plots and tables of evaluation metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from embedtrain.tracking.report.chart import Chart, Line, NumberFormat, format_value, line_chart
from embedtrain.tracking.report.runs import Run, Series

_PLOT_POINTS = 900  # of all runs' lines in a plot
_MIN_LINE_POINTS, _MAX_LINE_POINTS = 80, 300
_COLLAPSED_POINTS = 60  # of a line in a plot of evaluation metrics
# A user's loss may log any number of metrics.
MAX_CHARTS = 60
_MEAN = "mean"  # the name of the means over sets


class Group(str, Enum):
    """The section of a metric; the value is its heading."""

    training = "Training"
    speed = "Throughput and memory"
    other = "Other metrics"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """How a metric is shown."""

    title: str
    description: str
    group: Group
    form: NumberFormat = NumberFormat.plain


_TRAINING, _SPEED, _FRACTION, _RATE = Group.training, Group.speed, NumberFormat.fraction, NumberFormat.rate
METRICS = {
    "loss": MetricInfo("Loss", "mean over the global batch", _TRAINING),
    "accuracy": MetricInfo(
        "In-batch accuracy", "fraction of queries whose own document scores best", _TRAINING, _FRACTION
    ),
    "positive_similarity": MetricInfo("Similarity to the positive", "mean cosine of query and positive", _TRAINING),
    "hardest_negative_similarity": MetricInfo(
        "Similarity to the hardest negative", "mean over queries of the highest cosine to a negative", _TRAINING
    ),
    "false_negatives": MetricInfo(
        "Suspected false negatives",
        "fraction of negatives above 95 % of the positive's similarity",
        _TRAINING,
        _FRACTION,
    ),
    "alignment": MetricInfo("Alignment", "mean squared distance of query and positive; lower is closer", _TRAINING),
    "uniformity": MetricInfo("Uniformity", "how evenly vectors fill the sphere; lower is more evenly", _TRAINING),
    "lr": MetricInfo("Learning rate", "of the encoder", _TRAINING, NumberFormat.small),
    "grad_norm": MetricInfo("Gradient norm", "of the whole model, before clipping", _TRAINING),
    "temperature": MetricInfo("Temperature", "divides similarities", _TRAINING),
    "samples_per_s": MetricInfo("Rows per second", "training rows, over all ranks", _SPEED, _RATE),
    "tokens_per_s": MetricInfo("Tokens per second", "without padding, over all ranks", _SPEED, _RATE),
    "mfu": MetricInfo("Model FLOPs utilisation", "fraction of the devices' rate in matrix products", _SPEED, _FRACTION),
    "model_tflops": MetricInfo("TFLOP/s per rank", "10^12 operations per second of the model itself", _SPEED),
    "data_wait": MetricInfo("Waiting for data", "fraction of step time", _SPEED, _FRACTION),
    "communication": MetricInfo("Communication", "fraction of step time", _SPEED, _FRACTION),
    "padding": MetricInfo("Padding", "fraction of computed tokens", _SPEED, _FRACTION),
    "memory_gib": MetricInfo("Peak memory", "GiB, of the first rank", _SPEED, _RATE),
}
_ORDER = {name: index for index, name in enumerate(METRICS)}


def metric_info(key: str) -> MetricInfo:
    """How a logged metric is shown; an unknown metric keeps its key, in a group of its own."""
    info = METRICS.get(key)
    if info is not None:
        return info
    if key.startswith("loss/"):
        return MetricInfo(f"Loss of {key.removeprefix('loss/')}", "mean over this source's batches", Group.training)
    return MetricInfo(key, "", Group.other)


def metric_order(key: str) -> tuple[int, str]:
    """Sort key of metrics within their group."""
    return _ORDER.get(key.partition("/")[0], len(_ORDER)), key


@dataclass(frozen=True, slots=True)
class MetricSection:
    """Plots of one group of training metrics, and how many metrics are not shown."""

    heading: str
    charts: tuple[Chart, ...]
    num_omitted: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric in one run, formatted; `direction` is `up`, `down` or empty."""

    first: str
    best: str
    last: str
    change: str
    direction: str


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """One evaluation set: the main plot, the other plots, and for each metric a cell per run."""

    name: str
    main: Chart
    others: tuple[Chart, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class MainMetric:
    """The main metric of a run: its name, and its value before training (at step 0, if evaluated) and after it."""

    name: str
    before: str | None
    after: str
    change: str
    direction: str


def metric_sections(runs: Sequence[Run]) -> list[MetricSection]:
    """Plots of all metrics that any run has logged, each with a line per run that has it."""
    keys = sorted({key for run in runs for key, series in run.logged.items() if len(series.steps)}, key=metric_order)
    max_points = max(_MIN_LINE_POINTS, min(_MAX_LINE_POINTS, _PLOT_POINTS // max(1, len(runs))))
    all_steps = [series.steps for run in runs for series in run.logged.values() if len(series.steps)]
    first = int(min((steps[0] for steps in all_steps), default=0))
    last = int(max((steps[-1] for steps in all_steps), default=0))
    sections = []
    for group in Group:
        group_keys = [key for key in keys if metric_info(key).group is group]
        charts = tuple(_training_chart(key, runs, max_points, (first, last)) for key in group_keys[:MAX_CHARTS])
        if charts:
            sections.append(MetricSection(group.value, charts, len(group_keys) - len(charts)))
    return sections


def _training_chart(key: str, runs: Sequence[Run], max_points: int, steps: tuple[int, int]) -> Chart:
    info = metric_info(key)
    lines = [
        Line(run.label, number, run.logged[key])
        for number, run in enumerate(runs)
        if key in run.logged and len(run.logged[key].steps)
    ]
    return line_chart(
        info.title, lines, description=info.description, form=info.form, max_points=max_points, steps=steps
    )


def evaluation_sections(runs: Sequence[Run]) -> list[EvaluationSection]:
    """All evaluation sets of all runs, the mean first."""
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    names.sort(key=lambda name: name != _MEAN)
    sections = []
    for name in names:
        metrics = list(dict.fromkeys(metric for run in runs for metric in run.evaluations.get(name, {})))
        charts = [(metric, _evaluation_chart(name, metric, runs)) for metric in metrics]
        plotted = [(metric, chart) for metric, chart in charts if chart is not None]
        if plotted:
            rows = tuple((metric, tuple(_cell(run, name, metric) for run in runs)) for metric, _ in plotted)
            sections.append(EvaluationSection(name, plotted[0][1], tuple(chart for _, chart in plotted[1:]), rows))
    return sections


def main_metric(run: Run) -> MainMetric | None:
    """The metric that selects the best step, else the main metric of the mean or of the first set."""
    best = run.option("checkpoint", "best_metric")
    name, _, metric = best.partition("/") if isinstance(best, str) else ("", "", "")
    if metric not in run.evaluations.get(name, {}):
        name = _MEAN if _MEAN in run.evaluations else next(iter(run.evaluations), "")
        metric = next(iter(run.evaluations.get(name, {})), "")
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    exported_step = run.history.exported_step
    after = _value_at(series, exported_step) if exported_step is not None else None
    after = float(series.finite[-1]) if after is None else after
    before = _value_before_training(series)
    change, direction = _change(before, after)
    return MainMetric(
        f"{name} {metric}", None if before is None else format_value(before), format_value(after), change, direction
    )


def _evaluation_chart(name: str, metric: str, runs: Sequence[Run]) -> Chart | None:
    lines = [
        Line(run.label, number, run.evaluations[name][metric])
        for number, run in enumerate(runs)
        if metric in run.evaluations.get(name, {}) and len(run.evaluations[name][metric].steps)
    ]
    if not lines:
        return None
    return line_chart(f"{name} · {metric}", lines, max_points=_COLLAPSED_POINTS)


def _cell(run: Run, name: str, metric: str) -> Cell | None:
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    best = int(values.argmax())
    change, direction = _change(_value_before_training(series), float(values[-1]))
    return Cell(
        _at_step(float(values[0]), int(steps[0])),
        _at_step(float(values[best]), int(steps[best])),
        _at_step(float(values[-1]), int(steps[-1])),
        change,
        direction,
    )


def _at_step(value: float, step: int) -> str:
    return f"{format_value(value)} @ {step:,}"


def _value_before_training(series: Series) -> float | None:
    """The value at step 0; None if training has not been evaluated since, or only later steps were evaluated."""
    return _value_at(series, 0) if len(series.finite) > 1 else None


def _value_at(series: Series, step: int) -> float | None:
    values = series.values[(series.steps == step) & np.isfinite(series.values)]
    return float(values[0]) if len(values) else None


def _change(before: float | None, after: float) -> tuple[str, str]:
    if before is None:
        return "", ""
    change = after - before
    text = format_value(abs(change))
    direction = "" if float(text.replace(",", "")) == 0 else "up" if change > 0 else "down"
    return f"{'−' if change < 0 else '+'}{text}", direction
