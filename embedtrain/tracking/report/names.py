"""What figures are called, what they mean, in which group they stand, and how their values are written."""

import math
from dataclasses import dataclass
from enum import Enum


class Form(str, Enum):
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
class Named:
    """A figure: heading, what it says in a line, group and form."""

    title: str
    meaning: str
    group: Group
    form: Form = Form.plain


_TRAINING, _SPEED = Group.training, Group.speed
NAMES = {
    "loss": Named("Loss", "mean over the global batch", _TRAINING),
    "accuracy": Named(
        "Accuracy in the batch", "share of queries whose own document scores best", _TRAINING, Form.share
    ),
    "positive_similarity": Named("Similarity to the positive", "mean cosine of query and positive", _TRAINING),
    "hardest_negative_similarity": Named(
        "Similarity to the hardest negative", "mean over queries of the highest cosine to a negative", _TRAINING
    ),
    "false_negatives": Named(
        "Suspected false negatives", "share of negatives above 95 % of the positive's similarity", _TRAINING, Form.share
    ),
    "alignment": Named("Alignment", "mean squared distance of query and positive; lower is closer", _TRAINING),
    "uniformity": Named("Uniformity", "how evenly vectors fill the sphere; lower is more evenly", _TRAINING),
    "lr": Named("Learning rate", "of the weights", _TRAINING, Form.small),
    "grad_norm": Named("Gradient norm", "of the whole model, before clipping", _TRAINING),
    "temperature": Named("Temperature", "that similarities are divided by", _TRAINING),
    "samples_per_s": Named("Rows per second", "training rows, all ranks together", _SPEED, Form.rate),
    "tokens_per_s": Named("Tokens per second", "padding not counted, all ranks together", _SPEED, Form.rate),
    "mfu": Named("Model FLOPs utilisation", "share of the matrix products' rate of the devices", _SPEED, Form.share),
    "model_tflops": Named("TFLOP/s per rank", "10^12 operations a second for the model itself", _SPEED),
    "data_wait": Named("Waiting for data", "share of the time of steps", _SPEED, Form.share),
    "communication": Named("Communication", "share of the time of steps", _SPEED, Form.share),
    "padding": Named("Padding", "share of computed tokens that are none", _SPEED, Form.share),
    "memory_gib": Named("Peak memory", "GiB, of the first rank", _SPEED, Form.rate),
}
_ORDER = {name: place for place, name in enumerate(NAMES)}


def named(key: str) -> Named:
    """What a logged figure is called; one that is unknown keeps its key, in a group of its own."""
    found = NAMES.get(key)
    if found is not None:
        return found
    if key.startswith("loss/"):
        return Named(f"Loss of {key.removeprefix('loss/')}", "mean over this source's batches", Group.training)
    return Named(key, "", Group.other)


def order_of(key: str) -> tuple[int, str]:
    """Sorts figures as they are to stand in their group."""
    return _ORDER.get(key.partition("/")[0], len(_ORDER)), key


def written(value: float | None, form: Form = Form.plain) -> str:
    """A value as people read it; `—` where there is none."""
    if value is None or not math.isfinite(value):
        return "—"
    match form:
        case Form.share:
            return f"{value:.1%}"
        case Form.small:
            return "0" if value == 0 else f"{value:.1e}"
        case Form.rate:
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"
        case Form.plain:
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
