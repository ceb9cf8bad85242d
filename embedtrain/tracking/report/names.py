"""What figures are called, what they mean, in which group they stand, and how their values are written."""

import math
from dataclasses import dataclass
from enum import Enum


class NumberFormat(str, Enum):
    """How a value is written."""

    plain = "plain"  # four significant digits
    share = "share"  # of 1, as per cent
    rate = "rate"  # large numbers with commas
    small = "small"  # such as a learning rate: 2.0e-05


class Group(str, Enum):
    """Where a figure stands; the value is the heading."""

    training = "Training"
    speed = "Throughput and memory"
    other = "Other figures"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """A figure: heading, what it says in a line, group and form."""

    title: str
    meaning: str
    group: Group
    form: NumberFormat = NumberFormat.plain


_TRAINING, _SPEED = Group.training, Group.speed
METRICS = {
    "loss": MetricInfo("Loss", "mean over the global batch", _TRAINING),
    "accuracy": MetricInfo(
        "Accuracy in the batch", "share of queries whose own document scores best", _TRAINING, NumberFormat.share
    ),
    "positive_similarity": MetricInfo("Similarity to the positive", "mean cosine of query and positive", _TRAINING),
    "hardest_negative_similarity": MetricInfo(
        "Similarity to the hardest negative", "mean over queries of the highest cosine to a negative", _TRAINING
    ),
    "false_negatives": MetricInfo(
        "Suspected false negatives",
        "share of negatives above 95 % of the positive's similarity",
        _TRAINING,
        NumberFormat.share,
    ),
    "alignment": MetricInfo("Alignment", "mean squared distance of query and positive; lower is closer", _TRAINING),
    "uniformity": MetricInfo("Uniformity", "how evenly vectors fill the sphere; lower is more evenly", _TRAINING),
    "lr": MetricInfo("Learning rate", "of the weights", _TRAINING, NumberFormat.small),
    "grad_norm": MetricInfo("Gradient norm", "of the whole model, before clipping", _TRAINING),
    "temperature": MetricInfo("Temperature", "that similarities are divided by", _TRAINING),
    "samples_per_s": MetricInfo("Rows per second", "training rows, all ranks together", _SPEED, NumberFormat.rate),
    "tokens_per_s": MetricInfo(
        "Tokens per second", "padding not counted, all ranks together", _SPEED, NumberFormat.rate
    ),
    "mfu": MetricInfo(
        "Model FLOPs utilisation", "share of the matrix products' rate of the devices", _SPEED, NumberFormat.share
    ),
    "model_tflops": MetricInfo("TFLOP/s per rank", "10^12 operations a second for the model itself", _SPEED),
    "data_wait": MetricInfo("Waiting for data", "share of the time of steps", _SPEED, NumberFormat.share),
    "communication": MetricInfo("Communication", "share of the time of steps", _SPEED, NumberFormat.share),
    "padding": MetricInfo("Padding", "share of computed tokens that are none", _SPEED, NumberFormat.share),
    "memory_gib": MetricInfo("Peak memory", "GiB, of the first rank", _SPEED, NumberFormat.rate),
}
_ORDER = {name: place for place, name in enumerate(METRICS)}


def metric_info(key: str) -> MetricInfo:
    """What a logged figure is called; one that is unknown keeps its key, in a group of its own."""
    found = METRICS.get(key)
    if found is not None:
        return found
    if key.startswith("loss/"):
        return MetricInfo(f"Loss of {key.removeprefix('loss/')}", "mean over this source's batches", Group.training)
    return MetricInfo(key, "", Group.other)


def metric_order(key: str) -> tuple[int, str]:
    """Sorts figures as they are to stand in their group."""
    return _ORDER.get(key.partition("/")[0], len(_ORDER)), key


def written(value: float | None, form: NumberFormat = NumberFormat.plain) -> str:
    """A value as people read it; `—` where there is none."""
    if value is None or not math.isfinite(value):
        return "—"
    match form:
        case NumberFormat.share:
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


def duration(seconds: float | None) -> str:
    """`3 h 12 min`, `4 min 10 s`, `0.8 s`."""
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
