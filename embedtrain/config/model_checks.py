"""Checks of model options that cannot work, without opening the model."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import (
    ADAPTER,
    ALL_LINEAR,
    LoraConfig,
    ModelConfig,
)
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import install_command

# The types of rotary scaling, and whether transformers keeps the number of positions of the original model for each.
ROPE_TYPES = {"yarn": True, "linear": False, "llama3": True}
ROPE_TYPES_BY_BATCH = ("dynamic", "longrope")  # their frequencies follow the longest text of a forward pass
_ROPE_EXAMPLE = "such as model.rope_scaling={rope_type: yarn, factor: 4}"


def check_model(model: ModelConfig) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check = OptionChecks(model, "model.")
    if model.path is None and model.config is None and load_kind(model.kind).has_one_model:
        raise ConfigError("no model: set model.path to a Hub id or a directory, or model.config for random weights")
    if model.path is not None and model.config is not None:
        raise ConfigError("model.path and model.config are both set: the second has no weights; keep one")
    check.require(
        model.revision is None or model.path is not None,
        "revision",
        "chooses a version of a Hub repository; set model.path to its id",
    )
    check.require(
        model.tokenizer_revision is None or model.tokenizer is not None,
        "tokenizer_revision",
        "has no effect without model.tokenizer: the model's own tokenizer has the model's revision",
    )
    load_kind(model.kind).check_options(model)
    check.length("max_length")
    check.positive("rope_theta", "null keeps that of the configuration")
    if model.rope_scaling is not None:
        check_rope_scaling(model.rope_scaling)


def check_rope_scaling(scaling: Any) -> None:
    """Raise a ConfigError for a `model.rope_scaling` that no model can have."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(
            f"model.rope_scaling={scaling!r}: must be a mapping with rope_type and factor, {_ROPE_EXAMPLE}"
        )
    rope_type = scaling.get("rope_type")
    if rope_type in ROPE_TYPES_BY_BATCH:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: scales positions by the longest text of a batch, so the "
            f"embedding of a text would depend on the other texts; write one of {', '.join(ROPE_TYPES)}"
        )
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: must be one of {', '.join(ROPE_TYPES)}, {_ROPE_EXAMPLE}"
        )
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 1):
        raise ConfigError(f"model.rope_scaling.factor={factor}: must be above 1, the factor of the context length")
    original = scaling.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        raise ConfigError(
            f"model.rope_scaling.original_max_position_embeddings={original}: must be a number; default: the model's"
        )


def check_lora(lora: LoraConfig, export_formats: Sequence[str]) -> None:
    """Raise a ConfigError for options of adapters that cannot work, also together with `export.formats`."""
    defaults = LoraConfig()
    check = OptionChecks(lora, "model.lora.")
    if not lora.on:
        for name in ("alpha", "targets", "dropout", "modules_to_save", "base_dtype", "load_in_4bit", "revision"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                "has no effect without adapters; set model.lora.rank, or model.lora.path to start from an adapter",
            )
        if ADAPTER in export_formats:
            raise ConfigError(
                f"export.formats={written(list(export_formats))}: there is no adapter to export; set model.lora.rank, "
                "or leave adapter out"
            )
        return
    check.at_least(1, "rank", "null trains the whole model")
    check.positive("alpha", "null is twice the rank")
    check.require(0 <= lora.dropout < 1, "dropout", "must be from 0 to below 1")
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    check.require(
        isinstance(targets, list) and bool(targets) and all(isinstance(name, str) and name for name in targets),
        "targets",
        f"must be {ALL_LINEAR}, or names of layers such as [q_proj,v_proj]",
    )
    check.require(
        ALL_LINEAR not in targets or len(targets) == 1, "targets", f"{ALL_LINEAR} includes the others; leave them out"
    )
    if lora.path is not None:
        for name in ("rank", "alpha", "targets", "dropout"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                f"the adapter of model.lora.path={lora.path} has its own; leave one out",
            )
    check.require(
        lora.revision is None or lora.path is not None,
        "revision",
        "chooses a version of a Hub adapter; set model.lora.path to its id",
    )
    if ADAPTER in export_formats and "dense" in lora.modules_to_save:
        raise ConfigError(
            "export.formats has adapter and model.lora.modules_to_save has dense: PEFT's adapter format cannot "
            "hold the heads behind the pooling; leave one of them out (the merged model has them)"
        )
    check.require(
        not lora.load_in_4bit or importlib.util.find_spec("bitsandbytes") is not None,
        "load_in_4bit",
        f"needs the package bitsandbytes, which is not installed: {install_command('qlora')}, or leave it out",
    )
