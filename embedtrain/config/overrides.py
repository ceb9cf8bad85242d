"""Options of Python as overrides of the command line, so that both are composed and checked in one way."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from embedtrain.config.arguments import quote
from embedtrain.errors import ConfigError

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
