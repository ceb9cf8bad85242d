"""Arguments of a command line of the form option=value."""

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def quote(text: str) -> str:
    """A text in quotes, so that nothing in it (commas, brackets, `${`) has a meaning for Hydra."""
    # Hydra takes a backslash for itself only before a quote and at the end of the text.
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), text)
    # OmegaConf halves the backslashes before an escaped interpolation.
    return '"' + re.sub(r"(\\*)\$\{", r"\1\1\\${", escaped) + '"'


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
