"""Hydra's and OmegaConf's messages as one sentence: the option, its value, what is allowed, the nearest name."""

import difflib
import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.folders import choices
from embedtrain.config.losses import LOSSES
from embedtrain.config.recipe import Recipe, TrainSource

_KINDS: dict[str, type] = {}
_NO_PACKAGE = "unknown option recipe: a recipe of your own must begin with the line `# @package _global_`"

_SEVERAL = "it is a list, write loss.losses=[{name: infonce}, {name: orthogonal, weight: 0.1}]"


def unknown_option(name: str, key: str, allowed: list[str]) -> str:
    """What to say of an option `name` whose last part `key` is none of the allowed ones."""
    near = difflib.get_close_matches(key, allowed, n=1)
    return f"unknown option {name}{f', did you mean {near[0]}?' if near else '.'} Allowed are {', '.join(allowed)}"


def explain_hydra_error(text: str) -> str:
    """Hydra's or OmegaConf's message as one sentence, with the nearest name where one was mistyped."""
    if match := re.search(r"Key '([^']+)' (?:is )?not in '(\w+)'", text):
        key, holder = match[1], match[2]
        full = re.search(r"full_key: (\S+)", text)
        if holder == "Recipe" and key == "recipe":
            return _NO_PACKAGE
        return unknown_option(full[1] if full else key, key, _options_of(holder))
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, wanted = match[1], match[2]
        there = choices(group)
        near = difflib.get_close_matches(wanted, there, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else "."
        own = "; your own lie in DIR/recipe/NAME.yaml, with --config-dir DIR" if group == "recipe" else ""
        return f"{group}={wanted}: there is no such {group}{hint} There are {', '.join(there)}{own}"
    if re.search(r"Could not override '\w+@recipe\.", text):
        return _NO_PACKAGE
    if match := re.search(r"Could not override '(\S*arguments)\.(\w+)'", text):
        return f"{match[1]} is a mapping: write {match[1]}={{{match[2]}: ...}}"
    if "Cannot merge DictConfig with ListConfig" in text and "loss.losses" in text:
        return f"loss.losses: {_SEVERAL}"
    if re.search(r"\w+Config is not a subclass of \w+Config", text):
        return f"loss: one at a time; for several write loss=combined, and {_SEVERAL}"
    text = text.partition("error: ")[2] or text  # argparse, behind its page of usage
    text = one_line(re.sub(r"Error merging override (\S+)", r"\1:", text))
    if match := re.search(r"(\S+)=(.*): Invalid value assigned: \w+ is not a ListConfig", text):
        return f"{match[1]}={match[2]}: it is a list, write {match[1]}=[{match[2]}]"
    if "override_grammar" in text:
        return f"{text.partition(' See https')[0]} (write option=value, quotes around what has blanks)"
    return text


def register_options(kind: type) -> None:
    """Let messages name the options of a command's dataclass, and of those that its fields hold."""
    for type_ in get_type_hints(kind).values():
        if isinstance(type_, type) and is_dataclass(type_):
            register_options(type_)
    _KINDS[kind.__name__] = kind


def _options_of(holder: str) -> list[str]:
    """The options of the dataclass of that name."""
    return [field.name for field in fields(_KINDS.get(holder, Recipe))]


def one_line(text: str) -> str:
    """What is left of a message of several lines without Hydra's advice and internal names."""
    dropped = ("full_key:", "object_type", "reference_type", "Set the environment variable HYDRA_FULL_ERROR")
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(dropped)]
    key = re.search(r"full_key: (\S+)", text)
    where = f"{key[1]}: " if key and not any(key[1] in line for line in kept) else ""
    return where + " ".join(kept)


register_options(Recipe)
for _loss in LOSSES.values():
    register_options(_loss)
_KINDS |= {"TrainSource": TrainSource, "EvaluationSet": EvaluationSet}
