"""Parses the list options of a recipe: mappings and bare paths become dataclasses."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES, CombinedConfig, LossConfig
from embedtrain.config.messages import explain_hydra_error
from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError

Item = TypeVar("Item")


def escape_interpolations(value: Any) -> Any:
    """Plain values in which OmegaConf resolves no `${`.

    Values that are resolved already, or that come from a file that a run wrote, hold no interpolations: a text that
    looks like one must not read the environment.
    """
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case dict():
            return {key: escape_interpolations(item) for key, item in value.items()}
        case list():
            return [escape_interpolations(item) for item in value]
        case _:
            return value


def parse_items(value: Any, kind: type[Item], option: str) -> list[Item]:
    """The elements of a list option: a mapping of the dataclass's options, or a string, which is its `path`.

    A single path or mapping is a list of one.

    Raises:
        ConfigError: `value` is none of these, or an element does not fit the dataclass.
    """
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{option}={value!r} is neither a path, nor a mapping with `path`, nor a list of these")
    items: list[Item] = []
    for index, element in enumerate(value):
        mapping = {"path": element} if isinstance(element, str) else element
        if not isinstance(mapping, dict):
            raise ConfigError(f"{option}[{index}]={element!r} is neither a path nor a mapping with `path`")
        if "path" not in mapping:
            raise ConfigError(f"{option}[{index}] has no `path`")
        items.append(_merge(kind, mapping, f"{option}[{index}]"))
    return items


def parse_sources(value: Any, option: str, loss: LossConfig) -> list[TrainSource]:
    """Training sources; a source with a loss of its own gets all options of that loss.

    Args:
        value: as `parse_items`.
        option: the name of the list.
        loss: the recipe's.
    """
    sources = parse_items(value, TrainSource, option)
    for index, source in enumerate(sources):
        if source.loss is not None:
            source.loss = _parse_source_loss(source.loss, loss, f"{option}[{index}].loss")
    return sources


def parse_losses(elements: list[Any], option: str) -> list[LossConfig]:
    """The parts of a combined loss: mappings of the options of the loss that `name` chooses."""
    losses: list[LossConfig] = []
    for index, element in enumerate(elements):
        if not isinstance(element, dict) or "name" not in element:
            raise ConfigError(f"{option}[{index}]={element!r} is not a mapping with the `name` of a loss")
        kind = LOSSES[check_loss_name(element["name"], f"{option}[{index}].name")]
        losses.append(_merge(kind, element, f"{option}[{index}]"))
    return losses


def _parse_source_loss(value: Any, loss: LossConfig, option: str) -> LossConfig:
    """The loss of one source: the recipe's with other options, or another one by `name`, with its own defaults."""
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise ConfigError(f"{option}={value!r} is neither the name of a loss nor a mapping of its options")
    name = check_loss_name(options.get("name", loss.name), f"{option}.name")
    merged: LossConfig = _merge(loss if name == loss.name else LOSSES[name](), options, option)
    if isinstance(merged, CombinedConfig) and "losses" in options:
        merged.losses = parse_losses(options["losses"], f"{option}.losses")
    return merged


def _merge(base: Any, options: Mapping[str, Any], option: str) -> Any:
    """An instance of the dataclass `base`, or a copy of its instance `base`, with `options` set and types checked."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(base), escape_interpolations(options))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {explain_hydra_error(error, options)}") from None
