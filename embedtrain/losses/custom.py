"""Builds a loss class that the user names as `module:Class`."""

import inspect

from embedtrain.config.code import load_code
from embedtrain.config.losses import CustomConfig
from embedtrain.errors import ConfigError
from embedtrain.losses.types import Loss


def load_loss_class(path: str, option: str = "loss.path") -> type[Loss]:
    """Import a class; a ConfigError if it is no subclass of Loss."""
    kind = load_code(path, option)
    if not (isinstance(kind, type) and issubclass(kind, Loss)):
        raise ConfigError(f"{option}={path}: must be a subclass of embedtrain.losses.types.Loss, not {kind!r}")
    return kind


def build_custom(config: CustomConfig, dimension: int) -> Loss:
    """An instance of the class. A constructor that takes `dimension` gets the dimension of the embeddings."""
    kind = load_loss_class(config.path)
    kwargs = dict(config.kwargs)
    if "dimension" in inspect.signature(kind).parameters:
        kwargs.setdefault("dimension", dimension)
    try:
        return kind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"loss.kwargs={config.kwargs}: {config.path}: {error}") from error
