"""Positions: how many tokens of a text a model has them for, another base of rotary ones, and their scaling.

The number is measured on a small model of the same class. Some models count positions from the padding id on, so that
their last positions cannot be reached: RoBERTa and what was made from it. Their configuration does not say so, and a
longer text ends in an index out of bounds.
"""

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig

from embedtrain.config.checks import ROPE_TYPES, ROPE_TYPES_BY_BATCH, check_rope_scaling
from embedtrain.errors import ConfigError

_LOGGER = "transformers.modeling_rope_utils"
_FULL = "full_attention"  # the type of layers without a sliding window
_FREQUENCIES = "inv_freq"  # the end of the names of buffers in transformers' rotary embeddings


def has_rotary_positions(config: PretrainedConfig) -> bool:
    """Whether the model has rotary position embeddings instead of a table of positions."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def batch_independent_length(config: PretrainedConfig) -> int | None:
    """The tokens up to which frequencies do not follow the longest text of a batch; None: they never do.

    A longer text changes the positions, and so the embeddings, of all texts beside it (`dynamic` and `longrope`).
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    entries = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    lengths = [
        int(entry.get("original_max_position_embeddings") or text.max_position_embeddings)
        for entry in entries
        if entry.get("rope_type") in ROPE_TYPES_BY_BATCH
    ]
    return min(lengths, default=None)


def set_rope_theta(config: PretrainedConfig, theta: float | None, option: str) -> None:
    """Set the base of the rotary frequencies in place; None changes nothing.

    Layers with a sliding window (Gemma 3, ModernBERT) keep theirs, as for `scale_rope`. A ConfigError, which names
    `option`, if the model has no rotary positions, or only in such layers.
    """
    if theta is None:
        return
    text = config.get_text_config()
    if not has_rotary_positions(text):
        raise ConfigError(f"{option}={theta:g}: {text.model_type} has no rotary positions; leave it out (null)")
    parameters = with_rope_theta(text.rope_parameters, theta)
    if parameters is None:
        raise ConfigError(
            f"{option}={theta:g}: all layers of this {text.model_type} have a sliding window; leave it out (null)"
        )
    text.rope_parameters = parameters


def with_rope_theta(parameters: Mapping[str, Any], theta: float) -> dict[str, Any] | None:
    """The `rope_parameters` of a configuration with another base; None if all layers have a sliding window."""
    layers = [name for name, value in parameters.items() if isinstance(value, Mapping)]  # one for each type of layer
    if not layers:
        return {**parameters, "rope_theta": float(theta)}
    if _FULL not in layers:
        return None
    return {**parameters, _FULL: {**parameters[_FULL], "rope_theta": float(theta)}}


class RopeTheta:
    """The rotary frequencies of an encoder for another base than that of its training.

    Raises ConfigError, which names `option`, if the encoder's rotary positions cannot be changed.
    """

    def __init__(self, encoder: nn.Module, theta: float, option: str) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = []  # of the encoder, and its values for the other base
        for module in encoder.modules():
            names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_FREQUENCIES)]
            if names:
                config = copy.deepcopy(module.config)
                set_rope_theta(config, theta, option)
                other = type(module)(config=config)
                self._buffers += [(module.get_buffer(name), other.get_buffer(name)) for name in names]
        if not self._buffers:
            raise ConfigError(f"{option}={theta:g}: this model has rotary positions of its own: set model.rope_theta")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Its frequencies in place of the trained ones during the block."""
        trained = [buffer.clone() for buffer, _ in self._buffers]
        try:
            for buffer, other in self._buffers:
                buffer.copy_(other)
            yield
        finally:
            for (buffer, _), values in zip(self._buffers, trained, strict=True):
                buffer.copy_(values)


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
    before = text.rope_parameters[_FULL] if _FULL in layers else text.rope_parameters
    if layers and _FULL not in layers:
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
    text.rope_parameters = text.rope_parameters | {_FULL: after} if layers else after
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


_POSITIONS = 24  # of the small model
_PADDING = 3  # its padding id; models with a constant number of unused positions have less than 3
_SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": _POSITIONS}
_NARROW = {"hidden_size": 16, "embedding_size": 16, "intermediate_size": 16, "head_dim": 8}
_MAX_WIDTH = 2048  # of a class that cannot have 16 dimensions, and is built with those of the model
_TOKEN = 5  # any but special ones


def num_positions(config: PretrainedConfig) -> int:
    """The most tokens of a text; 0 if the configuration sets no limit."""
    text = config.get_text_config()
    limit = max(0, int(getattr(text, "max_position_embeddings", 0) or 0))  # XLNet says -1
    if not limit or has_rotary_positions(text):
        return limit
    unused = _unused_positions(text.model_type, text.to_json_string())
    return limit - (int(text.pad_token_id or 0) + 1 if unused > _PADDING else unused)


@functools.lru_cache(maxsize=8)
def _unused_positions(model_type: str, content: str) -> int:
    """The positions that no text reaches in a model of this type with the padding id 3; 0 if none can be built."""
    if model_type not in CONFIG_MAPPING:  # code of the model's own
        return 0
    kind, values = CONFIG_MAPPING[model_type], json.loads(content)
    for sizes in (_SMALL | _NARROW, _SMALL):
        config = kind.from_dict(values)
        if sizes is _SMALL and int(getattr(config, "hidden_size", 0) or 0) > _MAX_WIDTH:
            break
        for name, value in values.items():
            if name.endswith("_token_id") and isinstance(value, int):
                setattr(config, name, 2)
        for name, size in sizes.items():
            if hasattr(config, name):
                setattr(config, name, size)
        config.pad_token_id = _PADDING
        # A class that cannot be built or run like this, with whatever error, is left to the second try.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            model = AutoModel.from_config(config, attn_implementation="eager").eval()
            model(input_ids=torch.full((1, 1), _TOKEN))
            return next(count for count in range(_POSITIONS) if _reaches(model, _POSITIONS - count))
    return 0


def _reaches(model: torch.nn.Module, length: int) -> bool:
    try:
        model(input_ids=torch.full((1, length), _TOKEN))
    except (IndexError, RuntimeError):  # of a table of positions, and of a buffer of as many token types
        return False
    return True
