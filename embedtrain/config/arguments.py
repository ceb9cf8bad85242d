"""Arguments of a command line of the form option=value."""

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

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
