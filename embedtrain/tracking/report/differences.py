"""Recipes as lists of options, and what differs between runs."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from embedtrain.config.compose import to_plain
from embedtrain.config.losses import LOSSES
from embedtrain.config.recipe import Recipe
from embedtrain.tracking.report.runs import Run

# A file made to explode (aliases within aliases) ends here.
MOST_OPTIONS = 5000
_VALUE_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a recipe: its dotted name, its value in words, and whether that is the default."""

    name: str
    value: str
    default: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """One option or version that is not the same in all runs: a value for each run, None where it has none."""

    name: str
    values: tuple[str | None, ...]


def options_of(run: Run) -> dict[str, list[Option]]:
    """The recipe's options by the group they are in; single values come first, under ``""``."""
    defaults = _flat_defaults(run.recipe)
    groups: dict[str, list[Option]] = {"": []}
    for name, value in _flat(run.recipe):
        group = name.partition(".")[0].partition("[")[0]
        option = Option(name, value, defaults.get(name) == value)
        groups.setdefault("" if group == name else group, []).append(option)
    return {group: options for group, options in groups.items() if options}


def differences(runs: Sequence[Run]) -> list[Difference]:
    """What differs between recipes: options of one run alone as well."""
    return _differing([dict(_flat(run.recipe)) for run in runs])


def version_differences(runs: Sequence[Run]) -> list[Difference]:
    """What differs between the libraries and machines that runs were made with."""
    found = []
    for run in runs:
        versions = {str(name): _told(value) for name, value in run.versions.items()}
        if run.sessions:
            versions["device"] = run.sessions[-1].devices
        found.append(versions)
    return _differing(found)


def _differing(each: Sequence[Mapping[str, str]]) -> list[Difference]:
    names = dict.fromkeys(itertools.chain.from_iterable(each))
    rows = [Difference(name, tuple(one.get(name) for one in each)) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def _flat(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Innermost options and their values in words."""
    return list(itertools.islice(_leaves("", recipe, 0), MOST_OPTIONS))


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    match value:
        case Mapping() if value and depth < 12:
            for key, inner in value.items():
                yield from _leaves(f"{name}.{key}" if name else str(key), inner, depth + 1)
        case list() if any(isinstance(one, Mapping | list) for one in value) and depth < 12:
            for number, inner in enumerate(value):
                yield from _leaves(f"{name}[{number}]", inner, depth + 1)
        case _:
            yield name, _told(value)


def _told(value: Any) -> str:
    """A value as YAML has it, on one line."""
    if isinstance(value, str):
        text = value if value and value == value.strip() and "\n" not in value else repr(value)
    elif isinstance(value, Mapping | list):
        text = repr(value) if value else str(value)
    else:
        text = yaml.safe_dump(value, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]} ..."


def _flat_defaults(recipe: Mapping[str, Any]) -> dict[str, str]:
    defaults = to_plain(Recipe())
    loss = recipe.get("loss")
    kind = LOSSES.get(str(loss.get("name"))) if isinstance(loss, Mapping) else None
    if kind is not None:
        defaults["loss"] = to_plain(kind())
    return dict(_flat(defaults))
