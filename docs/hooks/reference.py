"""mkdocs hook: tables of options, made from the dataclasses of embedtrain/config whenever the site is built.

A line `<!-- options: NAME -->` of a page becomes the table of that dataclass and of those within it; NAME is
`Recipe`, `TrainSource`, `EvaluationSet`, `losses` or `commands`. A field's meaning is its comment in the source, read
with tokenize.
"""

import ast
import dataclasses
import importlib
import io
import pkgutil
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

import embedtrain.config
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.losses import LOSSES, InfoNCEConfig, LossConfig
from embedtrain.config.recipe import Recipe, TrainSource

_MARK = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_DOOR = re.compile(r"Options of `python -m embedtrain\.(\w+)`")
_HEAD = "| option | meaning |\n| --- | --- |\n"


@dataclasses.dataclass(frozen=True)
class Option:
    """One field: its name, the type as it is written, the classes in it, its default as YAML, and its comment."""

    name: str
    type: str
    classes: tuple[type, ...]
    default: str
    comment: str


def on_page_markdown(markdown: str, **_: object) -> str:
    """Marks become tables."""
    return _MARK.sub(lambda match: section(match[1]), markdown)


def section(name: str) -> str:
    """The text that stands for a mark.

    Raises:
        KeyError: there is nothing of that name.
    """
    match name:
        case "losses":
            shared = table(LossConfig, "loss.")
            return "\n\n".join([f"## Every loss\n\n{told(LossConfig)}\n\n{shared}", *map(_loss, LOSSES.values())])
        case "commands":
            return "\n\n".join(f"## {door}\n\n{tree(kind, '', f'{door}.')}" for door, kind in doors().items())
        case _:
            kind, place = {
                "Recipe": (Recipe, ""),
                "TrainSource": (TrainSource, "data.train."),
                "EvaluationSet": (EvaluationSet, "evaluation.sets."),
            }[name]
            return tree(kind, "", place)


def doors() -> dict[str, type]:
    """Each command's name, with the dataclass of its options."""
    found = [(match[1], kind) for kind in dataclasses_of_config() if (match := _DOOR.match(kind.__doc__ or ""))]
    return dict(sorted(found, key=lambda pair: pair[0]))


def dataclasses_of_config() -> Iterator[type]:
    """Every dataclass that is defined in embedtrain/config, but for the private ones."""
    for room in pkgutil.iter_modules(embedtrain.config.__path__, "embedtrain.config."):
        module = importlib.import_module(room.name)
        for kind in vars(module).values():
            own = isinstance(kind, type) and kind.__module__ == room.name and not kind.__name__.startswith("_")
            if own and dataclasses.is_dataclass(kind):
                yield kind


def tree(kind: type, prefix: str, place: str = "") -> str:
    """The table of a dataclass, and below it those of the dataclasses that its fields are.

    Args:
        kind: the dataclass.
        prefix: what stands before its fields' names, such as `model.`.
        place: what stands before that in anchors, where one page has several dataclasses side by side.
    """
    parts = [told(kind), table(kind, prefix, place)] if kind is not Recipe else [table(kind, prefix, place)]
    for option in options_of(kind):
        for inner in option.classes:
            if _has_a_table(inner):
                level = "##" if not prefix and kind is Recipe else "###"
                parts.append(f"{level} {prefix}{option.name}\n\n{tree(inner, f'{prefix}{option.name}.', place)}")
    return "\n\n".join(part for part in parts if part)


def table(kind: type, prefix: str, place: str = "", *, without: type | None = None) -> str:
    """The options of one dataclass as a table, each with an anchor of its full name.

    Args:
        kind: the dataclass.
        prefix: as in `tree`.
        place: as in `tree`.
        without: another dataclass, whose fields are left out where they are the same.
    """
    known = {field.name for field in dataclasses.fields(without)} if without else set()
    rows = [
        row(option, prefix, place)
        for option in options_of(kind)
        if option.name not in known and not any(map(_has_a_table, option.classes))
    ]
    return _HEAD + "\n".join(rows) if rows else ""


def row(option: Option, prefix: str, place: str) -> str:
    """One option as a row of its table."""
    name = f"{prefix}{option.name}"
    span = f'<span id="{place or "option."}{name}" class="option">`{name}`</span>'
    return f"| {span}<br>{_type(option)}{_default_of(option)} | {_cell(meaning(option))} |"


def meaning(option: Option) -> str:
    """An option's comment, then what its choices mean. Empty where nothing in the source says it."""
    parts = [option.comment]
    for kind in option.classes:
        if issubclass(kind, Enum):
            parts.append(told(kind))
            comments = {name: text for name, text in comments_of(kind).items() if text}
            parts += [f"`{kind[name].value}`: {text}" for name, text in comments.items()]
        elif kind is LossConfig:
            parts.append("see [losses](losses.md)")
    return ". ".join(part.rstrip(".") for part in parts if part)


def told(kind: type) -> str:
    """A class's docstring in one line."""
    return " ".join((kind.__doc__ or "").split())


def options_of(kind: type) -> list[Option]:
    """The fields of a dataclass, those that it inherits first, as the dataclass itself orders them."""
    comments: dict[str, str] = {}
    written: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            comments |= {name: text for name, text in comments_of(one).items() if text or name not in comments}
            written |= {node.target.id: ast.unparse(node.annotation) for node in _fields(one)}
    hints = typing.get_type_hints(kind)
    return [
        Option(field.name, written[field.name], _classes(hints[field.name]), _default(field), comments[field.name])
        for field in dataclasses.fields(kind)
    ]


def comments_of(kind: type) -> dict[str, str]:
    """What the source says of each field or member: comments on its own lines, or on those right above it."""
    source = Path(typing.cast(str, sys.modules[kind.__module__].__file__)).read_text(encoding="utf-8")
    beside, alone = dict[int, str](), dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            whole_line = token.line.strip() == token.string
            (alone if whole_line else beside)[token.start[0]] = token.string.lstrip("# ").strip()
    found = {}
    for node in _members(kind):
        assert node.end_lineno is not None
        above = []
        for line in range(node.lineno - 1, 0, -1):
            if line not in alone:
                break
            above.insert(0, alone[line])
        own = [beside[line] for line in range(node.lineno, node.end_lineno + 1) if line in beside]
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        found[typing.cast(ast.Name, target).id] = " ".join([*above, *own])
    return found


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
    """Enums and dataclasses that a type is made of."""
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
    value = [one.value if isinstance(one, Enum) else one for one in value] if isinstance(value, list) else value
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, str) and plain:
        return plain.replace("\n", "\\n")
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000, default_style=None)
    return text.removesuffix("\n").removesuffix("\n...").replace("''", '""')


def _type(option: Option) -> str:
    """The type for someone who writes YAML; of an enum, what may be written."""
    text = option.type
    for kind in option.classes:
        if issubclass(kind, Enum):
            text = text.replace(kind.__name__, " | ".join(str(member.value) for member in kind))
        elif dataclasses.is_dataclass(kind):
            text = text.replace(kind.__name__, "options")
    names = {"None": "null", "str": "text", "bool": "true | false", "int": "integer", "float": "number", "Any": "any"}
    return _code(re.sub(r"\b(None|str|bool|int|float|Any)\b", lambda match: names[match[1]], text))


def _default_of(option: Option) -> str:
    if LossConfig in option.classes:
        return f", default {_code(InfoNCEConfig.name)}"
    return f", default {_code(option.default)}" if option.default else ", to be given"


def _has_a_table(kind: type) -> bool:
    """Whether a field of this class is told by a heading and a table of its own."""
    return dataclasses.is_dataclass(kind) and kind is not LossConfig


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """Text within a table's cell: a bar would end it, but in code."""
    return "`".join(part if at % 2 else part.replace("|", "\\|") for at, part in enumerate(text.split("`")))


def _loss(kind: type[LossConfig]) -> str:
    rows = table(kind, "loss.", f"{kind.name}.", without=LossConfig)
    return f"## {kind.name}\n\n{told(kind)}\n\n{rows or 'No options of its own.'}"
