"""Messages for names of options and losses that do not exist: what the user probably means.

In this order: the counterpart of another library's name (`config/migration.py`), options of that name elsewhere, and
the name that is spelled most alike.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from embedtrain.config import migration
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.kinds import kinds
from embedtrain.config.losses import LOSSES, CombinedConfig, LossConfig
from embedtrain.config.migration import Answer, Flag, Row
from embedtrain.config.recipe import ModelConfig, Recipe, TrainSource
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.config.validation import did_you_mean, unknown_option
from embedtrain.errors import ConfigError

_RECIPE_ROWS = (
    *migration.TRAINER,
    *migration.SENTENCE_TRANSFORMERS,
    *migration.FLAGEMBEDDING,
    *migration.TEVATRON,
    *migration.OPEN_CLIP,
    *migration.LOSS_ARGUMENTS,
    *migration.LAUNCHERS,
)
_CODE = re.compile(r"`([^`=]+)[^`]*`")
_KIND = re.compile(r"kind: (\w+)")
_EVALUATOR = re.compile(r"\[?\w+Evaluator\w*\]?")
# Options of a recipe under the names that commands have for them.
_OF_COMMANDS = {"model.path": "model", "data.train": "data", "evaluation.sets": "sets", "model.lora.path": "adapter"}


def explain_unknown(option: str, kind: type, value: Any = None) -> str:
    """The message for an option, by its full name, that the dataclass `kind` does not have; `value` is the user's."""
    name = option.rpartition(".")[2]
    owners = [other.name for other in kinds() if name in other.own_options] if issubclass(kind, ModelConfig) else []
    if owners:
        return explain_other_kind(option, value, owners, kind().kind)
    suggestion = suggest(option, kind, None if value is None else str(value))
    if suggestion is not None:
        return f"unknown option {option}{'' if value is None else f'={value}'}: {suggestion}"
    return unknown_option(option, [field.name for field in fields(kind)])


def explain_other_kind(option: str, value: Any, owners: Iterable[str], kind: str) -> str:
    """The message for an option, or a value of it, that other kinds of models have."""
    return (
        f"{option if value is None else f'{option}={value}'}: is for model.kind={' or '.join(owners)}, not {kind}; "
        f"leave it out, or write {option}=null where a recipe sets it"
    )


def suggest(option: str, kind: type, value: str | None = None) -> str | None:
    """What to write instead of another library's option, or one that is elsewhere; None if neither is known.

    `kind` is the dataclass in which the option was looked up: a part of the recipe, or the options of a command.
    """
    evaluator = evaluator_sets(value, "evaluation.sets" if _is_of_recipe(kind) else "sets")
    if evaluator is not None:
        return evaluator
    if kind is EvaluationSet:
        option = f"evaluation.{option}"
    *_, group, name = f".{option}".replace("-", "_").split(".")
    if not _is_of_recipe(kind):
        return _suggest_for_command(option, name, [field.name for field in fields(kind)], value)
    if kind is CombinedConfig and (part := _option_of_part(option, name, value)):
        return part
    # `eval.steps`, `lora.r`, `train.batch_size`: the group is a part of their names.
    row = _row_of(f"{group}_{name}", _RECIPE_ROWS) or _row_of(name, _RECIPE_ROWS)
    if row is not None and _holds_for(row, kind):
        return _sentence(row, value)
    options = _recipe_options()
    elsewhere = [full for full in options if full.rpartition(".")[2] == name and full not in (option, "loss.name")]
    if issubclass(kind, LossConfig):  # the options of the default loss are not those of this one
        elsewhere = [full for full in elsewhere if not full.startswith("loss.")]
    if not elsewhere:
        return None
    if value is None and all(isinstance(options[full], bool) for full in elsewhere):
        value = "true"
    return f"write {' or '.join(full if value is None else f'{full}={value}' for full in elsewhere)}"


def _option_of_part(option: str, name: str, value: str | None) -> str | None:
    """Where to write an option that the parts of a combined loss have; None if no loss has it."""
    if not any(name == field.name for kind in LOSSES.values() for field in fields(kind)):
        return None
    place = option.removesuffix(name) + "losses"
    written = f"{{name: LOSS, {name}: {'VALUE' if value is None else value}}}"
    return f"it belongs to the parts of loss=combined: write it in each that needs it, as in {place}=[{written},...]"


def evaluator_sets(name: str | None, option: str) -> str | None:
    """What to write instead of an evaluator class of sentence-transformers; `option` is the one that lists sets."""
    if name is None or not _EVALUATOR.fullmatch(name):
        return None
    row = _row_of(name.strip("[]"), migration.EVALUATORS)
    return None if row is None else _sentence(row, None).replace("evaluation.sets", option)


def option_names() -> list[str]:
    """The full names of all options of a recipe."""
    return list(_recipe_options())


def counterpart(option: str, value: str) -> str | None:
    """The assignment of a valid value to an option that has the value of another library; None if it is not known."""
    name = option.rpartition(".")[2]
    if name == "kind":
        row = _row_of(value, migration.EVALUATORS)
        match = None if row is None else _KIND.search(row.ours)
        return None if match is None else match[0]
    for row in _RECIPE_ROWS:
        if row.convert is not None and row.ours.startswith("`") and _option(row).rpartition(".")[2] == name:
            assignment = row.convert(option, value)
            if assignment not in (None, f"{option}={value}") and not isinstance(assignment, Answer):
                return assignment
    return None


def explain_no_name(option: str, value: str, names: Sequence[str]) -> str:
    """The message for a value of `code_option` that is neither a path `module:name` nor one of the `names`."""
    if not names:
        return f"{option}={value}: must be module:name, such as my_module:Mine"
    ours = counterpart(option, value)
    hint = "" if ours is None else f"; write {ours}"
    return f"{option}={value}: expected one of {', '.join(names)}, or module:name of your own{hint}"


def check_reranker_loss(name: str) -> None:
    """Raise a ConfigError with our loss for a loss class of a CrossEncoder: dense models have others of these names."""
    row = _row_of(name, [replace(row, also="") for row in migration.RERANKER_LOSSES])
    if row is not None and name not in LOSSES:
        raise ConfigError(f"loss={name}: {_sentence(row, None)}")


def unknown_loss(option: str, name: str) -> str:
    """The message for a loss that does not exist; `option` names it, such as `loss` or `loss.losses[1].name`."""
    written = f"{option}={name}"
    class_name = _same_spelling(name, [*SENTENCE_TRANSFORMERS_LOSSES, *UNSUPPORTED_LOSSES])
    row = _row_of(name, migration.LOSSES) or _row_of(f"{name}Loss", migration.LOSSES)
    if row is not None:
        return f"{written}: {_sentence(row, None)}"
    if class_name in UNSUPPORTED_LOSSES:
        return f"{written}: not available, it needs {UNSUPPORTED_LOSSES[class_name]}, and losses see embeddings only"
    if class_name is not None:
        return f"{written}: write loss=sentence_transformers loss.class_name={class_name}"
    return f"{written}: there is no such loss{did_you_mean(name, list(LOSSES))} Available are {', '.join(LOSSES)}"


def misplaced_option(option: str, kind: type, value: str) -> str | None:
    """The message if the dataclass `kind` has no such option, or if it is within a value or is a group of options."""
    node: Any = kind()
    keys = option.split(".")
    for depth, key in enumerate(keys):
        parent = ".".join(keys[:depth])
        if isinstance(node, ModelConfig) and any(key in kind.own_options for kind in kinds()):
            return None  # the options of another kind are checked when the kind is known
        if isinstance(node, LossConfig) or node is None or isinstance(node, dict):
            return None  # another loss has other options, and OmegaConf checks values
        if isinstance(node, list):
            return f"{option}={value}: {parent} is a list, which is written as a whole"
        if not is_dataclass(node):
            return f"{option}={value}: {suggest(option, kind, value) or f'{parent} is a single value'}"
        names = [field.name for field in fields(node)]
        if key not in names:
            suggestion = suggest(option, kind, value)
            wrong = ".".join(keys[: depth + 1])
            return f"unknown option {option}={value}: {suggestion}" if suggestion else unknown_option(wrong, names)
        node = getattr(node, key)
    if not is_dataclass(node) or value in ("", "null"):
        return None
    listed = ", ".join(f"{option}.{field.name}" for field in fields(node))
    return f"{option}={value}: {suggest(option, kind, value) or f'{option} has the options {listed}'}"


def _holds_for(row: Row, kind: type) -> bool:
    """Whether the option that a row names is one of the dataclass `kind`, if it is an evaluation set or a loss."""
    if kind is EvaluationSet:
        return row.ours.startswith("`evaluation.")
    if issubclass(kind, LossConfig) and row.ours.startswith("`loss."):
        return _option(row).removeprefix("loss.") in {f.name for f in fields(kind)}
    return True


def _suggest_for_command(option: str, name: str, allowed: Sequence[str], value: str | None) -> str | None:
    for row in migration.COMMANDS:
        if _has_name(row, name) and _option(row) in allowed:
            return _sentence(row, value)
    general = _row_of(name, (*migration.ANY_COMMAND, *migration.LAUNCHERS)) if "." not in option else None
    if general is not None:
        return _sentence(general, None)
    if option not in _recipe_options():
        return None
    ours = _OF_COMMANDS.get(option, name)
    return f"write {ours}{'' if value is None else f'={value}'}" if ours in allowed else None


def _sentence(row: Row, value: str | None) -> str:
    """What a row says, without Markdown: with the user's value, if it can be converted."""
    text = row.ours.replace("`", "")
    if not row.ours.startswith("`"):
        return text
    if value is None and isinstance(row.convert, Flag):
        value = "true"
    assignment = row.convert(_option(row), value) if row.convert is not None and value is not None else None
    return assignment if isinstance(assignment, Answer) else f"write {assignment or text}"


def _option(row: Row) -> str:
    """The first option that a row names, without a value."""
    return str(_CODE.findall(row.ours)[0])


def _row_of(name: str, rows: Iterable[Row]) -> Row | None:
    return next((row for row in rows if _has_name(row, name)), None)


def _has_name(row: Row, name: str) -> bool:
    return _simplified(name) in map(_simplified, f"{row.names} {row.also}".split())


def _same_spelling(name: str, names: Iterable[str]) -> str | None:
    """The name that differs at most in case and underscores."""
    return next((other for other in names if _simplified(other) == _simplified(name)), None)


def _simplified(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def _is_of_recipe(kind: type) -> bool:
    of_kinds = (LossConfig, ModelConfig)
    return kind in (Recipe, TrainSource, EvaluationSet) or issubclass(kind, of_kinds) or kind in _recipe_parts()


@cache
def _recipe_parts() -> frozenset[type]:
    return frozenset(type(node) for _, node in _walk(Recipe(), "") if is_dataclass(node))


@cache
def _recipe_options() -> dict[str, Any]:
    """The full names of all options of a recipe with their defaults: of all kinds of models, and the default loss."""
    options = {name: node for name, node in _walk(Recipe(), "") if not is_dataclass(node)}
    for kind in kinds():
        defaults = kind.model_options()
        options |= {f"model.{name}": getattr(defaults, name) for name in kind.own_options}
    return options


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(node):
        value = getattr(node, field.name)
        yield f"{prefix}{field.name}", value
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
