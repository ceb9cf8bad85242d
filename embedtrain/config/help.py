"""What `--help`, `help()` and the reference print of options: their comments, types and defaults, read with tokenize.

Without a topic it is one screen for a command, with one the options of a group or a single one.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import re
import shutil
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.names import suggest
from embedtrain.config.options import OptionInfo, info
from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Option:
    """One field.

    Attributes:
        name: its name.
        annotation: its type as the source has it.
        classes: the enums and dataclasses in the type.
        default: as YAML; empty if there is none.
        comment: its meaning.
        info: what it declares.
    """

    name: str
    annotation: str
    classes: tuple[type, ...]
    default: str
    comment: str
    info: OptionInfo


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
        Option(
            name=field.name,
            annotation=written[field.name],
            classes=_classes(hints[field.name]),
            default=_default(field),
            comment=comments[field.name],
            info=info(field),
        )
        for field in dataclasses.fields(kind)
    ]


def comments_of(kind: type) -> dict[str, str]:
    """The comment of each field or enum member: on its own lines, or on the lines directly above."""
    inline, alone, _ = _parsed(_source(kind))
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
    (body,) = (node.body for node in _parsed(_source(kind))[2] if node.name == kind.__name__)
    return [node for node in body if isinstance(node, ast.AnnAssign | ast.Assign)]


def _source(kind: type) -> str:
    return Path(typing.cast(str, sys.modules[kind.__module__].__file__)).read_text(encoding="utf-8")


# Kept, because a file has many classes: to parse it for each of them took most of the time of `--help`.
@functools.cache
def _parsed(source: str) -> tuple[dict[int, str], dict[int, str], list[ast.ClassDef]]:
    """The comments behind code and those on lines of their own, by line; the classes."""
    inline, alone = dict[int, str](), dict[int, str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            whole_line = token.line.strip() == token.string
            (alone if whole_line else inline)[token.start[0]] = token.string.lstrip("# ").strip()
    return inline, alone, [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


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


def python_options(kind: type, left_out: Iterable[str] = ()) -> str:
    """The options of a dataclass and of the groups in it, as a docstring has them: type, default and meaning.

    Those of the names `left_out` are not among them, as those that a function has as parameters of its own.
    """
    lines = []
    for name, option, value in _python_options(kind, ""):
        if name.partition(".")[0] not in left_out:
            lines.append(f"{name}: {_python_type(option)} = {value!r}")
            if text := meaning(option).replace("`", ""):
                lines.append(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def keywords(kind: type, left_out: Iterable[str] = ()) -> list[inspect.Parameter]:
    """The options of a dataclass as parameters; that of a group is a mapping, by default without options."""
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if is_dataclass(value) else _plain_default(value),
            annotation=_python_type(option),
        )
        for option, value in _with_defaults(kind)
        if option.name not in left_out
    ]


def _with_defaults(kind: type) -> Iterator[tuple[Option, Any]]:
    try:
        instance: Any = kind()
    except TypeError:  # an option without a default
        instance = None
    return ((option, getattr(instance, option.name, None)) for option in options_of(kind))


def _python_options(kind: type, prefix: str) -> Iterator[tuple[str, Option, Any]]:
    for option, value in _with_defaults(kind):
        if is_dataclass(value):
            yield from _python_options(type(value), f"{prefix}{option.name}.")
        else:
            yield f"{prefix}{option.name}", option, _plain_default(value)


def _plain_default(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain_default(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _python_type(option: Option) -> str:
    """The type as Python writes it; of an enum its values."""
    text = option.annotation
    for kind in option.classes:
        if issubclass(kind, Enum):
            text = text.replace(kind.__name__, " | ".join(repr(member.value) for member in kind))
        elif is_dataclass(kind):
            text = text.replace(kind.__name__, "dict")
    return text


ALL = "all"
_MAX_WIDTH, _MIN_WIDTH = 100, 40
_LISTED = re.compile(r"\{options: (.*?)\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An option under its full name, with its value in this command."""

    name: str
    option: Option
    value: str


def render_help(help_text: str, kind: type, values: Mapping[str, Any], topic: str = "") -> str:
    """The page of a command, or that of a topic.

    Args:
        help_text: the page; `{options: a! b}` stands for lines about the options `a`, which is required, and `b`.
        kind: the dataclass of the command's options.
        values: their values, with enums as text.
        topic: a group, an option, or `all`.

    Raises:
        ConfigError: there is no such topic.
    """
    entries = list(_entries(kind, values, ""))
    if topic:
        return _topic(topic, entries, kind)
    page = _LISTED.sub(lambda match: _listed(match[1].split(), entries), help_text)
    groups = dict.fromkeys(entry.name.partition(".")[0] for entry in entries if "." in entry.name)
    of_group = f"a group ({', '.join(groups)}) or " if groups else ""
    footer = f"--help TOPIC: {of_group}an option; --help all: all options"
    return f"{page.rstrip()}\n\n{_wrap(footer, '')}\n"


def _entries(kind: type, values: Mapping[str, Any], prefix: str) -> Iterator[_Entry]:
    for option in options_of(kind):
        value = values.get(option.name)
        inner = _group(option, value)
        if inner is not None and isinstance(value, Mapping):
            yield from _entries(inner, value, f"{prefix}{option.name}.")
        else:
            yield _Entry(f"{prefix}{option.name}", option, _as_yaml(value))


def _group(option: Option, value: Any) -> type | None:
    """The dataclass of an option that is a group of options; None for a single value and for a list."""
    for kind in option.classes:
        if kind is LossConfig and isinstance(value, Mapping):
            return LOSSES.get(str(value.get("name")), LossConfig)
        if kind is ModelConfig and isinstance(value, Mapping):
            of_kind: type = load_kind(str(value.get("kind"))).options
            return of_kind
        if is_dataclass(kind) and isinstance(value, Mapping):
            return kind
    return None


def _topic(topic: str, entries: list[_Entry], kind: type) -> str:
    if topic == ALL:
        return "\n".join(_explained(entry) for entry in entries) + "\n"
    chosen = [entry for entry in entries if entry.name == topic or entry.name.startswith(f"{topic}.")]
    chosen = chosen or [entry for entry in entries if entry.name.rpartition(".")[2] == topic]
    if not chosen:
        names = [entry.name for entry in entries]
        topics = list(dict.fromkeys(part for name in names for part in (name, name.rpartition(".")[0]) if part))
        if suggestion := suggest(topic, kind):  # the name of another library, or an option that is elsewhere
            first = re.search(r"[\w.]+", suggestion.removeprefix("write "))
            if first is not None and (ours := first[0].rstrip(".")) in topics:
                raise ConfigError(f"{topic} is {ours} here: --help {ours}")
            raise ConfigError(f"--help {topic}: {suggestion}")
        close = difflib.get_close_matches(topic, [*topics, *(name.rpartition(".")[2] for name in names)], n=1)
        hint = f", did you mean {close[0]}?" if close else "."
        groups = dict.fromkeys(name.partition(".")[0] for name in names)
        raise ConfigError(f"--help {topic}: there is no such topic{hint} Topics are all, {', '.join(groups)}")
    lines = [_explained(entry) for entry in chosen]
    for entry in chosen:
        item = entry.option.info.items
        if item is not None:
            lines.append(f"\nOptions of each item of {entry.name}. {docstring_line(item)}\n")
            lines += [
                _explained(_Entry(option.name, option, option.default or "(required)")) for option in options_of(item)
            ]
    return "\n".join(lines) + "\n"


def _explained(entry: _Entry) -> str:
    """An option with its value, and below it its meaning and its type."""
    text = meaning(entry.option)
    kinds = ", ".join(filter(None, (type_of(entry.option), entry.option.info.limits)))
    described = f"{text.rstrip('.')} ({kinds})" if text else kinds
    return f"{entry.name}={entry.value}\n{_wrap(described.replace('`', ''), '    ')}"


def _listed(words: list[str], entries: list[_Entry]) -> str:
    """A line for each option: name and value, and the beginning of its meaning."""
    by_name = {entry.name: entry for entry in entries}
    heads, texts = [], []
    for word in words:
        entry = by_name[word.rstrip("!")]
        is_required = word.endswith("!")
        heads.append(f"{entry.name}={'...' if is_required and entry.value in _EMPTY else entry.value}")
        texts.append(("required: " if is_required else "") + _beginning(entry.option))
    width = min(34, max(map(len, heads)))
    lines = []
    for head, text in zip(heads, texts, strict=True):
        indent = max(width, len(head)) + 4
        lines.append(f"  {head:<{width}}  {textwrap.shorten(text, max(20, 80 - indent), placeholder=' ...')}")
    return "\n".join(lines)


_EMPTY = ("", '""', "null", "[]")


def _beginning(option: Option) -> str:
    """The comment; for an enum without one its values."""
    text = option.comment or " | ".join(
        str(member.value) for kind in option.classes if issubclass(kind, Enum) for member in kind
    )
    return text.replace("`", "")


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1_000_000, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return '""' if text == "''" else text


def _wrap(text: str, indent: str) -> str:
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns))
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
