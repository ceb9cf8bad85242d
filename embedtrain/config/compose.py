"""From YAML and the command line to a checked recipe, or to the options of a command, by Hydra's compose API.

Hydra only composes. It writes no file, changes no directory, configures no logging and instantiates nothing, so YAML
cannot run code. Composed configurations become dataclasses here; no other module sees a DictConfig.
"""

import argparse
import contextlib
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.code import code_options, is_code_path, names_code, names_of, require_named_code
from embedtrain.config.command_line import option_of, parse_command_line, quote, to_overrides, value_of
from embedtrain.config.command_options import KindOptions
from embedtrain.config.hydra_files import (
    GROUPS,
    HYDRA,
    check_num_jobs,
    choices,
    folder,
    initialize_without_files,
    limited_files,
    limited_interpolations,
    load_yaml,
    read_variable,
    recipe_schema,
    refuse_hydra_settings,
    register_recipes,
    uncopied_store,
)
from embedtrain.config.kinds import Kind, kinds, load_kind, trust_kind
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES, CombinedConfig
from embedtrain.config.names import check_reranker_loss, explain_no_name, explain_other_kind, explain_unknown
from embedtrain.config.options import check_values
from embedtrain.config.parsing import (
    escape_interpolations,
    explain_composition,
    explain_hydra_error,
    parse_evaluation,
    parse_losses,
    parse_sources,
)
from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.config.saved_recipe import current_recipe
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import mask_passwords

Options = TypeVar("Options")

# Of reading a YAML file. PyYAML's conversions of invalid dates and numbers raise errors of many types.
YAML_ERRORS = (
    *(yaml.YAMLError, OSError, ValueError, ArithmeticError),
    *(LookupError, AttributeError, TypeError, RecursionError),
)
_HELP = f"""embedtrain train: train a model; the same command resumes a run that was stopped

  embedtrain train recipe=NAME [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain recipe=NAME [option=value ...]

{{choices}}

{{options: model.path! data.train! name train.epochs train.steps train.global_batch_size
  optim.lr model.max_length evaluation.sets checkpoint.every parallel.precision output_dir seed}}

Yours: DIR/recipe/NAME.yaml, --config-dir DIR. Or none: model.path, data.train.
{LAUNCH_HELP}
  --cfg job           print the composed recipe, start nothing
  -m                  one run for each of several values: optim.lr=1e-5,2e-5"""


def compose_recipes(arguments: Sequence[str]) -> list[Recipe]:
    """The recipe that the command line describes, checked; one for each job with `-m` (multirun).

    Raises a ConfigError if the recipe cannot work, and SystemExit after `--help` and `--cfg job`.
    """
    recipes = [check_recipe(apply_accelerate_config(recipe)) for recipe in _compose_recipes(arguments, multirun=True)]
    if len(recipes) > 1 and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "multirun (-m) on several ranks cannot work: the second job would join the first one's process group; "
            "start the command once per job, or use -m in a single process (--gpus 1)"
        )
    if len({recipe.output_dir for recipe in recipes}) < len(recipes):
        raise ConfigError(
            "multirun (-m): the jobs share one output_dir and would resume each other; "
            "make it depend on what you vary, such as output_dir='runs/${name}-${optim.lr}'"
        )
    return recipes


def compose_recipe(arguments: Sequence[str]) -> Recipe:
    """One recipe, not checked: for commands that can do without some of its options."""
    (recipe,) = _compose_recipes(arguments, multirun=False)
    return recipe


def compose_command(
    name: str,
    kind: type[Options],
    arguments: Sequence[str],
    help_text: str,
    check_use: Callable[[Options], object] | None = None,
) -> Options:
    """The options of `embedtrain NAME`, with checked names, types and single values; the user names code that runs.

    `--help` prints `help_text`, as `render_help` says. `check_use` raises a ConfigError for an option that has no
    effect: what an option is for comes before its limits.
    """
    command_line = parse_command_line(arguments, kind, multirun=False)
    if command_line.config_dir is not None:
        raise ConfigError(f"--config-dir {command_line.config_dir}: {name} takes no recipe; leave it out")
    with HYDRA:
        ConfigStore.instance().store(name=name, node=kind)
        config, _ = _compose(name, command_line.overrides, kind)
    _print_if_asked(command_line, config, kind, help_text)
    options = _to_dataclass(config, kind)
    if check_use is not None:
        check_use(options)
    if isinstance(options, KindOptions) and options.kind is not None:
        _kind("kind", options.kind, command_line.overrides)
    check_values(options)
    return _with_named_code(options, command_line.overrides)


def to_recipe(config: DictConfig) -> Recipe:
    """A composed configuration as a Recipe, with dataclasses in its lists of sources, sets and losses as well."""
    recipe = _to_dataclass(config, Recipe)
    parse_evaluation(recipe.evaluation)
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
    """The resolved recipe that a run wrote to `recipe.yaml`; a ConfigError if this version cannot read it."""
    try:
        saved = load_yaml(path)
        if not isinstance(saved, dict):
            raise ConfigError(f"{path} cannot be read as a recipe: it is not a mapping")
        saved = current_recipe(saved)
        schema = recipe_schema()
        loss = saved.get("loss")
        name = loss.get("name", "infonce") if isinstance(loss, dict) else "infonce"
        schema.loss = LOSSES[check_loss_name(name, "loss.name")]()
        model = saved.get("model")
        if isinstance(model, dict):
            schema.model = load_kind(str(model.get("kind", ModelConfig.kind))).model_options()
        # The run has resolved its recipe: an interpolation could only be there to read the environment.
        values = escape_interpolations({key: value for key, value in saved.items() if key != "versions"})
        return to_recipe(OmegaConf.merge(schema, values))  # type: ignore[arg-type]
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: is this the output_dir of a run?") from None
    except (OmegaConfBaseException, *YAML_ERRORS) as error:
        raise ConfigError(f"{path} cannot be read as a recipe: {explain_hydra_error(error)}") from None


def _print_if_asked(command_line: argparse.Namespace, config: DictConfig, kind: type, help_text: str) -> None:
    """Print the help or the configuration, and exit, if the command line asks for it."""
    if command_line.help is None and not command_line.cfg:
        return
    try:
        with limited_interpolations():
            text = OmegaConf.to_yaml(config, resolve=command_line.resolve)
            values: Any = OmegaConf.to_container(config, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_hydra_error(error)) from None
    if command_line.help is not None:
        from embedtrain.config.help import render_help

        text = render_help(help_text, kind, values, command_line.help)
    print(text, end="", flush=True)
    raise SystemExit(0)


def _compose_recipes(arguments: Sequence[str], *, multirun: bool) -> list[Recipe]:
    command_line = parse_command_line(arguments, Recipe, multirun=multirun)
    jobs = _jobs(command_line.overrides) if command_line.multirun else [command_line.overrides]
    try:
        with HYDRA:
            configs = [_compose_recipe(overrides, command_line.config_dir) for overrides in jobs]
    except OmegaConfBaseException as error:  # the first use of a value that refers to one that does not exist
        values = {option_of(override): override.partition("=")[2] for override in command_line.overrides}
        raise ConfigError(explain_hydra_error(error, values)) from None
    _print_if_asked(command_line, configs[0], Recipe, _HELP.replace("{choices}", _available_choices()))
    return [_with_named_code(to_recipe(config), overrides) for config, overrides in zip(configs, jobs, strict=True)]


def _with_named_code(options: Options, overrides: Sequence[str]) -> Options:
    """`require_named_code`, after a ConfigError for a value that can name no code."""
    for each in code_options(options):
        if isinstance(each.value, str) and not is_code_path(each.value):
            raise ConfigError(explain_no_name(each.name, each.value, each.names))
    return require_named_code(options, overrides)


def _kind(option: str, name: str, overrides: Sequence[str]) -> Kind:
    """The kind that an option names, which is code of the user's if the user, not a file, names it."""
    return trust_kind(name, option) if names_code(option, name, overrides) else load_kind(name, option)


def _jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a multirun: `a=1,2 b=3,4` makes four."""
    values: list[list[str]] = []
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        check_num_jobs(parsed)
        for override in parsed:
            if override.is_sweep_override() and not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: -m trains with listed values, such as optim.lr=1e-5,2e-5 or "
                    "seed=range(1,4); W&B sweeps choose values from an interval, see docs/sweeps.md"
                )
            if override.is_discrete_sweep():
                values.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
            else:
                values.append([override.input_line or ""])
    except (HydraException, RecursionError) as error:
        raise ConfigError(explain_hydra_error(error)) from None
    return [list(job) for job in itertools.product(*values)]


def _compose_recipe(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """A recipe. Another loss on the command line starts from its own defaults, without the options of the recipe's."""
    overrides, chosen = _choose_loss(overrides)
    changes_loss = scores_pairs = False
    if chosen is not None:
        register_recipes(changes_loss)
        others = [override for override in overrides if option_of(override).partition(".")[0] != "loss"]
        with contextlib.suppress(ConfigError):  # the recipe needs the loss of the command line
            config, choices_of_groups = _compose("config", others, Recipe, config_dir)
            changes_loss = chosen not in (choices_of_groups["loss"], config.loss.name)
            scores_pairs = load_kind(config.model.kind).scores_pairs
    if scores_pairs:
        assert chosen is not None
        check_reranker_loss(chosen)
    register_recipes(changes_loss)
    config = _compose("config", overrides, Recipe, config_dir, without_loss=changes_loss)[0]
    _choose_kind(config, overrides)
    return _with_length_and_name(config, overrides)


def _choose_kind(config: DictConfig, overrides: Sequence[str]) -> None:
    """Make `model` the options of its kind; null unsets what a recipe or `model=NAME` sets for another kind."""
    values: Any = OmegaConf.to_container(config.model, enum_to_str=True)
    kind = _kind("model.kind", str(values["kind"]), overrides)
    known = {field.name for field in fields(kind.options)}
    of_others = {name for other in kinds() for name in other.own_options} - known
    for name in values.keys() - known:
        value = values.pop(name)
        if name not in of_others or value not in (None, []):
            raise ConfigError(
                explain_unknown(f"model.{name!s}", kind.options, None if value is None else written(value))
            )
    with open_dict(config):
        config.model = kind.model_options()
        for name, value in values.items():
            try:
                config.model.merge_with({name: value})
            except OmegaConfBaseException:
                if owners := [other.name for other in kinds() if _has_value(other, name, value)]:
                    raise ConfigError(explain_other_kind(f"model.{name}", value, owners, kind.name)) from None
                raise


def _has_value(kind: Kind, name: str, value: Any) -> bool:
    """Whether a kind has an option of its own of this name, which can have this value."""
    if name not in kind.own_options:
        return False
    (option,) = (field for field in fields(kind.options) if field.name == name)
    if names := names_of(option):
        return value in names
    try:
        OmegaConf.structured(kind.model_options()).merge_with({name: value})
    except OmegaConfBaseException:
        return False
    return True


def _choose_loss(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """The overrides with the loss that the last of them chooses as `loss=NAME`, and its name.

    Hydra also reads a name in quotes or in a list, after `+loss=` or beside its options in `loss={name: NAME}`. All of
    these have to keep or replace the options of the recipe's loss alike.
    """
    others, chosen = [], None
    for override in overrides:
        option = option_of(override)
        if option == "loss" and override.startswith("~"):
            raise ConfigError(f"{override}: a run has a loss; write loss=NAME to train with another one")
        value = value_of(override) if option in ("loss", "loss.name") else None
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if isinstance(value, str):
            chosen = value
            continue
        if isinstance(value, dict):  # Hydra merges it into the chosen loss
            chosen = value.get("name", chosen)
        others.append(override)
    return [*others, *to_overrides({} if chosen is None else {"loss": chosen})], chosen


def _with_length_and_name(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """One epoch unless a recipe or the command line says otherwise; a run without a name has the model's.

    `train.steps` of the command line replaces the recipe's `train.epochs`, and the other way round.
    """
    given = set(map(option_of, overrides))
    with limited_interpolations():
        if not config.name and isinstance(config.model.path, str):
            config.name = _name_of_model(config.model.path)
        for length, other in (("steps", "epochs"), ("epochs", "steps")):
            if f"train.{length}" in given and f"train.{other}" not in given and config.train[length] is not None:
                config.train[other] = None
        if config.train.steps is None and config.train.epochs is None:
            config.train.epochs = 1.0
    return config


def _name_of_model(path: str) -> str:
    """The end of a model's path, with the folder before it where many models have that end: runs/faq/model."""
    absolute = Path(path).absolute()
    is_common = re.fullmatch(r"model|final|best|checkpoint-\d+", absolute.name) is not None
    return f"{absolute.parent.name}-{absolute.name}".lstrip("-") if is_common else PurePath(path).name


def _compose(
    name: str, overrides: Sequence[str], kind: type, config_dir: str | None = None, *, without_loss: bool = False
) -> tuple[DictConfig, Mapping[str, str]]:
    """What Hydra composes from the overrides into a `kind`: a Recipe also from configs/ and `config_dir`.

    `without_loss` leaves out `loss` of all files in `config_dir`. Also returns the choice of each group.
    """
    for override in overrides:
        if option_of(override) == "hydra/sweeper":
            raise ConfigError(
                f"{override}: Hydra's sweepers are not used; list values with -m, or use a W&B sweep: docs/sweeps.md"
            )
        if re.match(r"hydra\b", option_of(override)):
            raise ConfigError(f"{override}: settings of Hydra can name code to run, and embedtrain never runs code")
    search_path, directory = [], None
    if config_dir is not None:
        directory = expand_user(config_dir).absolute()
        if not directory.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such directory")
        search_path = [f"hydra.searchpath=[{quote(f'file://{directory}')}]"]
    OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
    OmegaConf.register_new_resolver("recipes", lambda: str(folder("recipes")), replace=True)
    try:
        # Without groups `model=DIR` is a value and not a file of configs/model.
        configs = folder("configs")
        with (
            initialize_config_dir(str(configs), version_base="1.3") if kind is Recipe else initialize_without_files(),
            limited_files(configs, directory, without="loss" if without_loss else None),
            limited_interpolations(),
            uncopied_store(),
        ):
            config = compose(name, [*overrides, *search_path], return_hydra_config=True)
    except Exception as error:
        values = {option_of(override): override.partition("=")[2] for override in overrides}
        raise ConfigError(explain_composition(error, values, kind)) from None
    refuse_hydra_settings(config.hydra)
    choices_of_groups = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices_of_groups


def _available_choices() -> str:
    """For `--help`: the recipes, and the choices of the other groups."""
    texts = (f"  {f'{group}=NAME':<14}  {', '.join(choices(group))}" for group in GROUPS)
    return "\n".join(textwrap.fill(text, 80, subsequent_indent=" " * 18) for text in texts)


def _to_dataclass(config: DictConfig, kind: type[Options]) -> Options:
    """A composed configuration as the dataclass that it was composed from."""
    try:
        with limited_interpolations():
            options = OmegaConf.to_object(config)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(explain_hydra_error(error)) from None
    assert isinstance(options, kind)
    _refuse_added(options, "")
    _refuse_passwords(to_plain(options), "")
    return options


def _refuse_passwords(value: Any, name: str) -> None:
    """Refuse URLs with passwords: options are written to recipe.yaml, the model card, logs and wandb."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_passwords(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_passwords(item, f"{name}[{index}]")
    elif isinstance(value, str) and (masked := mask_passwords(value)) != value:
        raise ConfigError(
            f"{name}={masked}: options are written to files that are published, so a URL with a password is rejected: "
            "give the password to the library that opens the URL, in ~/.netrc, its configuration or its environment"
        )


def _refuse_added(options: Any, prefix: str) -> None:
    """Refuse options that `+option=value` added to the dataclass: nothing would read them."""
    names = [field.name for field in fields(options)]
    for name, value in vars(options).items():
        if name not in names:
            raise ConfigError(explain_unknown(f"{prefix}{name}", type(options), value))
        if is_dataclass(value):
            _refuse_added(value, f"{prefix}{name}.")
