"""The command line before Hydra reads it: flags, and forms that other tools have, answered with the right one."""

import argparse
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

from embedtrain.config.arguments import quote_unreadable
from embedtrain.config.commands import COMMANDS
from embedtrain.config.losses import LOSSES
from embedtrain.config.names import evaluator_sets, suggest, unknown_loss
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError

_HELP_FLAGS = ("--help", "-h")
_FLAG = re.compile(r"unrecognized arguments: (--?[\w.-]+)(?:[= ](?!--?[a-z])(\S+))?")
_CFG_FILE = re.compile(r"argument --cfg/-c: invalid choice: '(\S+\.ya?ml)'")
_CONFIG_NAMES = ("config", "config-file", "config-name", "config-path")
_OWN_RECIPE = (
    "a recipe of your own is DIR/recipe/NAME.yaml with `# @package _global_` in it: write --config-dir DIR recipe=NAME"
)


def parse_command_line(arguments: Sequence[str], kind: type, *, multirun: bool) -> argparse.Namespace:
    """The flags, and `overrides`: the arguments of the form option=value, which set options of the dataclass `kind`.

    `help` is None, or the topic of `--help TOPIC`, which may be empty. Raises a ConfigError with the right form.
    """
    arguments = join_help_topic(arguments)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.kind, parser.arguments = kind, arguments
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    command_line = parser.parse_intermixed_args(arguments)
    if command_line.multirun and not multirun:
        raise ConfigError("multirun (-m) is for training: write one value of each option, and call the command again")
    for override in command_line.overrides:
        if kind is Recipe:
            _check_recipe_choice(override)
        if "=" not in override and not override.startswith("~"):
            _refuse_word(override, command_line.overrides, kind)
    command_line.overrides = list(map(quote_unreadable, command_line.overrides))
    return command_line


def join_help_topic(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--help TOPIC` as one: `--help=TOPIC`. What has a `=` or begins with `-` is no topic."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in _HELP_FLAGS and "=" not in argument and not argument.startswith("-"):
            joined[-1] = f"--help={argument}"
        else:
            joined.append(argument)
    return joined


def asks_for_help(argument: str) -> bool:
    """Whether an argument is `--help`, `-h` or `--help=TOPIC`."""
    return argument in _HELP_FLAGS or argument.startswith("--help=")


class _Parser(argparse.ArgumentParser):
    kind: type = Recipe  # of the options that the command line sets
    arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        match = _FLAG.match(message)
        if match is not None:
            raise ConfigError(_right_form(match[1], self._value_after(match[1]) or match[2], self.kind))
        if (match := _CFG_FILE.match(message)) and self.kind is Recipe:
            raise ConfigError(f"-c {match[1]}: {_for_file(match[1])}")
        raise ConfigError(message)

    def _value_after(self, flag: str) -> str | None:
        """The words after a flag, which argparse takes for arguments of their own; several as `a,b`."""
        words = list(self.arguments)
        following = words[words.index(flag) + 1 :] if flag in words else []
        values = itertools.takewhile(lambda word: "=" not in word and not word.startswith("-"), following)
        return ",".join(values) or None


def _right_form(flag: str, value: str | None, kind: type) -> str:
    name = flag.lstrip("-")
    written = flag if value is None else f"{flag} {value}"
    if name.replace("_", "-") in (*_CONFIG_NAMES, "recipe") and kind is Recipe:
        if name == "recipe" and value is not None and not value.endswith((".yaml", ".yml")):
            return f"{written}: options have no dashes: write recipe={value}"
        of_accelerate = ""
        if name == "config_file" and value is not None:
            of_accelerate = f"; for a file of `accelerate config` write parallel.accelerate_config={shlex.quote(value)}"
        return f"{written}: {_for_file(value)}{of_accelerate}"
    if name == "loss" and kind is Recipe and value is not None and value not in LOSSES:
        return f"{flag}: options are written as option=value, without dashes: {unknown_loss('loss', value)}"
    if name in ("dry-run", "dry_run", "dryrun"):
        return (
            f"{flag}: --cfg job prints the composed options and starts nothing; `embedtrain inspect` reads the data, "
            "`embedtrain plan` estimates memory and time, and `embedtrain submit slurm.dry_run=true` prints the script"
        )
    if name == "version":
        return f"{flag}: write `embedtrain --version`"
    own = name.replace("-", "_")
    default = getattr(kind(), own, None)
    is_own = own in getattr(kind, "__dataclass_fields__", {})
    suggestion = None if is_own and not is_dataclass(default) else suggest(name, kind, value)
    if suggestion is None and is_own:
        value = "true" if value is None and isinstance(default, bool) else value
        allowed = "|".join(choice.value for choice in type(default)) if isinstance(default, Enum) else "VALUE"
        suggestion = f"write {own}={allowed if value is None else shlex.quote(value)}"
    if suggestion is not None:
        form = "options are written as option=value, without dashes: " if suggestion.startswith("write ") else ""
        return f"{flag}: {form}{suggestion}"
    return f"{written}: there is no such flag; options are written as option=value, and --help lists them"


def _check_recipe_choice(override: str) -> None:
    name, _, value = override.partition("=")
    if name.replace("_", "-") in (*_CONFIG_NAMES, "recipe") and value.endswith((".yaml", ".yml")):
        raise ConfigError(f"{override}: {_for_file(value)}")


def _for_file(file: str | None) -> str:
    if file is None or not file.endswith((".yaml", ".yml")):
        return _OWN_RECIPE
    path = Path(file)
    if path.parent.name == "recipe":
        return f"write --config-dir {shlex.quote(str(path.parent.parent))} recipe={path.stem}"
    return f"{_OWN_RECIPE}; here: move it to {path.parent / 'recipe' / path.name}, and write " + (
        f"--config-dir {shlex.quote(str(path.parent))} recipe={path.stem}"
    )


def _refuse_word(word: str, overrides: Sequence[str], kind: type) -> None:
    """Raise for an argument without `=`: Hydra's own message names its grammar."""
    if instead := evaluator_sets(word, "evaluation.sets" if kind is Recipe else "sets"):
        raise ConfigError(f"{word}: {instead}")
    following = overrides[overrides.index(word) + 1 :]
    if following and "=" not in following[0] and re.fullmatch(r"[a-z_.]+", word):
        raise ConfigError(f"{word} {following[0]}: write {word}={following[0]}")
    if kind is Recipe:
        if word.endswith((".yaml", ".yml")):
            raise ConfigError(f"{word}: {_for_file(word)}")
        if word in COMMANDS and word != "train":
            raise ConfigError(
                f"{word}: is a command of its own: write embedtrain {word}, or python -m embedtrain {word}"
            )
        if word == "train":
            raise ConfigError("train: leave it out after python -m embedtrain, or write embedtrain train")
        if Path(word).is_dir():
            raise ConfigError(f"{word}: options are written as option=value; for a model write model.path={word}")
        raise ConfigError(f"{word}: options are written as option=value; for a recipe write recipe={word}")
    meant = next((name for name in ("query", "data", "run") if name in getattr(kind, "__dataclass_fields__", {})), None)
    hint = "--help lists them" if meant is None else f"write {meant}={shlex.quote(word)}"
    raise ConfigError(f"{word}: options are written as option=value; {hint}")
