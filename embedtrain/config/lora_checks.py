"""What of `model.lora` cannot work, found before a model is opened."""

import importlib.util
import math

from embedtrain.config.export_checks import ADAPTER
from embedtrain.config.lora import ALL_LINEAR, LoraConfig
from embedtrain.config.schema import Recipe
from embedtrain.errors import ConfigError


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
    if ADAPTER in recipe.export.formats and "dense" in lora.train:
        raise ConfigError(
            "export.formats has adapter and model.lora.train has dense: an adapter of PEFT's has no place for heads "
            "behind the pooling; leave one of them out (the merged model has them)"
        )
    if lora.four_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.lora.four_bit=true needs the package bitsandbytes, which is not installed: "
            "pip install 'embedtrain[qlora]', or leave it out"
        )


def _refuse_without_adapters(recipe: Recipe) -> None:
    plain = LoraConfig()
    for name in ("alpha", "targets", "dropout", "train", "frozen", "four_bit", "revision"):
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
