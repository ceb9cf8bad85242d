"""Dataclasses from decoded JSON whose file may be damaged, or written by somebody else."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

MAX_COUNT = 2**53  # JSON's largest exact integer; within int64
_SHOWN = 40  # characters of an invalid value


def read_record(kind: type[Record], values: object) -> Record:
    """An instance of the dataclass `kind` from a JSON object.

    Types are checked, also those of elements and of nested dataclasses. Integers are counts, from 0 to 2^53, and
    numbers are finite. Entries that `kind` does not have are dropped, missing ones get their default.

    Raises:
        ValueError: `values` is no object, or names the entry that is missing or has another type.
    """
    if not isinstance(values, Mapping):
        raise ValueError("it is not a JSON object")
    assert dataclasses.is_dataclass(kind)
    types = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            arguments[field.name] = _convert(field.name, values[field.name], types[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**arguments)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is an integer from 0 to 2^53."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number that a float holds."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_COUNT
    return isinstance(value, float) and math.isfinite(value)


def _convert(name: str, value: Any, kind: Any) -> Any:
    """The value as `kind`; ValueError if it is something else."""
    arguments = get_args(kind)
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _convert(name, value, kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_record(kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value in [member.value for member in kind]:
            return kind(value)
    elif origin in (list, tuple, Sequence):
        if isinstance(value, list):
            items = [_convert(name, item, arguments[0]) for item in value]
            return tuple(items) if origin is tuple else items
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {str(key): _convert(name, item, arguments[1]) for key, item in value.items()}
    elif (
        (kind is int and is_count(value))
        or (kind is float and is_number(value))
        or (kind in (str, bool) and isinstance(value, kind))
    ):
        return value
    raise ValueError(f"{name}={value!r:.{_SHOWN}} is not {_describe(kind)}")


def _describe(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    names = {int: "a count", float: "a number", str: "a text", bool: "true or false"}
    return names.get(kind) or ("a list" if get_origin(kind) in (list, tuple, Sequence) else "an object")
