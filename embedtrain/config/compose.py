"""From the command line and YAML to a checked Recipe: all that embedtrain knows of Hydra.

Hydra composes and does nothing else: it writes no file, changes no folder, configures no logging and never
instantiates anything. What it hands over is turned into dataclasses here and nowhere else.
"""

import contextlib
import functools
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.elements import escape_interpolations, items, parse_losses, parse_sources
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.folders import choices, folder
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES, CombinedConfig, LossConfig
from embedtrain.config.messages import explain_hydra_error, one_line, register_options, unknown_option
from embedtrain.config.recipe import Recipe
from embedtrain.config.yaml_safety import guarded
from embedtrain.errors import ConfigError

Options = TypeVar("Options")


def compose_recipes(arguments: list[str]) -> list[Recipe]:
    """The recipe that the command line asks for; several with Hydra's multirun (`-m`).

    Raises:
        ConfigError: an unknown option, a value of the wrong type, a combination that cannot work.
        SystemExit: after `--help` and its like.
    """
    recipes = [
        check_recipe(apply_accelerate_config(to_recipe(config)))
        for config in _compose("config", folder("configs"), arguments)
    ]
    if os.environ.get("WORLD_SIZE", "1") != "1" and len(recipes) > 1:
        raise ConfigError(
            "multirun (-m) under torchrun cannot work: the second job would meet the first one's process group; "
            "start one torchrun per job, or use -m in a single process"
        )
    if len({recipe.output_dir for recipe in recipes}) < len(recipes):
        raise ConfigError(
            "multirun (-m): the jobs share one output_dir and would resume each other; "
            "make it depend on what you vary, such as output_dir='runs/${name}-${optim.lr}'"
        )
    return recipes


def to_recipe(config: DictConfig) -> Recipe:
    """A composed configuration as a Recipe, its lists of sources and sets as dataclasses too."""
    recipe = to_dataclass(config, Recipe)
    recipe.evaluation.sets = items(recipe.evaluation.sets, EvaluationSet, "evaluation.sets")
    if isinstance(recipe.loss, CombinedConfig):
        recipe.loss.losses = parse_losses(recipe.loss.losses, "loss.losses")
    recipe.data.train = parse_sources(recipe.data.train, "data.train", recipe.loss)
    return recipe


def to_plain(options: Any) -> Any:
    """A dataclass tree as plain dictionaries, lists and strings, for YAML and JSON."""
    if is_dataclass(options) and not isinstance(options, type):
        return {field.name: to_plain(getattr(options, field.name)) for field in fields(options)}
    if isinstance(options, Enum):
        return options.value
    if isinstance(options, dict):
        return {str(key): to_plain(value) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [to_plain(value) for value in options]
    return options


def load_recipe(path: Path) -> Recipe:
    """A resolved recipe as a run left it in `recipe.yaml`.

    Raises:
        ConfigError: no such file, or one that this version does not understand.
    """
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(saved, dict):
            raise ConfigError(f"{path} cannot be read as a recipe: it is not a mapping")
        schema = _schema()
        loss = saved.get("loss")
        name = loss.get("name", "infonce") if isinstance(loss, dict) else "infonce"
        schema.loss = LOSSES[check_loss_name(name, "loss.name")]()
        # The run resolved it: an interpolation now could only be there to read what is none of its business.
        recipe = OmegaConf.merge(
            schema, escape_interpolations({key: value for key, value in saved.items() if key != "versions"})
        )
        return to_recipe(recipe)  # type: ignore[arg-type]
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: is this the output_dir of a run?") from None
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a recipe: {explain_hydra_error(str(error))}") from None


def compose_command(name: str, kind: type[Options], arguments: list[str]) -> Options:
    """The options of `python -m embedtrain.NAME`, from configs/commands/NAME.yaml and the command line.

    Raises:
        ConfigError: as `compose_recipes`, or multirun is asked for.
        SystemExit: after `--help` and its like.
    """
    _refuse_multirun(arguments)
    ConfigStore.instance().store(name=f"{name}_schema", node=kind)
    register_options(kind)
    (config,) = _compose(name, folder("configs") / "commands", arguments)
    return to_dataclass(config, kind)


def compose_training(arguments: list[str]) -> DictConfig:
    """The configuration of one training, for commands that take a training's options besides their own.

    Raises:
        ConfigError: as `compose_recipes`, or multirun is asked for.
        SystemExit: after `--help` and its like.
    """
    _refuse_multirun(arguments)
    (config,) = _compose("config", folder("configs"), arguments)
    return config


def _refuse_multirun(arguments: list[str]) -> None:
    if {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments):  # before Hydra makes a folder for it
        raise ConfigError("multirun (-m) is for training: write one value of each option, and call the command again")


def _compose(name: str, config_dir: Path, arguments: list[str]) -> list[DictConfig]:
    _register(arguments, with_recipes=name == "config")
    composed: list[DictConfig] = []
    application = functools.partial(composed.append)
    functools.update_wrapper(application, composed.append, assigned=("__doc__",))
    application.__name__ = "embedtrain"  # type: ignore[attr-defined]
    task = hydra.main(version_base="1.3", config_path=str(config_dir), config_name=name)(application)
    # First, for argparse takes options in a row only: `a=1 -m b=2,3` would not be understood.
    arguments = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    program, sys.argv = sys.argv, [sys.argv[0], *arguments]
    with _clear_errors(arguments), guarded(), tempfile.TemporaryDirectory() as scratch:
        # Multirun leaves a multirun.yaml in its folder.
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        try:
            task()
        finally:
            sys.argv = program
    if not composed:  # --help, --cfg and the like have printed what was asked for
        raise SystemExit(0)
    return composed


def _register(arguments: list[str], *, with_recipes: bool) -> None:
    """Tell Hydra the schemas, and each file in recipes/ as an option of `recipe=`.

    A search path could not do the latter: a group's name must be its folder's, and `recipes=` reads badly.
    """
    store = ConfigStore.instance()
    store.store(name="recipe_schema", node=_schema())
    for name, kind in LOSSES.items():
        store.store(group="loss", name=f"{name}_schema", node=kind)
    if with_recipes:
        for path in sorted(folder("recipes").glob("*.yaml")):
            recipe = OmegaConf.load(path)
            assert isinstance(recipe, DictConfig)
            # Options of the recipe's own loss: another one, chosen on the command line, begins with its defaults.
            if any(argument.startswith("loss=") and argument != f"loss={_loss_of(recipe)}" for argument in arguments):
                recipe.pop("loss", None)
            store.store(group="recipe", name=path.stem, node=recipe, package="_global_")
    OmegaConf.register_new_resolver("recipes", lambda: str(folder("recipes")), replace=True)
    OmegaConf.register_new_resolver("choices", _choices_text, replace=True)


def _loss_of(recipe: DictConfig) -> str:
    """Which loss a recipe chooses."""
    for choice in recipe.get("defaults", []):
        if isinstance(choice, DictConfig) and "override /loss" in choice:
            return str(choice["override /loss"])
    return "infonce"


def _choices_text() -> str:
    """For `--help`: every recipe with the command in its first line, and what the other groups offer."""
    lines, names = [], choices("recipe")
    widest = max(map(len, names))
    for name in names:
        first = (folder("recipes") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  recipe={name:<{widest}} {first.removeprefix('# ')}")
    lines += [f"  {group}={'|'.join(choices(group))}" for group in ("model", "loss", "parallel")]
    return "\n".join(lines)


def _schema() -> DictConfig:
    schema_node = OmegaConf.structured(Recipe)
    assert isinstance(schema_node, DictConfig)
    schema_node.loss = LossConfig()  # what any loss can be merged into; InfoNCE's own options could take no other's
    return schema_node


def to_dataclass(config: DictConfig, kind: type[Options]) -> Options:
    """A composed configuration as the dataclass it was made from.

    Raises:
        ConfigError: a value that cannot be resolved, or an option that the dataclass does not have.
    """
    try:
        options = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(str(error))) from None
    assert isinstance(options, kind)
    _refuse_added(options, "")
    return options


def _refuse_added(options: Any, prefix: str) -> None:
    """Refuse what `+option=value` put beside the fields: nobody would read it."""
    names = [field.name for field in fields(options)]
    for name in vars(options):
        if name not in names:
            raise ConfigError(unknown_option(f"{prefix}{name}", name, names))
    for name in names:
        value = getattr(options, name)
        if is_dataclass(value):
            _refuse_added(value, f"{prefix}{name}.")


@contextlib.contextmanager
def _clear_errors(arguments: list[str]) -> Iterator[None]:
    """Catch what Hydra prints before it exits and raise it as one sentence."""
    heard = io.StringIO()

    def told(text: str) -> str:
        if "Traceback (most recent call last)" in text:
            return _of_traceback(text, arguments)
        sentence = explain_hydra_error(text)
        found = re.match(r"unknown option (loss\.\w+)", sentence)
        if found and not any(argument.lstrip("+~").startswith(found[1]) for argument in arguments):
            return (
                f"the recipe sets {found[1]}, which the loss that is chosen does not have (a recipe chooses with "
                f"`defaults: [override /loss: NAME]`): {sentence}"
            )
        return sentence

    try:
        with contextlib.redirect_stderr(heard):
            yield
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            raise
        raise ConfigError(told(heard.getvalue())) from None
    except BrokenPipeError:  # `--help | head`
        raise SystemExit(0) from None
    except Exception as error:
        raise ConfigError(told(str(error))) from None


def _of_traceback(text: str, arguments: list[str]) -> str:
    """The sentence about what Hydra did not foresee: mostly an option within one that has no options."""
    for argument in arguments:
        at: Any = to_plain(Recipe())
        parts = argument.lstrip("+~").partition("=")[0].split(".")
        for place, part in enumerate(parts):
            if not isinstance(at, dict):
                kind = "a list, which is written whole" if isinstance(at, list) else "a single value"
                return f"{argument}: {'.'.join(parts[:place])} is {kind}"
            at = at.get(part, {})
    *_, last = (line.strip() for line in text.splitlines() if line.strip())
    return f"{' '.join(arguments)}: cannot be read ({last})"
