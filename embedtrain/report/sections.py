"""The sections of the page about metrics: of training, of evaluation sets, and of forms of vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from markupsafe import Markup

from embedtrain.report.changes import Change, Comparisons, Evaluated, value_at
from embedtrain.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Chart,
    Labels,
    Line,
    NumberFormat,
    element,
    format_value,
    is_flat,
    line_chart,
    tick_labels,
    value_axis,
)
from embedtrain.report.runs import MEAN, RunRecords, Series, common_steps_per_epoch
from embedtrain.tracking.pages import VectorRow, is_form, vector_rows

_PLOT_POINTS = 900  # of all runs' lines in a plot
_MIN_LINE_POINTS, _MAX_LINE_POINTS = 80, 300
# A user's loss may log any number of metrics.
MAX_CHARTS = 60


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
    unit: str = ""  # of the vertical axis; default: the title
    is_noisy: bool = True  # whether a long series is smoothed


_SOURCE_LOSS = "loss/"
_TRAINING, _SPEED, _FRACTION, _RATE = Group.training, Group.speed, NumberFormat.fraction, NumberFormat.rate
METRICS = {
    "loss": MetricInfo("Loss", "mean over rows, and over the steps since the last point", _TRAINING),
    "accuracy": MetricInfo(
        "Accuracy",
        "fraction of queries whose positive scores best of the documents that the loss compares; bce: of correct pairs",
        _TRAINING,
        _FRACTION,
        "% of queries",
    ),
    "score_range": MetricInfo(
        "Range of scores",
        "mean over queries of the highest minus the lowest score of their own documents",
        _TRAINING,
        unit="score",
    ),
    "positive_similarity": MetricInfo(
        "Similarity to the positive", "mean cosine of query and positive", _TRAINING, unit="cosine"
    ),
    "hardest_negative_similarity": MetricInfo(
        "Similarity to the hardest negative",
        "mean over queries of the highest cosine to a negative",
        _TRAINING,
        unit="cosine",
    ),
    "false_negatives": MetricInfo(
        "Suspected false negatives",
        "fraction of negatives above 95 % of the positive's similarity",
        _TRAINING,
        _FRACTION,
        "% of negatives",
    ),
    "alignment": MetricInfo(
        "Alignment", "distance of query and positive; lower is closer", _TRAINING, unit="mean squared distance"
    ),
    "uniformity": MetricInfo(
        "Uniformity", "how evenly vectors fill the sphere; lower is more evenly", _TRAINING, unit="logarithm, -4 to 0"
    ),
    "lr": MetricInfo("Learning rate", "of the encoder", _TRAINING, NumberFormat.small, is_noisy=False),
    "grad_norm": MetricInfo("Gradient norm", "of the whole model, before clipping", _TRAINING, unit="L2 norm"),
    "temperature": MetricInfo("Temperature", "divides similarities", _TRAINING),
    "samples_per_s": MetricInfo("Rows per second", "training rows, over all ranks", _SPEED, _RATE, "rows/s"),
    "tokens_per_s": MetricInfo("Tokens per second", "without padding, over all ranks", _SPEED, _RATE, "tokens/s"),
    "mfu": MetricInfo(
        "Model FLOPs utilisation",
        "fraction of the devices' peak by their datasheet",
        _SPEED,
        _FRACTION,
        "% of the peak",
    ),
    "matmul_fraction": MetricInfo(
        "Fraction of matrix products",
        "of the devices' measured rate in large matrix products",
        _SPEED,
        _FRACTION,
        "% of that rate",
    ),
    "model_tflops": MetricInfo(
        "TFLOP/s per rank", "10^12 operations per second of the model itself", _SPEED, unit="TFLOP/s"
    ),
    "gpu_utilization": MetricInfo(
        "GPU utilisation", "of the first rank, when a step was logged", _SPEED, _FRACTION, "% of time with a kernel"
    ),
    "memory_gib": MetricInfo("Peak memory", "of the first rank", _SPEED, _RATE, "GiB"),
    "data_wait": MetricInfo("Waiting for data", "fraction of step time", _SPEED, _FRACTION, "% of time"),
    "communication": MetricInfo("Communication", "fraction of step time", _SPEED, _FRACTION, "% of time"),
    "padding": MetricInfo("Padding", "fraction of computed tokens", _SPEED, _FRACTION, "% of tokens"),
}
# Of sparse models; keys are `queries/flops`, `documents/active_words`, ...
_WORDS = {
    "flops": MetricInfo("FLOPS", "sum over words of the squared mean weight of the {texts}", _TRAINING),
    "active_words": MetricInfo("Active words", "mean over the {texts}", _TRAINING, _RATE, "words"),
    "active_words_p99": MetricInfo("Active words, 99th percentile", "of the {texts}", _TRAINING, _RATE, "words"),
    "density": MetricInfo("Density", "active fraction of the vocabulary, mean over the {texts}", _TRAINING),
    "empty_texts": MetricInfo("Empty", "fraction of the {texts} without active words", _TRAINING, _FRACTION),
}
_ORDER = {name: index for index, name in enumerate(METRICS)}


def metric_info(key: str) -> MetricInfo:
    """How a logged metric is shown; an unknown metric keeps its key, in a group of its own."""
    info = METRICS.get(key)
    if info is not None:
        return info
    if key.startswith("lr/"):
        group = key.removeprefix("lr/")
        return MetricInfo(
            f"Learning rate of {group}", "of this parameter group", _TRAINING, NumberFormat.small, is_noisy=False
        )
    if key.startswith(_SOURCE_LOSS):
        return MetricInfo(
            f"Loss of {key.removeprefix(_SOURCE_LOSS)}", "mean over this source's rows", Group.training, unit="loss"
        )
    texts, _, name = key.partition("/")
    if texts in ("queries", "documents") and name in _WORDS:
        info = _WORDS[name]
        return replace(info, title=f"{info.title} of {texts}", description=info.description.format(texts=texts))
    return MetricInfo(key, "", Group.other)


def metric_order(key: str) -> tuple[int, str]:
    """Sort key of metrics within their group."""
    return _ORDER.get(key.partition("/")[0], len(_ORDER)), key


@dataclass(frozen=True, slots=True)
class Constant:
    """A metric that had one value in each run, formatted."""

    title: str
    description: str
    values: tuple[str, ...]  # one per run


@dataclass(frozen=True, slots=True)
class MetricSection:
    """One group of training metrics: plots, those without a plot, and how many are not shown."""

    heading: str
    charts: tuple[Chart, ...]
    constants: tuple[Constant, ...]
    num_omitted: int


def metric_sections(runs: Sequence[RunRecords]) -> list[MetricSection]:
    """Plots of all metrics that any run has logged.

    A plot has a line for each run; the losses of a single run's sources are lines of one plot.
    """
    keys = sorted({key for run in runs for key, series in run.logged.items() if len(series.steps)}, key=metric_order)
    max_points = max(_MIN_LINE_POINTS, min(_MAX_LINE_POINTS, _PLOT_POINTS // max(1, len(runs))))
    all_steps = [series.steps for run in runs for series in run.logged.values() if len(series.steps)]
    first = int(min((steps[0] for steps in all_steps), default=0))
    last = int(max((steps[-1] for steps in all_steps), default=0))
    sections = []
    for group in Group:
        group_keys = [key for key in keys if metric_info(key).group is group]
        plots = _plots(group_keys, runs)
        charts = []
        constants = []
        for (key, *_), lines in plots:
            info = metric_info(key)
            if is_flat(lines):
                constants.append(Constant(info.title, info.description, _values_of_runs(key, runs)))
                continue
            charts.append(
                line_chart(
                    Labels(info.title, info.description, info.unit or info.title),
                    lines,
                    smooth=info.is_noisy,
                    form=info.form,
                    max_points=max_points,
                    steps=(first, last),
                    steps_per_epoch=common_steps_per_epoch(runs),
                )
            )
        if charts or constants:
            shown = charts[:MAX_CHARTS], constants[:MAX_CHARTS]
            omitted = len(charts) + len(constants) - len(shown[0]) - len(shown[1])
            sections.append(MetricSection(group.value, tuple(shown[0]), tuple(shown[1]), omitted))
    return sections


def _plots(keys: Sequence[str], runs: Sequence[RunRecords]) -> list[tuple[list[str], list[Line]]]:
    """The keys and lines of each plot."""
    plots: list[tuple[list[str], list[Line]]] = []
    losses = [key for key in keys if key == "loss" or key.startswith(_SOURCE_LOSS)]
    for key in keys:
        if len(runs) == 1 and key in losses:
            number = losses.index(key)
            if number % NUM_COLOURS == 0:  # further sources are in further plots
                names = losses[number : number + NUM_COLOURS]
                labels = [name.removeprefix(_SOURCE_LOSS) if name != "loss" else "all rows" for name in names]
                series = [runs[0].logged[name] for name in names]
                lines = [Line(label, colour, of) for colour, (label, of) in enumerate(zip(labels, series, strict=True))]
                plots.append((names, lines))
            continue
        lines = [
            Line(run.label, number, run.logged[key])
            for number, run in enumerate(runs)
            if key in run.logged and len(run.logged[key].steps)
        ]
        plots.append(([key], lines))
    return plots


def _values_of_runs(key: str, runs: Sequence[RunRecords]) -> tuple[str, ...]:
    info = metric_info(key)
    series = [run.logged.get(key) for run in runs]
    values = [None if of is None or not len(of.finite) else float(of.finite[-1]) for of in series]
    unit = f" {info.unit}" if info.form is NumberFormat.rate else ""
    return tuple(format_value(value, info.form) + (unit if value is not None else "") for value in values)


_POINTS = 60  # of a line in a plot


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric in one run, formatted; `change` is since step 0, or, for several runs, from the first run."""

    first: str
    best: str
    last: str | None  # None: not evaluated after step 0
    change: Change | None


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """One evaluation set: plots of the main metric and of the others, and for each metric a cell per run."""

    name: str
    dataset: str  # kind and size; empty if unknown
    subset: bool
    main: Chart | None  # None: it has one value
    others: tuple[Chart, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class MainMetric:
    """The main metric of a run: its name, and its value before training (at step 0, if evaluated) and after it."""

    name: str
    before: str | None
    after: str | None  # None: not evaluated after step 0
    change: Change | None
    dataset: str
    subset: bool


def evaluation_sections(runs: Sequence[RunRecords], comparisons: Comparisons) -> list[EvaluationSection]:
    """All evaluation sets of all runs, the mean first; forms of vectors have a section of their own."""
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations if not is_form(name, run.datasets)))
    names.sort(key=lambda name: name != MEAN)
    sections = []
    for name in names:
        metrics = list(dict.fromkeys(metric for run in runs for metric in run.evaluations.get(name, {})))
        if not metrics:
            continue
        charts = [_chart(name, metric, runs) for metric in metrics]
        rows = tuple((metric, tuple(_cell(run, name, metric, runs, comparisons) for run in runs)) for metric in metrics)
        datasets = [run.datasets[name] for run in runs if name in run.datasets]
        sections.append(
            EvaluationSection(
                name,
                _describe(datasets[-1].kind, datasets[-1].size) if datasets else "",
                any(dataset.subset for dataset in datasets),
                charts[0],
                tuple(chart for chart in charts[1:] if chart is not None),
                rows,
            )
        )
    return sections


def main_metric(run: RunRecords, comparisons: Comparisons) -> MainMetric | None:
    """The metric that selects the best step, else the main metric of the mean or of the first set."""
    best = run.option("checkpoint", "best_metric")
    name, _, metric = best.rpartition("/") if isinstance(best, str) else ("", "", "")
    if metric not in run.evaluations.get(name, {}):
        name = MEAN if MEAN in run.evaluations else next(iter(run.evaluations), "")
        metric = next(iter(run.evaluations.get(name, {})), "")
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    step, before = _final_step(run, series), value_at(series, 0)
    change = None
    if before is not None and step is not None and len(series.finite) > 1:
        change = comparisons.change(name, metric, Evaluated(run, 0), Evaluated(run, step))
    dataset = run.datasets.get(name)
    return MainMetric(
        f"{name} {metric}",
        None if before is None or (step is not None and len(series.finite) == 1) else format_value(before),
        None if step is None else format_value(value_at(series, step)),
        change,
        "" if dataset is None else _describe(dataset.kind, dataset.size),
        dataset is not None and dataset.subset,
    )


def _describe(kind: str, size: str) -> str:
    return " · ".join(part for part in (kind.replace("_", " "), size) if part)


def _chart(name: str, metric: str, runs: Sequence[RunRecords]) -> Chart | None:
    """None if there is nothing to see but one value."""
    lines = [
        Line(run.label, number, run.evaluations[name][metric])
        for number, run in enumerate(runs)
        if metric in run.evaluations.get(name, {}) and len(run.evaluations[name][metric].steps)
    ]
    if is_flat(lines):
        return None
    labels = Labels(f"{name} · {metric}", unit=metric)
    return line_chart(labels, lines, max_points=_POINTS, steps_per_epoch=common_steps_per_epoch(runs))


def _cell(run: RunRecords, name: str, metric: str, runs: Sequence[RunRecords], comparisons: Comparisons) -> Cell | None:
    series = run.evaluations.get(name, {}).get(metric)
    if series is None or not len(series.finite):
        return None
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    best, step, change = int(values.argmax()), _final_step(run, series), None
    reference = runs[0].evaluations.get(name, {}).get(metric)
    if step is not None and len(runs) == 1 and len(values) > 1:
        change = comparisons.change(name, metric, Evaluated(run, 0), Evaluated(run, step))
    elif step is not None and run is not runs[0] and reference is not None and len(reference.finite):
        of_reference = _final_step(runs[0], reference)
        if of_reference is not None:
            change = comparisons.change(name, metric, Evaluated(runs[0], of_reference), Evaluated(run, step))
    return Cell(
        _at_step(float(values[0]), int(steps[0])),
        _at_step(float(values[best]), int(steps[best])),
        None if step is None else _at_step(value_at(series, step), step),
        change,
    )


def _at_step(value: float | None, step: int) -> str:
    return f"{format_value(value)} @ {step:,}"


def _final_step(run: RunRecords, series: Series) -> int | None:
    """The exported step if it was evaluated, else the last one with a finite value; None if that is step 0."""
    exported = run.history.exported_step
    if exported is not None and value_at(series, exported) is not None:
        return exported
    return int(series.steps[np.isfinite(series.values)][-1]) or None


_TICKS = 6


@dataclass(frozen=True, slots=True)
class VectorSection:
    """A set: its plot, and a row of cells per form and run."""

    set_name: str
    metric: str
    picture: Markup  # SVG
    rows: tuple[tuple[str, VectorRow], ...]  # with the label of the run


def vector_sections(runs: Sequence[RunRecords]) -> list[VectorSection]:
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
