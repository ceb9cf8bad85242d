"""Recipes that earlier versions saved, in recipe.yaml and in checkpoints, with the options of this version.

Options that no version renamed stay as they are; whoever reads them checks them.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from embedtrain.config.checks import WANDB_ARGUMENTS
from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import LOSSES, LossConfig, MatryoshkaConfig
from embedtrain.config.optim import ParameterGroup
from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import ConfigError
from embedtrain.utils.records import is_number

# Options of each loss, and their names in the section `matryoshka`.
_OF_MATRYOSHKA = {
    "matryoshka_dims": "dims",
    "matryoshka_weights": "dim_weights",
    "matryoshka_weighting": "dim_weighting",
    "matryoshka_per_step": "dims_per_step",
    "matryoshka_layers": "layers",
} | {name: name for name in vars(MatryoshkaConfig()) if name.startswith(("precision", "layer_", "layers_"))}
_MODEL = "model."  # before the names of options of the model in an identity
_WANDB_DEFAULTS = {"project": "embedtrain"}
# Options of the learning rate of some parameters: which ones, by name of the group.
_GROUPS = {"loss": r"^loss\.", "head": r"^(?!backbone|loss\.|query_weights)"}


def current_recipe(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved recipe with the options of this version."""
    recipe = dict(saved)
    changes: dict[str, Callable[[Any], Any]] = {
        "model": _current_model,
        "loss": current_loss,
        "optim": _current_optim,
        "tracking": _current_tracking,
        "data": lambda data: _current_data(data, recipe.get("loss")),
    }
    for group, change in changes.items():
        if isinstance(recipe.get(group), Mapping):
            recipe[group] = change(recipe[group])
    return recipe


def current_identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run (`training.resume.run_identity`), with the options of this version."""
    options = {name.removeprefix(_MODEL): value for name, value in saved.items() if name.startswith(_MODEL)}
    identity = {name: value for name, value in saved.items() if not name.startswith(_MODEL)}
    identity |= {f"{_MODEL}{name}": value for name, value in _current_model(options).items()}
    if "loss" in identity:
        identity["loss"] = current_loss(identity["loss"])
    sources = identity.get("data.train")
    if isinstance(sources, Mapping):
        identity["data.train"] = {
            name: {**source, "loss": current_loss(source.get("loss"))} if isinstance(source, Mapping) else source
            for name, source in sources.items()
        }
    return identity


def current_static(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `static` in the record of a pipeline's stage."""
    current = dict(saved)
    if "dims" in current:
        current["pca_dims"] = current.pop("dims")
    if current.get("dtype") == "fp32":  # the default had this name; a table is computed in fp32
        current["dtype"] = "source"
    return current


def _current_model(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """`model` of a recipe, without the options of other kinds; unchanged if its kind is not known."""
    with contextlib.suppress(ConfigError):
        return load_kind(str(model.get("kind", ModelConfig.kind))).stored_options(model)
    return model


def current_loss(loss: Any) -> Any:
    """`loss` of a recipe or a source, with the section `matryoshka`; the same for each part of a combined loss."""
    if not isinstance(loss, Mapping):
        return loss
    current: dict[str, Any] = {}
    for name, value in loss.items():
        if name in _OF_MATRYOSHKA:
            current.setdefault("matryoshka", {})[_OF_MATRYOSHKA[name]] = value
        else:
            is_combined = name == "losses" and isinstance(value, list)
            current[name] = [current_loss(part) for part in value] if is_combined else value
    return current


def _current_optim(optim: Mapping[str, Any]) -> dict[str, Any]:
    current = dict(optim)
    rate, floor = current.get("lr"), current.pop("min_lr", None)
    if is_number(floor) and is_number(rate) and rate > 0:
        current["min_lr_ratio"] = float(f"{floor / rate:.12g}")  # 2e-6 of 2e-5 is 0.1
    elif "min_lr_ratio" in current and current["min_lr_ratio"] is None:
        current["min_lr_ratio"] = 0.0
    for name, match in _GROUPS.items():
        rate = current.pop(f"{name}_lr", None)
        if is_number(rate):
            group = vars(ParameterGroup(match=match, name=name, lr=rate))
            current["groups"] = [*(current.get("groups") or ()), group]
    return current


def _current_tracking(tracking: Mapping[str, Any]) -> dict[str, Any]:
    """With `wandb_project`, `wandb_group` and others in one mapping, `wandb_init`."""
    before = {name: tracking[f"wandb_{name}"] for name in WANDB_ARGUMENTS if f"wandb_{name}" in tracking}
    if not before:
        return dict(tracking)
    given = {name: value for name, value in before.items() if value and value != _WANDB_DEFAULTS.get(name)}
    current = {name: value for name, value in tracking.items() if name.removeprefix("wandb_") not in before}
    return {**current, "wandb_init": given or None}


def _current_data(data: Mapping[str, Any], loss: Any) -> dict[str, Any]:
    sources = data.get("train")
    if not isinstance(sources, list):
        return dict(data)
    return {**data, "train": [_current_source(source, loss) for source in sources]}


def _current_source(source: Any, loss: Any) -> Any:
    """An element of `data.train`, whose temperature is one of its loss: by default that of the recipe, `loss`.

    Of a combined loss, all parts with a temperature have it.
    """
    if not isinstance(source, Mapping):
        return source
    current = {**source, "loss": current_loss(source.get("loss"))}
    temperature = current.pop("temperature", None)
    own = loss if current["loss"] is None else current["loss"]
    if temperature is not None and isinstance(own, Mapping):
        parts = own.get("losses")
        if isinstance(parts, list):
            given = [{**part, "temperature": temperature} if _has_temperature(part) else part for part in parts]
            current["loss"] = {**own, "losses": given}
        else:
            current["loss"] = {**own, "temperature": temperature}
    return current


def _has_temperature(part: Any) -> bool:
    loss = LOSSES.get(str(part.get("name", LossConfig.name))) if isinstance(part, Mapping) else None
    return loss is not None and hasattr(loss, "temperature")
