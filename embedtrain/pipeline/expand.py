"""From the stages of a recipe to a flat list: members of fan-outs, rounds of loops, evaluations after stages.

Works on plain mappings whose `${...}` are not resolved yet; `References` resolves them, stage after stage.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.commands import COMMANDS, DIR, MODEL, WRITING
from embedtrain.config.hydra_files import HYDRA, folder, read_variable
from embedtrain.config.parsing import explain_hydra_error
from embedtrain.config.validation import did_you_mean
from embedtrain.errors import ConfigError
from embedtrain.pipeline.types import Stage

EACH, REPEAT, AFTER, INIT, FROM, STAGES, DO = "each", "repeat", "after", "init", "from", "stages", "do"
_NAME = re.compile(r"[A-Za-z][\w-]*")
_MEMBER = re.compile(r"[\w-]+")
_MAX_NAME = 100  # characters: a file system allows 255 bytes, and names get suffixes
_NAME_RULE = f"a name has letters, digits, _ and -, begins with a letter, and has at most {_MAX_NAME} characters"
_REFERENCE = re.compile(r"\$\{out:([\w-]+)(?=\.)")
_FIRST_SEED = 42  # the recipe's default
MAX_ROUNDS = 1000


@dataclass
class Expanded:
    """The flat stages of a pipeline.

    Attributes:
        stages: options of each stage, with `do`, in the order in which they run.
        groups: names of the members of each fan-out.
        aliases: the stage that the name of a loop stands for after it: its last model.
        origins: where the options of each stage are in the file, such as stages.weak and stages.weak.each.small.
    """

    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, name: str, options: dict[str, Any], *origins: str) -> None:
        """Add a stage; a ConfigError if there is one of this name, or if the name cannot be that of a folder."""
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            raise ConfigError(f"stages.{name}: {_NAME_RULE}")
        if name in self.stages or name in self.groups or name in self.aliases:
            raise ConfigError(f"stages.{name}: there are two stages of this name; rename one")
        self.stages[name] = options
        self.origins[name] = origins


def expand(stages: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Expanded:
    """All stages by name, in the order in which they run; a ConfigError names the stage that cannot be expanded."""
    expanded = Expanded()
    options = dict(evaluation)
    after = options.pop(AFTER, [])
    if not isinstance(after, list):
        raise ConfigError(f"evaluation.after={after}: must be a list of stages, such as [{next(iter(stages), 'weak')}]")
    for name in after:
        if name not in stages:
            raise ConfigError(f"evaluation.after: there is no stage {name}{did_you_mean(str(name), list(stages))}")
    if options and AFTER not in evaluation:
        raise ConfigError(
            "evaluation: has no effect without evaluation.after, a list of stages whose models it measures"
        )
    for name, stage in stages.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"stages.{name}: {_NAME_RULE}")
        if not isinstance(stage, dict):
            raise ConfigError(f"stages.{name}={stage}: must be a mapping with `do` and the options of that command")
        _add(expanded, name, stage, f"stages.{name}")
        if name in after:
            for member in [expanded.aliases.get(name, name), *expanded.groups.get(name, ())]:
                if member in expanded.stages:
                    expanded.add(
                        f"{member}-evaluation",
                        {DO: "evaluate", "model": f"${{out:{member}.model}}", **options},
                        "evaluation",
                    )
    return expanded


def _add(expanded: Expanded, name: str, stage: dict[str, Any], origin: str) -> None:
    if REPEAT in stage and STAGES in stage:
        _add_rounds(expanded, name, stage)
        return
    if DO not in stage:
        raise ConfigError(f"stages.{name}.do: is missing; write one of {', '.join(WRITING)}")
    members = _members(name, stage)
    if members is None:
        expanded.add(name, stage, origin)
        return
    common = {key: value for key, value in stage.items() if key not in (EACH, REPEAT)}
    names = [f"{name}-{member}" for member in members]
    for member_name, (member, options) in zip(names, members.items(), strict=True):
        expanded.add(member_name, _merged(common, options), origin, f"{origin}.{EACH}.{member}")
    expanded.groups[name] = names


def _members(name: str, stage: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The options in which the members of a fan-out differ: `each`, or seeds for `repeat`; None for a single stage."""
    if EACH in stage and REPEAT in stage:
        raise ConfigError(f"stages.{name}: has each and repeat; write one of them")
    if REPEAT in stage:
        count = _count(name, stage[REPEAT])
        seed = stage.get("seed", _FIRST_SEED)
        if not isinstance(seed, int):
            raise ConfigError(f"stages.{name}.seed={seed}: must be a number if the stage has repeat")
        return {str(index + 1): {"seed": seed + index} for index in range(count)}
    if EACH not in stage:
        return None
    members = stage[EACH]
    if not isinstance(members, dict) or not members:
        raise ConfigError(f"stages.{name}.each={members}: must be a mapping from names of members to their options")
    for member, options in members.items():
        if not _MEMBER.fullmatch(str(member)):
            raise ConfigError(f"stages.{name}.each.{member}: a name has letters, digits, _ and -")
        if not isinstance(options, dict | None):
            raise ConfigError(f"stages.{name}.each.{member}={options}: must be a mapping of options")
    return {str(member): options or {} for member, options in members.items()}


def _add_rounds(expanded: Expanded, name: str, loop: Mapping[str, Any]) -> None:
    """The stages of a loop once for each round: `${out:LOOP.model}` is the newest model, `from` before the first."""
    for key in loop:
        if key not in (REPEAT, STAGES, FROM):
            raise ConfigError(
                f"stages.{name}.{key}: a loop has {REPEAT}, {STAGES} and {FROM}{did_you_mean(key, [REPEAT])}"
            )
    inner = loop[STAGES]
    if not isinstance(inner, dict) or not all(isinstance(stage, dict) for stage in inner.values()):
        raise ConfigError(f"stages.{name}.stages={inner}: must be a mapping from names to stages")
    for key in inner:
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ConfigError(f"stages.{name}.stages.{key}: {_NAME_RULE}")
    with_model = [key for key, stage in inner.items() if MODEL in _outputs(stage)]
    if not with_model:
        raise ConfigError(f"stages.{name}.stages: none of a round's stages produces a model, such as do: train")
    newest = loop.get(FROM)
    for index in range(_count(name, loop[REPEAT])):
        prefix = f"{name}-{index + 1}"
        names = {key: f"{prefix}-{key}" for key in inner}
        if newest is not None:
            names[name] = str(newest)
        for key, stage in inner.items():
            if REPEAT in stage and STAGES in stage:
                raise ConfigError(f"stages.{name}.stages.{key}: a loop within a loop is not possible")
            _add(expanded, f"{prefix}-{key}", _renamed(stage, names), f"stages.{name}.{STAGES}.{key}")
        newest = names[with_model[-1]]
    expanded.aliases[name] = str(newest)


def _outputs(stage: Mapping[str, Any]) -> Mapping[str, str]:
    command = COMMANDS.get(str(stage.get(DO)))
    return {} if command is None else command.outputs


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ROUNDS:
        raise ConfigError(f"stages.{name}.repeat={value}: must be a number from 1 to {MAX_ROUNDS}")
    return value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A copy in which references to the stages of a round, also those of `init`, name those of this round."""
    match value:
        case str():
            return _REFERENCE.sub(lambda match: f"${{out:{names.get(match[1], match[1])}", value)
        case dict():
            renamed = {key: _renamed(item, names) for key, item in value.items()}
            if isinstance(init := renamed.get(INIT), dict) and init.get(FROM) in names:
                renamed[INIT] = init | {FROM: names[init[FROM]]}
            return renamed
        case list():
            return [_renamed(item, names) for item in value]
        case _:
            return value


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`; mappings are merged."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def names_of(expanded: Expanded) -> Iterator[str]:
    """All names that a reference may have."""
    yield from expanded.stages
    yield from expanded.groups
    yield from expanded.aliases


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
    with HYDRA:
        OmegaConf.register_new_resolver("out", references.resolve, replace=True)
        OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
        OmegaConf.register_new_resolver("recipes", lambda: str(folder("recipes")), replace=True)
        try:
            yield references
        except OmegaConfBaseException as error:
            raise references.error or ConfigError(explain_hydra_error(error)) from None
        finally:
            OmegaConf.clear_resolver("out")
