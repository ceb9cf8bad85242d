"""Scales rotary position embeddings beyond the trained length: `model.rope_scaling` in the configuration."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig

from embedtrain.config.model_checks import ROPE_TYPES, check_rope_scaling
from embedtrain.errors import ConfigError

_LOGGER = "transformers.modeling_rope_utils"


def has_rotary_positions(config: PretrainedConfig) -> bool:
    """Whether the model has rotary position embeddings instead of a table of positions."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def scale_rope(config: PretrainedConfig, scaling: Mapping[str, Any] | None) -> None:
    """Set the scaling in place, and `max_position_embeddings` to the number of positions it allows.

    Layers with a sliding window (Gemma 3, ModernBERT) are not scaled, since they never attend further. `scaling` has
    `rope_type`, `factor` and what transformers defines for that type; None changes nothing. A ConfigError if it is
    invalid, or the model has no rotary positions.
    """
    if scaling is None:
        return
    check_rope_scaling(scaling)
    text = config.get_text_config()
    if not has_rotary_positions(text):
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)}: {text.model_type} has no rotary positions; leave it out (null), its "
            f"texts are limited to {text.max_position_embeddings} positions"
        )
    layers = [
        name for name, value in text.rope_parameters.items() if isinstance(value, dict)
    ]  # one dict per layer type
    before = text.rope_parameters["full_attention"] if "full_attention" in layers else text.rope_parameters
    if layers and "full_attention" not in layers:
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)}: all layers of this {text.model_type} have a sliding window; leave it "
            "out (null)"
        )
    options = dict(scaling)
    trained = before.get("original_max_position_embeddings") or text.max_position_embeddings
    original = int(options.pop("original_max_position_embeddings", None) or trained)
    unchanged = {name: before[name] for name in ("rope_theta", "partial_rotary_factor") if name in before}
    after = unchanged | options
    if ROPE_TYPES[str(scaling["rope_type"])]:
        after["original_max_position_embeddings"] = original
    text.rope_parameters = text.rope_parameters | {"full_attention": after} if layers else after
    text.max_position_embeddings = int(original * float(options["factor"]))
    warnings: list[str] = []
    with _captured_warnings(warnings):
        try:
            text.standardize_rope_params()
            text.validate_rope()
        except (KeyError, TypeError, ValueError) as error:
            warnings.append(str(error).strip("\"'"))
    if warnings:
        raise ConfigError(f"model.rope_scaling={dict(scaling)}: transformers reports: {warnings[0]}")


@contextmanager
def _captured_warnings(warnings: list[str]) -> Iterator[None]:
    """Collect transformers' warnings, whose log is switched off."""
    logger, handler = logging.getLogger(_LOGGER), logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
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
