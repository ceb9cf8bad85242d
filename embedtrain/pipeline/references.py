"""`${out:NAME.model}` in a recipe: the results of earlier stages."""

import contextlib
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.commands import DIR
from embedtrain.config.limits import read_variable
from embedtrain.config.parsing import explain_hydra_error
from embedtrain.config.recipe_files import folder
from embedtrain.config.validation import did_you_mean
from embedtrain.errors import ConfigError
from embedtrain.pipeline.expand import Expanded, names_of
from embedtrain.pipeline.types import Stage


class References:
    """What `${out:NAME.model}` stands for, and which stages the current one has referred to."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}  # those that come before the current one
        self.expanded = Expanded()
        self.used: dict[str, None] = {}
        self.error: ConfigError | None = None  # OmegaConf would wrap it

    def resolve(self, *parts: Any) -> Any:
        """The path of `NAME.RESULT`, or the list of `NAME.each`; a ConfigError names what cannot be referred to."""
        reference = ",".join(map(str, parts))
        try:
            return self._resolve(reference)
        except ConfigError as error:
            self.error = self.error or error
            raise

    def _resolve(self, reference: str) -> Any:
        name, _, what = reference.rpartition(".")
        name = self.expanded.aliases.get(name, name)
        members = self.expanded.groups.get(name)
        if members is not None:
            if what != "each":
                raise ConfigError(
                    f"${{out:{reference}}}: {name} has several members; write ${{out:{name}.each}} for all of them, or "
                    f"one, such as ${{out:{members[0]}.{what}}}"
                )
            return [self._output(member, None, reference) for member in members]
        return self._output(name, what, reference)

    def _output(self, name: str, what: str | None, reference: str) -> str:
        stage = self.stages.get(name)
        if stage is None:
            if name in names_of(self.expanded):
                raise ConfigError(f"${{out:{reference}}}: {name} comes later; a stage uses results of those before it")
            known = did_you_mean(name, list(names_of(self.expanded)))
            raise ConfigError(f"${{out:{reference}}}: there is no stage {name!r}{known} Write ${{out:NAME.model}}")
        self.used[name] = None
        what = stage.command.main_output if what is None else what
        allowed = [*stage.command.outputs, DIR]
        if what not in allowed:
            raise ConfigError(
                f"${{out:{reference}}}: {name} (do: {stage.command.name}) has {', '.join(allowed)}, not {what}"
            )
        return stage.output(what)


@contextlib.contextmanager
def resolvers() -> Iterator[References]:
    """`${out:...}`, and those that recipes have, while a pipeline is composed."""
    references = References()
    OmegaConf.register_new_resolver("out", references.resolve, replace=True)
    OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
    OmegaConf.register_new_resolver("recipes", lambda: str(folder("recipes")), replace=True)
    try:
        yield references
    except OmegaConfBaseException as error:
        raise references.error or ConfigError(explain_hydra_error(error)) from None
    finally:
        OmegaConf.clear_resolver("out")
