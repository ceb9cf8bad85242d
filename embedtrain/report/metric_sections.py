"""The sections of the page about training metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from embedtrain.report.axes import NumberFormat, format_value
from embedtrain.report.chart import NUM_COLOURS, Chart, Labels, Line, is_flat, line_chart
from embedtrain.report.runs import RunRecords, common_steps_per_epoch

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
