"""An evaluation function: measures a model in a way of the user's own."""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from embedtrain.config.code import load_code
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import ConfigError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.tracking.metrics import DATASET

if TYPE_CHECKING:
    from embedtrain.evaluation.sentence_transformers import TextEncoder

# Called with the encoder on every rank, which encodes the same texts; returns metrics by name.
EvaluationFunction = Callable[["TextEncoder"], Mapping[str, float]]


def load_function(path: str, option: str) -> EvaluationFunction:
    """Import `module:function`. Raises ConfigError if that fails, or if it cannot be called."""
    function: EvaluationFunction = load_code(path, option)
    if not callable(function):
        raise ConfigError(f"{option}={path}: must be a function of an encoder, not {function!r}")
    return function


def function_name(function: EvaluationFunction) -> str:
    """The name of its metrics among those of the evaluation sets."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_function_name(function: EvaluationFunction, names: Collection[str], option: str) -> None:
    """Raise ConfigError if an evaluation set has the name of the function."""
    if function_name(function) in names:
        raise ConfigError(f"{option}={function_name(function)}: a set to evaluate has its name")


def call_function(function: EvaluationFunction, encoder: SentenceEncoder, world: World) -> dict[str, float]:
    """The metrics that rank 0 gets. A collective. Raises ConfigError if they are no numbers by name."""
    from embedtrain.evaluation.sentence_transformers import TextEncoder  # takes seconds to import

    name = function_name(function)
    with explain_lost_contact(f"evaluating {name}"), TextEncoder(encoder, {}, close=lambda: None) as text_encoder:
        metrics: Any = function(text_encoder)
    with world.fail_together(f"evaluating {name}"):
        if world.is_main and not (isinstance(metrics, Mapping) and all(map(_is_metric, metrics.items()))):
            raise ConfigError(f"the evaluation function {name} must return numbers by name, not {metrics!r}")
    return world.broadcast({key: float(value) for key, value in metrics.items()} if world.is_main else {})


def _is_metric(item: tuple[Any, Any]) -> bool:
    name, value = item
    return (
        isinstance(name, str)
        and name not in ("step", "set", DATASET)
        and isinstance(value, Real)
        and math.isfinite(value)
    )
