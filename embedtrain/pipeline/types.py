"""Pipelines and their stages, composed."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.code import UserOptions
from embedtrain.config.expected import expected_directories
from embedtrain.errors import EmbedtrainError
from embedtrain.pipeline.registry import DIR, StageKind


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Begin messages with the name of the stage."""
    try:
        yield
    except EmbedtrainError as error:
        raise type(error)(f"stages.{name}: {error}") from None


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
        arguments: the command line of its command.
        options: what these are composed to.
        directory: what it writes is in there.
        depends: names of the earlier stages whose results it uses.
        user: those of its options that the user wrote, not the file of the pipeline.
    """

    name: str
    kind: StageKind
    arguments: list[str]
    options: Any
    directory: Path
    depends: tuple[str, ...]
    user: UserOptions

    def output(self, what: str) -> str:
        """The path or pattern of one of its results, as a later stage writes it."""
        below = "" if what == DIR else self.kind.outputs[what]
        return str(self.directory / below) if below else str(self.directory)

    def compose(self) -> Any:
        """The options again, with all paths present: right before it runs."""
        with expected_directories(()), naming(self.name):
            return self.kind.compose(self.arguments, self.user)


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
