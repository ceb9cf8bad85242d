"""Mappings become dataclasses, and errors of Hydra and OmegaConf become one sentence about an option and its value."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from embedtrain.config.columns import DataPath
from embedtrain.config.evaluation import EvaluationConfig, EvaluationSet, VectorFormat, check_vector_format, with_suites
from embedtrain.config.hydra_files import GROUPS, choices
from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES, CombinedConfig, LossConfig
from embedtrain.config.names import counterpart, explain_unknown, misplaced_option, option_names, unknown_loss
from embedtrain.config.optim import ParameterGroup
from embedtrain.config.options import check_values
from embedtrain.config.recipe import Recipe, Strategy, TrainSource
from embedtrain.config.validation import did_you_mean
from embedtrain.errors import ConfigError

Item = TypeVar("Item")

_NO_PACKAGE = "unknown option recipe: a recipe of your own must begin with the line `# @package _global_`"
# Of Hydra's and OmegaConf's parsers: the text at which they stop.
_UNEXPECTED = re.compile(
    r"(?:no viable alternative at input|extraneous input|mismatched input|token recognition error at:|missing \S+ at) "
    r"'(.*?)'(?=\s|$)",
    re.DOTALL,
)
_GROUP_VALUE = re.compile(r"Merge error: (\w+) is not a subclass of (\w+Config)\. value: (.*)")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(([^=']+)=([^']*))'")  # of Hydra
_MAX_MESSAGE = 2000  # characters: errors repeat values, which may be long
# Options that are lists of mappings, by the dataclass of their elements.
_LISTS = {ParameterGroup: "optim.groups", HeadConfig: "model.heads"}
_LOSSES_EXAMPLE = "must be a list, such as loss.losses=[{name: infonce}, {name: orthogonal, weight: 0.1}]"


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
    """The elements of a list option: each a mapping of the dataclass's options, or a string, which is its `path`.

    A single path or mapping is a list of one. Raises a ConfigError for other values.
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
        items.append(merge_options(kind, mapping, f"{option}[{index}]"))
    return items


def parse_sets(value: Any, option: str) -> list[EvaluationSet]:
    """Evaluation sets, as `parse_items`; `nanobeir` is those of NanoBEIR."""
    return with_suites(parse_items(value, EvaluationSet, option))


def parse_sources(value: Any, option: str, loss: LossConfig) -> list[TrainSource]:
    """Training sources, as `parse_items`; a source with a loss of its own gets all options of that loss."""
    sources = parse_items(value, TrainSource, option)
    for index, source in enumerate(sources):
        if source.loss is not None:
            source.loss = _parse_source_loss(source.loss, loss, f"{option}[{index}].loss")
    return sources


def parse_corpus(value: Any, option: str = "corpus") -> list[DataPath]:
    """Files of documents, as `parse_items`; none for no value."""
    corpus = parse_items([] if value is None else value, DataPath, option)
    for index, each in enumerate(corpus):
        check_values(each, f"{option}[{index}].")
        if not each.path:
            raise ConfigError(f"{option}={value!r}: a path is empty")
    return corpus


def parse_losses(elements: list[Any], option: str) -> list[LossConfig]:
    """The parts of a combined loss: mappings of the options of the loss that `name` chooses."""
    losses: list[LossConfig] = []
    for index, element in enumerate(elements):
        if not isinstance(element, dict) or "name" not in element:
            raise ConfigError(f"{option}[{index}]={element!r} is not a mapping with the `name` of a loss")
        kind = LOSSES[check_loss_name(element["name"], f"{option}[{index}].name")]
        losses.append(merge_options(kind, element, f"{option}[{index}]"))
    return losses


def _parse_source_loss(value: Any, loss: LossConfig, option: str) -> LossConfig:
    """The loss of one source: the recipe's with other options, or another one by `name`, with its own defaults."""
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise ConfigError(f"{option}={value!r} is neither the name of a loss nor a mapping of its options")
    name = check_loss_name(options.get("name", loss.name), f"{option}.name")
    merged: LossConfig = merge_options(loss if name == loss.name else LOSSES[name](), options, option)
    if isinstance(merged, CombinedConfig) and "losses" in options:
        merged.losses = parse_losses(options["losses"], f"{option}.losses")
    return merged


def parse_vectors(value: Any, option: str) -> list[VectorFormat]:
    """The elements of a list option: mappings of options of VectorFormat, or precisions of documents.

    Raises a ConfigError for one that cannot be.
    """
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{option}={value!r} is not a list, such as [int8,binary]")
    formats = [parse_vector_format(element, f"{option}[{index}]") for index, element in enumerate(value)]
    labels = [form.label for form in formats]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(f"{option}[{index}] is the same as {option}[{labels.index(label)}] ({label}): remove one")
    return formats


def parse_vector_format(value: Any, option: str) -> VectorFormat:
    """One form of vectors: a mapping of options of VectorFormat, or the precision of documents.

    Raises a ConfigError for one that cannot be.
    """
    options = {"documents": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise ConfigError(f"{option}={value!r} is neither int8, uint8, binary nor a mapping with `documents`")
    return check_vector_format(merge_options(VectorFormat, options, option), f"{option}.")


def parse_evaluation(evaluation: EvaluationConfig) -> None:
    """Turn the elements of its lists into dataclasses."""
    evaluation.sets = parse_sets(evaluation.sets, "evaluation.sets")
    evaluation.vectors = parse_vectors(evaluation.vectors, "evaluation.vectors")


def merge_options(base: Any, options: Mapping[str, Any], option: str) -> Any:
    """An instance of the dataclass `base`, or a copy of its instance `base`, with `options` set and types checked."""
    try:
        values = escape_interpolations(options)
        if isinstance(base, type):
            merged = OmegaConf.merge(_structured(base), values)  # which copies it
        else:
            merged = OmegaConf.unsafe_merge(OmegaConf.structured(base), values)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {explain_hydra_error(error, options)}") from None


@functools.cache
def _structured(kind: type) -> DictConfig:
    """The options of a dataclass: to read its types takes three times as long as a copy."""
    return OmegaConf.structured(kind)  # type: ignore[no-any-return]


def explain_composition(error: Exception, values: Mapping[str, str], kind: type) -> str:
    """The message for an error of `hydra.compose`, which sets options of the command line, `values`, in a `kind`."""
    # Hydra names only the first part of an option that does not exist, and OmegaConf no option at all for one within
    # a list.
    for option, value in values.items():
        is_choice = kind is Recipe and option in GROUPS
        is_assignment = value and re.fullmatch(r"[\w.-]+", option)
        if not is_choice and is_assignment and (mistake := misplaced_option(option, kind, value)):
            return mistake
    message = explain_hydra_error(error, values)
    match = re.match(r"unknown option (loss(?:\.\w+)+)", message)
    if match and not any(option in (match[1], match[1].rpartition(".")[0]) for option in values):
        if ": write " in message or match[1].count(".") > 1:
            return f"the recipe has an {message}"
        return (
            f"the recipe sets {match[1]}, which the chosen loss does not have (a recipe chooses its loss with "
            f"`defaults: [override /loss: NAME]`): {message}; remove it from the recipe"
        )
    return message


def explain_hydra_error(error: Exception, values: Mapping[str, Any] | None = None) -> str:
    """The message for an error of Hydra or OmegaConf; `values` are those that the user wrote, by full option name."""
    message = _explain_hydra_error(error, values or {})
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."


def _explain_hydra_error(error: Exception, values: Mapping[str, Any]) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.partition("/")
        if group == "loss":
            return unknown_loss("loss", name)
        if group == "recipe" and name.startswith("pipelines/"):
            return f"recipe={name}: is a pipeline, which train runs and plan estimates; name one training"
        own = "; your own are DIR/recipe/NAME.yaml, with --config-dir DIR" if group == "recipe" else ""
        if group == "model" and "/" in name:
            return f"model={name}: for a directory or a Hub id write model.path={name}"
        if group == "parallel" and name in list(Strategy):
            return f"parallel={name}: write parallel.strategy={name}"
        hint = did_you_mean(name, error.options or (), cutoff=0.4)
        if group == "model":
            own = f"; for a directory or a Hub id write model.path={name}"
        available = ", ".join(error.options or choices(group))
        return f"{group}={name}: there is no such {group}{hint} Available are {available}{own}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}:{error.problem_mark.line + 1}"
        return f"{place}: is no YAML: {error.problem}; a text with one of : # {{ }} [ ] & * ! is written in quotes"
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, error.message)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__  # Hydra chains some explicitly and some not
    if match := _AMBIGUOUS.match(str(error)):
        written, option, value = match.groups()
        return f"{written}: a list is written in brackets, {option}=[{value}]; -m starts a run for each value"
    if str(error).startswith("Config group override must be"):  # `model=3`
        group = next((group for group in GROUPS if group in values), GROUPS[0])
        return f"{group}={values.get(group)}: must be a name; {', '.join(choices(group))} are available"
    if cause is None:  # `@recipe.` is the package of the options of a recipe without the line
        return _NO_PACKAGE if "@recipe." in str(error) else " ".join(str(error).split())
    option = cause.full_key or ""
    parent_type = cause.object_type
    if parent_type in _LISTS and not option.startswith(
        _LISTS[parent_type]
    ):  # OmegaConf names only the element's option
        option = f"{_LISTS[parent_type]}[{_failing_index(parent_type, values)}].{option}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if parent_type is Recipe and option == "recipe":
            return _NO_PACKAGE
        if dataclasses.is_dataclass(parent_type):
            return explain_unknown(option, parent_type, values.get(option))
        parent, _, key = option.rpartition(".")
        return f"{parent} is a mapping: write {parent}={{{key}: ...}}"
    message = " ".join(str(cause).partition("full_key:")[0].split())
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message)
    value = values.get(option)
    if reference := _unresolved(message, option, value):
        return reference
    if re.search(r"Merge error: \w+Config is not a subclass of \w+Config", message):
        return f"loss takes one loss; for several write loss=combined and loss.losses, which {_LOSSES_EXAMPLE}"
    if match := _GROUP_VALUE.match(message):
        return _value_of_group(*match.groups())
    if form := _form_of_list(option, message, values):
        return form
    if option == "loss.losses":
        return f"loss.losses {_LOSSES_EXAMPLE}"
    written = option if value is None else f"{option}={value}"
    if "is not a ListConfig" in message:
        return f"{written}: must be a list, such as {option}=[{'...' if value is None else value}]"
    if "expected one of" in message and value is not None and (ours := counterpart(option, str(value))):
        message += f": write {ours}"
    return f"{written}: {message}" if option else message


def _unreadable(override: str, message: str) -> str:
    """The message for an override in which Hydra's parser finds no option and value."""
    match = _UNEXPECTED.search(message)
    where = "" if match is None or not match[1] or match[1] == "<EOF>" else f" from {match[1]} on"
    return (
        f"{override}: cannot be read as option=value{where}; write option=value, with quotes around a value that has "
        "blanks, commas, quotes, brackets or other signs, such as 'option=\"a, b\"'"
    )


def _unresolved(message: str, option: str, value: Any) -> str | None:
    """The message for a value that refers to another one by `${...}`, if that cannot be resolved."""
    # Hydra calls the choice of a file in a defaults list so.
    written = "" if option in ("", "_dummy_") else f"{option if value is None else f'{option}={value}'}: "
    if match := re.match(r"Interpolation key '(.*)' not found", message):
        names = option_names()
        of_groups = [name for name in names if name.rpartition(".")[2] == match[1].rpartition(".")[2]]
        hint = did_you_mean(match[1], of_groups or names, cutoff=0.0 if of_groups else 0.6)
        return f"{written}${{{match[1]}}} refers to an option that does not exist{hint} Write the full name of one"
    if message == "Recursive interpolation detected":
        return f"{written}refers to itself"
    if match := re.match(r"Unsupported interpolation type (\w+)", message):
        return f"{written}${{{match[1]}:...}}: there is no such function; write ${{option}} or ${{oc.env:NAME}}"
    if "${" in message and (match := _UNEXPECTED.search(message)):
        return f"{written}{match[1]} is no reference to an option; write ${{option}}, or \\${{ for these characters"
    return None


def _value_of_group(value_type: str, group_type: str, value: str) -> str:
    """The message for a group of options, such as `model`, that has a single value."""
    groups = {type(getattr(Recipe(), field.name)).__name__: field.name for field in dataclasses.fields(Recipe)}
    group = groups.get(group_type, group_type.removesuffix("Config").lower())
    if group == "loss" and value not in LOSSES:
        return unknown_loss("loss", value)
    example = f"{{name: {value}}}" if group == "loss" else "{option: value}"
    return f"{group}={value}: is a group of options, not {value_type}; in a file write them as {group}: {example}"


def _form_of_list(option: str, message: str, values: Mapping[str, Any]) -> str | None:
    """The message for a list of mappings that has another form."""
    for kind, name in _LISTS.items():
        is_element = re.fullmatch(rf"{name}(\[\d+\])?", option) is not None
        if is_element or (option.startswith(f"{name}[") and "missing mandatory" in message):
            required, *others = (field.name for field in dataclasses.fields(kind))
            written = f"{name}={values[name]}" if name in values else name
            return (
                f"{written}: must be a list of mappings, such as {name}=[{{{required}: ...}}], with {required} and any "
                f"of {', '.join(others)}"
            )
    return None


def _failing_index(kind: type, values: Mapping[str, Any]) -> str:
    """The number of the first element of a list of the command line that is no `kind`; empty for a list of a file."""
    try:
        elements: Any = OverridesParser.create().parse_override(f"list={values[_LISTS[kind]]}").value()
    except (KeyError, HydraException):
        return ""
    for index, element in enumerate(elements):
        try:
            OmegaConf.to_object(OmegaConf.merge(_structured(kind), escape_interpolations(element)))
        except OmegaConfBaseException:
            return str(index)
    return ""
