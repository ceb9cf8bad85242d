"""Options of a model that cannot work, as far as that can be told before it is opened."""

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from embedtrain.config.export_checks import ADAPTER
from embedtrain.config.recipe import ALL_LINEAR, LoraConfig, ModelConfig, Pooling, Recipe
from embedtrain.errors import ConfigError

# Each type, and whether transformers keeps beside it how many positions the model was trained with.
ROPE_TYPES = {"yarn": True, "linear": False, "llama3": True}
# Their frequencies follow the longest text of a forward pass.
_BY_BATCH = ("dynamic", "longrope")
_EXAMPLE = "model.rope_scaling={rope_type: yarn, factor: 4}"


def rope_scaling_error(scaling: Any) -> str | None:
    """The sentence to say of a `model.rope_scaling` that cannot work; None where none of it is wrong."""
    if not isinstance(scaling, Mapping):
        return f"model.rope_scaling={scaling!r}: a mapping with rope_type and factor, such as {_EXAMPLE}"
    kind = scaling.get("rope_type")
    if kind in _BY_BATCH:
        return (
            f"model.rope_scaling: rope_type={kind} turns positions by the longest text of a batch, so that a text's "
            f"vector would depend on the texts beside it: write one of {', '.join(ROPE_TYPES)}"
        )
    if kind not in ROPE_TYPES:
        return f"model.rope_scaling: rope_type={kind} is not one of {', '.join(ROPE_TYPES)}, as in {_EXAMPLE}"
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 1):
        return f"model.rope_scaling: factor={factor} is how many times further positions reach: a number above 1"
    original = scaling.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        return (
            f"model.rope_scaling: original_max_position_embeddings={original} is a number of positions; left out, the "
            "model's own is taken"
        )
    return None


def check_model(model: ModelConfig) -> None:
    """Refuse what no model can have.

    Raises:
        ConfigError: the first such option.
    """
    if model.include_prompt is False and model.pooling not in (None, Pooling.mean):
        raise ConfigError(include_prompt_error(model.pooling))
    if model.rope_scaling is not None and (problem := rope_scaling_error(model.rope_scaling)) is not None:
        raise ConfigError(problem)


def include_prompt_error(pooling: Pooling) -> str:
    """The sentence to say where a vector is one token's."""
    return (
        f"model.include_prompt=false is for model.pooling=mean: with {pooling.value} a vector is one token's, and no "
        "prompt is in it to be left out; leave it out (null)"
    )


def check_lora(recipe: Recipe) -> None:
    """Refuse options of adapters that cannot work.

    Raises:
        ConfigError: the first of them, its value, and what is allowed.
    """
    lora = recipe.model.lora
    if not lora.on:
        _refuse_without_adapters(recipe)
        return
    if lora.rank is not None and lora.rank < 1:
        raise ConfigError(f"model.lora.rank={lora.rank}: at least 1; null trains the whole model")
    if lora.alpha is not None and not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise ConfigError(f"model.lora.alpha={lora.alpha}: must be above 0; null is twice the rank")
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"model.lora.dropout={lora.dropout}: from 0 to below 1")
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) and one for one in targets):
        raise ConfigError(
            f"model.lora.targets={lora.targets}: write {ALL_LINEAR}, or names of layers such as [q_proj, v_proj]"
        )
    if ALL_LINEAR in targets and len(targets) > 1:
        raise ConfigError(f"model.lora.targets={targets}: {ALL_LINEAR} is all of them; leave the others out")
    if lora.path is not None:
        _refuse_beside_path(lora)
    elif lora.revision is not None:
        raise ConfigError(
            f"model.lora.revision={lora.revision} chooses a version of a Hub adapter: write model.lora.path=ID"
        )
    if ADAPTER in recipe.export.formats and "dense" in lora.modules_to_save:
        raise ConfigError(
            "export.formats has adapter and model.lora.modules_to_save has dense: an adapter has no place for "
            "heads "
            "behind the pooling; leave one of them out (the merged model has them)"
        )
    if lora.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.lora.load_in_4bit=true needs the package bitsandbytes, which is not installed: "
            "pip install 'embedtrain[qlora]', or leave it out"
        )


def _refuse_without_adapters(recipe: Recipe) -> None:
    plain = LoraConfig()
    for name in ("alpha", "targets", "dropout", "modules_to_save", "base_dtype", "load_in_4bit", "revision"):
        value = getattr(recipe.model.lora, name)
        if value != getattr(plain, name):
            raise ConfigError(
                f"model.lora.{name}={getattr(value, 'value', value)} has no use without adapters: set model.lora.rank, "
                "or model.lora.path to go on from an adapter"
            )
    if ADAPTER in recipe.export.formats:
        raise ConfigError(
            f"export.formats={recipe.export.formats}: there is no adapter to export; set model.lora.rank, or leave "
            "it out"
        )


def _refuse_beside_path(lora: LoraConfig) -> None:
    """What the adapter that one goes on from decides itself."""
    plain = LoraConfig()
    for name in ("rank", "alpha", "targets", "dropout"):
        value = getattr(lora, name)
        if value != getattr(plain, name):
            raise ConfigError(
                f"model.lora.{name}={value} and model.lora.path={lora.path}: the adapter brings its own; leave one out"
            )
