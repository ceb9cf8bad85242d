"""Builds a loss class that the user names as `module:Class`."""

import inspect

from embedtrain.config.code import load_code
from embedtrain.config.losses import CustomConfig
from embedtrain.errors import ConfigError
from embedtrain.losses.score import Score
from embedtrain.losses.types import EncodedLoss, Loss


def load_loss_class(path: str, option: str = "loss.path") -> type[Loss]:
    """Import a class; a ConfigError if it is no subclass of Loss."""
    kind = load_code(path, option)
    if not (isinstance(kind, type) and issubclass(kind, Loss)):
        raise ConfigError(f"{option}={path}: must be a subclass of embedtrain.losses.types.Loss, not {kind!r}")
    return kind


def build_custom(config: CustomConfig, dimension: int, score: Score | None = None) -> Loss:
    """An instance of the class. A constructor that takes `dimension` or `score` gets that of the model.

    A class that takes one vector of each text raises a ConfigError for a score of texts with several.
    """
    kind = load_loss_class(config.path)
    if score is not None and not score.one_vector and not issubclass(kind, EncodedLoss):
        raise ConfigError(
            f"loss.path={config.path}: takes one vector of each text, and model.kind={score.kind} has several; derive "
            "the class from embedtrain.losses.types.EncodedLoss"
        )
    kwargs = dict(config.kwargs)
    for name, value in (("dimension", dimension), ("score", score)):
        if value is not None and name in inspect.signature(kind).parameters:
            kwargs.setdefault(name, value)
    try:
        return kind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"loss.kwargs={config.kwargs}: {config.path}: {error}") from error
