"""The command line of submit: options under `slurm.`, and those of the training that is submitted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from embedtrain.config.accelerate import with_accelerate
from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_one, to_dataclass, to_recipe
from embedtrain.config.folders import folder
from embedtrain.config.messages import unknown_option
from embedtrain.config.schema import Recipe
from embedtrain.config.slurm import SlurmConfig, SubmitOptions
from embedtrain.config.slurm_checks import check_run, check_slurm
from embedtrain.errors import ConfigError

_ASKS_FOR_HELP = ("--help", "-h")
_ARE_TEXT = [field.name for field in fields(SlurmConfig) if field.type == str | None]
_ARE_LINES = [field.name for field in fields(SlurmConfig) if field.type == list[str]]
_HAS_QUOTES = re.compile(r"""(['"]).*\1""", re.DOTALL)
_NOTHING = ("", "null", "~", "Null", "NULL")


@dataclass(frozen=True)
class Submission:
    """What is to be submitted: one training, or one for each seed.

    Attributes:
        recipe: checked; of an array that of no seed in particular.
        slurm: checked.
        arguments: of `python -m embedtrain`, as they were given.
        output_dirs: one for each seed, in their order; one where there are none.
    """

    recipe: Recipe
    slurm: SlurmConfig
    arguments: list[str]
    output_dirs: list[str]


def compose_submit(arguments: list[str]) -> Submission:
    """What is to be submitted.

    Raises:
        ConfigError: as `compose_recipes`; or options under `slurm.` that cannot work.
        SystemExit: after `--help` and its like.
    """
    own = [argument for argument in arguments if _is_own(argument)]
    of_training = [argument for argument in arguments if not _is_own(argument)]
    for argument in of_training:
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", argument):
            raise ConfigError(f"{argument!r}: a line end cannot stand in a job's script; write it into a recipe file")
    own = [*_of_cluster(own), *own]
    options = to_dataclass(
        compose_one("submit", folder("configs") / "doors", [_quoted(argument) for argument in own]), SubmitOptions
    )
    slurm = check_slurm(options.slurm)
    recipe = _composed(of_training)
    if not slurm.seeds:
        return Submission(recipe, slurm, of_training, [recipe.output_dir])
    if given := next((argument for argument in of_training if argument.lstrip("+").startswith("seed=")), None):
        raise ConfigError(f"{given} and slurm.seeds={slurm.seeds} both choose seeds: keep one")
    output_dirs = [_composed([*of_training, f"seed={seed}"]).output_dir for seed in slurm.seeds]
    if len(set(output_dirs)) < len(output_dirs):
        output_dirs = [f"{recipe.output_dir}/seed-{seed}" for seed in slurm.seeds]
    return Submission(recipe, slurm, of_training, output_dirs)


def _composed(arguments: Sequence[str]) -> Recipe:
    recipe = check_recipe(with_accelerate(to_recipe(compose_one("config", folder("configs"), list(arguments)))))
    check_run(recipe)
    return recipe


def _is_own(argument: str) -> bool:
    return argument.lstrip("+~").partition("=")[0].split(".")[0] == "slurm" or argument in _ASKS_FOR_HELP


def _quoted(argument: str) -> str:
    """A text, and each line of a list, in quotes: `&`, `=` and others in them mean something to Hydra."""
    key, sign, value = argument.partition("=")
    name = key.lstrip("+").removeprefix("slurm.")
    if not sign or _HAS_QUOTES.fullmatch(value) or value in _NOTHING:
        return argument
    if name in _ARE_TEXT:
        return f"{key}={_in_quotes(value)}"
    if name not in _ARE_LINES:
        return argument
    if not value.startswith("["):
        return f"{key}=[{_in_quotes(value)}]"
    inner = value[1:-1]
    if not inner.strip() or not value.endswith("]") or re.search(r"""["']""", inner):
        return argument
    return f"{key}=[{','.join(_in_quotes(line.strip()) for line in inner.split(','))}]"


def _in_quotes(text: str) -> str:
    # Hydra takes a backslash for itself only before a quote, and at the end of a text; ${HOME} is the shell's.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return '"' + escaped.replace("${", "\\${") + '"'


def _of_cluster(own: Sequence[str]) -> list[str]:
    """The options in the file that `slurm.cluster` names, as arguments."""
    named = [argument.partition("=")[2] for argument in own if argument.lstrip("+").startswith("slurm.cluster=")]
    if not named or named[-1] in _NOTHING:
        return []
    path = Path(named[-1].strip("'\"")).expanduser()
    try:
        # Its scalars as they are written: YAML takes 24:00:00 for a number.
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506  (makes text alone)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"slurm.cluster={path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"slurm.cluster={path}: lines such as `partition: gpu` are expected")
    allowed = [field.name for field in fields(SlurmConfig) if field.name not in ("cluster", "dry_run")]
    arguments = []
    for name, value in found.items():
        if name not in allowed:
            raise ConfigError(f"slurm.cluster={path}: {unknown_option(name, name, allowed)}")
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise ConfigError(f"slurm.cluster={path}: {name} is a single value, or a list of them")
        if isinstance(value, list):
            each = [_in_quotes(one) if name in _ARE_LINES else one for one in value]
            arguments.append(f"slurm.{name}=[{','.join(each)}]")
        else:
            arguments.append(f"slurm.{name}={value or 'null'}")
    return arguments
