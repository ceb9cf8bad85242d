"""Elements of a recipe's lists: mappings and bare paths -> dataclasses, each checked against its own."""

import re
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
    """Plain values with every `${` in their texts written so that OmegaConf leaves it as it is.

    What was resolved once, or comes from a file that a run wrote, holds no interpolations: a text that looks like one
    shall not be looked up in the environment.
    """
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case dict():
            return {key: escape_interpolations(one) for key, one in value.items()}
        case list():
            return [escape_interpolations(one) for one in value]
        case _:
            return value


def items(given: Any, kind: type[Item], option: str) -> list[Item]:
    """Elements of a list option: a mapping is checked against the dataclass, a bare string is its path.

    What is one path or one mapping is a list of one.

    Raises:
        ConfigError: it is neither, nor a list; or an element is not what the dataclass says.
    """
    if isinstance(given, str | dict):
        given = [given]
    if not isinstance(given, list):
        raise ConfigError(f"{option}={given!r} is neither a path, nor a mapping with `path`, nor a list of these")
    items: list[Item] = []
    for index, value in enumerate(given):
        element = {"path": value} if isinstance(value, str) else value
        if not isinstance(element, dict):
            raise ConfigError(f"{option}[{index}]={value!r} is neither a path nor a mapping with `path`")
        if "path" not in element:
            raise ConfigError(f"{option}[{index}] has no `path`")
        try:
            merged = OmegaConf.merge(OmegaConf.structured(kind), escape_interpolations(element))
            items.append(OmegaConf.to_object(merged))  # type: ignore[arg-type]
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{option}[{index}]: {_of_list(str(error), element) or explain_hydra_error(str(error))}"
            ) from None
    return items


def _of_list(message: str, element: dict[str, Any]) -> str | None:
    """What to write where one value stands for a list."""
    key = re.search(r"full_key: (\w+)", message)
    if "is not a ListConfig" not in message or key is None:
        return None
    return f"{key[1]}={element[key[1]]}: it is a list, write {key[1]}: [{element[key[1]]}]"


def parse_sources(given: Any, option: str, loss: LossConfig) -> list[TrainSource]:
    """Training sources, each with its own loss whole where it has one."""
    sources = items(given, TrainSource, option)
    for index, source in enumerate(sources):
        if source.loss is not None:
            source.loss = _parse_source_loss(source.loss, loss, f"{option}[{index}].loss")
    return sources


def parse_losses(given: list[Any], option: str) -> list[LossConfig]:
    """Parts of a combination: each mapping is checked against the dataclass that its name chooses."""
    losses: list[LossConfig] = []
    for index, element in enumerate(given):
        if not isinstance(element, dict) or "name" not in element:
            raise ConfigError(f"{option}[{index}]={element!r} is no mapping with the `name` of a loss")
        kind = LOSSES[check_loss_name(element["name"], f"{option}[{index}].name")]
        try:
            merged = OmegaConf.merge(OmegaConf.structured(kind), escape_interpolations(element))
            losses.append(OmegaConf.to_object(merged))  # type: ignore[arg-type]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{option}[{index}]: {explain_hydra_error(str(error))}") from None
    return losses


def _parse_source_loss(given: Any, loss: LossConfig, option: str) -> LossConfig:
    """A source's own loss: another one by `name`, from its defaults on, or the recipe's with other options."""
    element = {"name": given} if isinstance(given, str) else given
    if not isinstance(element, dict):
        raise ConfigError(f"{option}={given!r} is neither the name of a loss nor a mapping of its options")
    name = check_loss_name(element.get("name", loss.name), f"{option}.name")
    begin = loss if name == loss.name else LOSSES[name]()
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(begin), escape_interpolations(element)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {explain_hydra_error(str(error))}") from None
    assert isinstance(merged, LossConfig)
    if isinstance(merged, CombinedConfig) and "losses" in element:
        merged.losses = parse_losses(element["losses"], f"{option}.losses")
    return merged
