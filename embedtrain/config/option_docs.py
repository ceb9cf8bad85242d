"""What the source says about options: their comments, types and defaults, read with tokenize.

The reference pages (`docs/hooks/reference.py`) and `--help` are made from it.
"""

import ast
import dataclasses
import io
import re
import sys
import tokenize
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from embedtrain.config.losses import LossConfig


@dataclasses.dataclass(frozen=True)
class Option:
    """One field.

    Attributes:
        name: its name.
        annotation: its type as the source has it.
        classes: the enums and dataclasses in the type.
        default: as YAML; empty if there is none.
        comment: its meaning.
    """

    name: str
    annotation: str
    classes: tuple[type, ...]
    default: str
    comment: str


def meaning(option: Option) -> str:
    """The comment of an option and the meaning of its choices; empty without comments."""
    parts = [option.comment]
    for kind in option.classes:
        if issubclass(kind, Enum):
            parts.append(docstring_line(kind))
            comments = {name: text for name, text in comments_of(kind).items() if text}
            parts += [f"`{kind[name].value}`: {text}" for name, text in comments.items()]
        elif kind is LossConfig:
            parts.append("see [losses](losses.md)")
    return ". ".join(part.rstrip(".") for part in parts if part)


def docstring_line(kind: type) -> str:
    """The docstring of a class in one line."""
    return " ".join((kind.__doc__ or "").split())


def options_of(kind: type) -> list[Option]:
    """The fields of a dataclass in its order: inherited ones first."""
    comments: dict[str, str] = {}
    written: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= {name: text for name, text in comments_of(base).items() if text or name not in comments}
            written |= {node.target.id: ast.unparse(node.annotation) for node in _fields(base)}
    hints = typing.get_type_hints(kind)
    return [
        Option(field.name, written[field.name], _classes(hints[field.name]), _default(field), comments[field.name])
        for field in dataclasses.fields(kind)
    ]


def comments_of(kind: type) -> dict[str, str]:
    """The comment of each field or enum member: on its own lines, or on the lines directly above."""
    source = Path(typing.cast(str, sys.modules[kind.__module__].__file__)).read_text(encoding="utf-8")
    inline, alone = dict[int, str](), dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            whole_line = token.line.strip() == token.string
            (alone if whole_line else inline)[token.start[0]] = token.string.lstrip("# ").strip()
    comments = {}
    for node in _members(kind):
        assert node.end_lineno is not None
        above: list[str] = []
        for line in range(node.lineno - 1, 0, -1):
            if line not in alone:
                break
            above.insert(0, alone[line])
        own = [inline[line] for line in range(node.lineno, node.end_lineno + 1) if line in inline]
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        comments[typing.cast(ast.Name, target).id] = " ".join([*above, *own])
    return comments


def _members(kind: type) -> list[ast.AnnAssign | ast.Assign]:
    source = Path(typing.cast(str, sys.modules[kind.__module__].__file__)).read_text(encoding="utf-8")
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    return [node for node in body if isinstance(node, ast.AnnAssign | ast.Assign)]


def _fields(kind: type) -> Iterator[Any]:
    return (node for node in _members(kind) if isinstance(node, ast.AnnAssign))


def _classes(hint: Any) -> tuple[type, ...]:
    """The enums and dataclasses in a type."""
    if isinstance(hint, type) and (issubclass(hint, Enum) or dataclasses.is_dataclass(hint)):
        return (hint,)
    if isinstance(hint, types.GenericAlias | types.UnionType) or typing.get_args(hint):
        return tuple(kind for part in typing.get_args(hint) for kind in _classes(part))
    return ()


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return ""
    if dataclasses.is_dataclass(value):
        return ""
    value = [item.value if isinstance(item, Enum) else item for item in value] if isinstance(value, list) else value
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, str) and plain:
        return plain.replace("\n", "\\n")
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000, default_style=None)
    return text.removesuffix("\n").removesuffix("\n...").replace("''", '""')


def type_of(option: Option) -> str:
    """The type in the terms of YAML; for an enum its values."""
    names = {"None": "null", "str": "text", "bool": "true | false", "int": "integer", "float": "number", "Any": "any"}
    pattern = r"\b(None|str|bool|int|float|Any)\b"
    # Before the values of an enum, which may have the name of a type.
    text = re.sub(pattern, lambda match: names[match[1]], option.annotation)
    for kind in option.classes:
        if issubclass(kind, Enum):
            text = text.replace(kind.__name__, " | ".join(str(member.value) for member in kind))
        elif dataclasses.is_dataclass(kind):
            text = text.replace(kind.__name__, "options")
    return text
