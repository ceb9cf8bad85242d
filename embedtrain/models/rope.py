"""Rotary positions beyond those a model was trained with: `model.rope_scaling` put into its configuration."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig

from embedtrain.config.model_checks import ROPE_TYPES, check_rope_scaling
from embedtrain.errors import ConfigError

_LOGGER = "transformers.modeling_rope_utils"


def has_rotary_positions(config: PretrainedConfig) -> bool:
    """Whether the model turns its queries and keys, and has no table of positions that ends."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def scale(config: PretrainedConfig, scaling: Mapping[str, Any] | None) -> None:
    """Set the scaling in place, and `max_position_embeddings` to as many positions as it reaches.

    Layers that look through a sliding window (Gemma 3, ModernBERT) keep their positions: they never look further.

    Args:
        config: a model's.
        scaling: `rope_type`, `factor`, and what else transformers knows for that type; None leaves all as it is.

    Raises:
        ConfigError: no mapping that makes sense, or the model has no rotary positions.
    """
    if scaling is None:
        return
    check_rope_scaling(scaling)
    text = config.get_text_config()
    if not has_rotary_positions(text):
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)}: a {text.model_type} has no rotary positions to scale; leave it out "
            f"(null), its texts end at {text.max_position_embeddings} positions"
        )
    layers = text.nested_rope_parameter_keys(text.rope_parameters)
    before = text.rope_parameters["full_attention"] if "full_attention" in layers else text.rope_parameters
    if layers and "full_attention" not in layers:
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)}: all layers of this {text.model_type} look through a sliding window, "
            "and none further; leave it out (null)"
        )
    given = dict(scaling)
    known = before.get("original_max_position_embeddings") or text.max_position_embeddings
    original = int(given.pop("original_max_position_embeddings", None) or known)
    kept = {name: before[name] for name in ("rope_theta", "partial_rotary_factor") if name in before}
    after = kept | given
    if ROPE_TYPES[str(scaling["rope_type"])]:
        after["original_max_position_embeddings"] = original
    text.rope_parameters = text.rope_parameters | {"full_attention": after} if layers else after
    text.max_position_embeddings = int(original * float(given["factor"]))
    complaints: list[str] = []
    with _heard(complaints):
        try:
            text.standardize_rope_params()
            text.validate_rope()
        except (KeyError, TypeError, ValueError) as error:
            complaints.append(str(error).strip("\"'"))
    if complaints:
        raise ConfigError(f"model.rope_scaling={dict(scaling)}: transformers says {complaints[0]}")


@contextmanager
def _heard(complaints: list[str]) -> Iterator[None]:
    """What transformers only warns of, in a log that is switched off."""
    logger, handler = logging.getLogger(_LOGGER), logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
