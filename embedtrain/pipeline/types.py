"""Pipelines and their stages, composed."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.code import UserOptions, composing_stage
from embedtrain.config.command_line import flatten, to_overrides
from embedtrain.config.commands import DIR, Command
from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import expected_directories
from embedtrain.errors import EmbedtrainError


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All values in options, by dotted name below `name`."""
    prefix = f"{name}." if name else ""
    if is_dataclass(value) and not isinstance(value, type):
        for option in fields(value):
            yield from leaves(getattr(value, option.name), f"{prefix}{option.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}{key}")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    else:
        yield name, value


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Begin messages with the name of the stage."""
    try:
        yield
    except EmbedtrainError as error:
        raise type(error)(f"stages.{name}: {error}") from None


def is_training(command: Command) -> bool:
    """Whether the options of a command are a recipe alone."""
    return command.option_class is Recipe


def command_line(command: Command, values: Mapping[str, Any]) -> list[str]:
    """The arguments that set these options of a command."""
    flat = flatten(command.option_class, values)
    recipe = flat.pop("recipe", None) if is_training(command) else None
    return [*(to_overrides({"recipe": recipe}) if recipe is not None else []), *to_overrides(flat)]


def compose_options(command: Command, arguments: list[str], user: UserOptions) -> Any:
    """The options of the command, checked, with paths that exist or that earlier stages will write.

    `user` has what the user wrote of them; the file of the pipeline wrote the others, and cannot name code.
    """
    with composing_stage(user):
        if not is_training(command):
            options = command.compose(arguments)
            command.require_paths(options)
            return options
        (recipe,) = recipes = compose_recipes(arguments)
    command.require_paths(recipes)
    return recipe


@dataclass(frozen=True)
class Selection:
    """Which stages a command runs; names of stages as in the recipe, None for no restriction."""

    start: tuple[str, ...] = ()  # `from`: this stage, or the members, and those that use its results are repeated
    until: str | None = None  # the last stage to run
    only: tuple[str, ...] = ()  # the one stage to run, or all of its members


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        command: `do` in the recipe names it.
        arguments: its command line.
        options: what these are composed to.
        directory: what it writes is in there.
        depends: names of the earlier stages whose results it uses.
        user: those of its options that the user wrote, not the file of the pipeline.
    """

    name: str
    command: Command
    arguments: list[str]
    options: Any
    directory: Path
    depends: tuple[str, ...]
    user: UserOptions

    @property
    def is_training(self) -> bool:
        """Whether it trains: the options are a recipe."""
        return is_training(self.command)

    def output(self, what: str) -> str:
        """The path or pattern of one of its results, as a later stage writes it."""
        below = "" if what == DIR else self.command.outputs[what]
        return str(self.directory / below) if below else str(self.directory)

    def compose(self) -> Any:
        """The options again, with all paths present: right before it runs."""
        with expected_directories(()), naming(self.name):
            return compose_options(self.command, self.arguments, self.user)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages can all be composed."""

    name: str
    output_dir: Path
    stages: tuple[Stage, ...]
    timeout: float
    resolved: dict[str, Any]  # the recipe with overrides, for pipeline.yaml
    selection: Selection

    def stage(self, name: str) -> Stage:
        """The stage of this name."""
        return next(stage for stage in self.stages if stage.name == name)

    def dependents(self, name: str) -> list[Stage]:
        """The stages that use results of this one, directly or through others, in order."""
        names = {name}
        dependents = []
        for stage in self.stages:
            if names & set(stage.depends):
                names.add(stage.name)
                dependents.append(stage)
        return dependents

    def ancestors(self, name: str) -> list[str]:
        """The names of the stages whose results this one uses, directly or through others."""
        names: dict[str, None] = {}
        for earlier in self.stage(name).depends:
            names |= dict.fromkeys([*self.ancestors(earlier), earlier])
        return list(names)
