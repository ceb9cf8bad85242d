"""Arguments of a command line: the form option=value, options of Python in it, and forms of other tools.

A form that other tools have, such as a flag, is answered with the right one.
"""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from embedtrain.config.commands import COMMANDS
from embedtrain.config.losses import LOSSES
from embedtrain.config.names import evaluator_sets, suggest, unknown_loss
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError

# Of Hydra's grammar (1.3): the characters of a value without quotes, a backslash before one with a meaning, a function.
_UNREADABLE = re.compile(r"[^A-Za-z0-9_/\-\\+.$%*@?|:=,()\[\]{} \t]")
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_FUNCTION = re.compile(r"[a-z_]+\(")
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_PIECE = re.compile(r"\$\{[^}]+\}|\\.|.", re.DOTALL)  # an interpolation, an escaped character, or any other


def quote(text: str) -> str:
    """A text in quotes, so that nothing in it (commas, brackets, `${`) has a meaning for Hydra."""
    # OmegaConf halves the backslashes before an escaped interpolation.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", _in_quotes(text))


def _in_quotes(text: str) -> str:
    # Hydra takes a backslash for itself only before a quote and at the end of the text.
    return '"' + re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), text) + '"'


def quote_unreadable(argument: str) -> str:
    """`option=value` with quotes around each text with characters outside of Hydra's grammar: `café`, `数据`, `new!`.

    Elements of lists, values of mappings and values of `-m` are texts of their own.
    """
    option, assigned, value = argument.partition("=")
    if not assigned or not _UNREADABLE.search(value):
        return argument
    written, text, brackets, position, is_key = "", "", "", 0, False
    while position < len(value):
        is_first = not text.strip(" \t")  # elsewhere an apostrophe quotes nothing
        match = (_QUOTED.match(value, position) if is_first else None) or _PIECE.match(value, position)
        assert match is not None, "a piece is any character"
        piece, position = match[0], match.end()
        if piece in ("[", "{") and is_first:
            written, text, brackets, is_key = written + text + piece, "", brackets + piece, piece == "{"
        elif piece == ":" and is_key:
            written, text, is_key = written + text + piece, "", False
        elif piece == "," or (piece in ("]", "}") and brackets):
            written, text = written + _readable(text, is_alone=not brackets) + piece, ""
            brackets = brackets if piece == "," else brackets[:-1]
            is_key = piece == "," and brackets.endswith("{")
        else:
            text += piece
    return option + assigned + written + _readable(text, is_alone=not brackets)


def _readable(text: str, *, is_alone: bool) -> str:
    core = text if is_alone else text.strip(" \t")  # blanks at the end belong to a prompt
    if text.strip(" \t")[:1] in ("'", '"') or not _UNREADABLE.search(core) or _FUNCTION.match(core):
        return text
    return text.replace(core, _in_quotes(_ESCAPED.sub(r"\1", core)))


def quote_value(argument: str, *names: str) -> str:
    """`name=text` with its text in quotes, where `name` is one of `names` and there are no quotes yet."""
    name, _, text = argument.partition("=")
    return f"{name}={quote(text)}" if name in names and text and text[0] not in "'\"" else argument


def option_of(argument: str) -> str:
    """The name of the option that a command line argument sets."""
    return argument.lstrip("+~").partition("=")[0]


def value_of(argument: str) -> Any:
    """The value that a command line argument sets, as Hydra reads it: a text without its quotes, a list, a mapping.

    An argument that Hydra cannot read has the text after `=`: composing it gives the error.
    """
    try:
        override = OverridesParser.create().parse_override(argument)
    except (HydraException, RecursionError):
        return argument.partition("=")[2]
    return argument.partition("=")[2] if override.is_sweep_override() else override.value()


_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NOT_TEXT = ("null", "true", "false", "inf", "nan")  # in any case
_KEY = re.compile(r"[\w.-]+")


class Interpolation(str):
    """A text whose `${...}` is resolved; in all other texts `${` has no meaning."""


def flatten(kind: type[Any], *options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their full name: `{"train": {"steps": 5}}` becomes `{"train.steps": 5}`.

    Mappings are cut up where `kind`, a dataclass, has dataclasses; elsewhere a mapping is a value. Raises a ConfigError
    for an option that is given twice.
    """
    flat: dict[str, Any] = {}
    for mapping in options:
        for name, value in _leaves(mapping, kind(), ""):
            if name in flat:
                raise ConfigError(f"{name} is given twice: {flat[name]!r} and {value!r}")
            flat[name] = value
    return flat


def _leaves(options: Mapping[str, Any], node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{key!r} is not the name of an option: names are strings")
        child = node
        for part in key.split("."):
            child = getattr(child, part, None)
        if isinstance(value, Mapping) and is_dataclass(child):
            yield from _leaves(value, child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_overrides(options: Mapping[str, Any]) -> list[str]:
    """The arguments of a command line that set these options, given by full name, to exactly these values."""
    return [f"{name}={_written(value, name)}" for name, value in options.items()]


def _written(value: Any, option: str) -> str:
    """A value in the grammar of Hydra's overrides. Raises a ConfigError for one that YAML could not hold."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    match value:
        case Enum():
            return _written(value.value, option)
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Interpolation():
            return f'"{value}"'
        case str():
            is_plain = _PLAIN_TEXT.fullmatch(value) and value.lower() not in _NOT_TEXT
            return value if is_plain else quote(value)
        case PurePath():
            return quote(str(value))
        case Mapping():
            items = (f"{_key(key, option)}: {_written(item, f'{option}.{key}')}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case list() | tuple():
            return f"[{', '.join(_written(item, f'{option}[{index}]') for index, item in enumerate(value))}]"
        case _:
            raise ConfigError(
                f"{option}={value!r}: must be text, a number, True, False, None, a list or a mapping of these, "
                f"not {type(value).__name__}"
            )


def _key(key: object, option: str) -> str:
    if isinstance(key, int) or (isinstance(key, str) and _KEY.fullmatch(key)):
        return str(key)
    raise ConfigError(f"{option}: {key!r} cannot be the key of a mapping: letters, digits, `_`, `.` and `-` can")


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
