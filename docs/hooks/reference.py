"""Writes tables into docs/reference/, docs/from-*.md and docs/install.md, and types into embedtrain/keywords.pyi.

    python docs/hooks/reference.py

The lines between `<!-- options: NAME -->` and `<!-- end -->` of a page are replaced by the tables of that dataclass and
of those within it. NAME is `Recipe.SECTION`, `TrainSource`, `EvaluationSet`, `VectorFormat`, `DataPath`,
`RerankerConfig`, `PipelineConfig`, `losses` or `commands.TOPIC`. `Recipe` is the options outside of sections, followed
by an index of the sections, and `commands` an index of the commands. The meaning of an option is its comment in the
source, read with tokenize. For `migration_LIBRARY` it is a table of `config/migration.py`, and for `extras` that of
pyproject.toml.
"""

import dataclasses
import importlib
import pkgutil
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import embedtrain
from embedtrain.config import migration
from embedtrain.config.code import is_code
from embedtrain.config.columns import DataPath
from embedtrain.config.command_options import RerankerConfig
from embedtrain.config.commands import COMMANDS, TOPICS, Command
from embedtrain.config.evaluation import EvaluationSet, VectorFormat
from embedtrain.config.help import Option, docstring_line, meaning, options_of, type_of
from embedtrain.config.kinds import Kind, kinds
from embedtrain.config.losses import LOSSES, InfoNCEConfig, LossConfig
from embedtrain.config.migration import Row
from embedtrain.config.options import info
from embedtrain.config.recipe import ModelConfig, Recipe, TrainSource
from embedtrain.pipeline.compose import PipelineConfig

PAGES = Path(__file__).resolve().parents[1] / "reference"
MIGRATION_PAGES = PAGES.parent
KEYWORDS = Path(embedtrain.__file__).with_name("keywords.pyi")

_KEYWORDS_HEAD = '''"""Types of the options of the Python functions, for editors and type checkers.

Written by docs/hooks/reference.py from the dataclasses of the options. It exists for type checkers alone.
"""

from os import PathLike
from typing import Any, Literal, TypedDict

from embedtrain.results import TrainResult
'''

_GENERATED = re.compile(r"(?<=^<!-- options: )([\w.]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
_LIBRARIES = {
    "FLAGEMBEDDING": "FlagEmbedding",
    "TEVATRON": "Tevatron",
    "OPEN_CLIP": "open_clip",
    "TRAINER": "arguments of the Trainer",
    "LOSSES": "loss class",
    "RERANKER_LOSSES": "loss class of a CrossEncoder",
    "EVALUATORS": "evaluator",
    "LOSS_ARGUMENTS": "argument of losses",
    "SENTENCE_TRANSFORMERS": "sentence-transformers",
}
_HEAD = "| option | meaning |\n| --- | --- |\n"


def main() -> None:
    """Write the pages, and the types of the keywords of the Python functions."""
    KEYWORDS.write_text(keyword_types(), encoding="utf-8")
    for page in pages():
        page.write_text(generate(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """The pages with generated tables."""
    return [*sorted(PAGES.glob("*.md")), *sorted(MIGRATION_PAGES.glob("from-*.md")), MIGRATION_PAGES / "install.md"]


def generate(markdown: str) -> str:
    """A page with its tables as the dataclasses define them now."""
    return _GENERATED.sub(lambda match: f"{match[1]}{match[2]}\n{section(match[1])}\n\n", markdown)


def section(name: str) -> str:
    """The generated text of one name.

    Raises:
        KeyError: there is no such name.
    """
    match name:
        case "losses":
            shared = tree(LossConfig, "loss.")
            return "\n\n".join([f"## Every loss\n\n{shared}", *map(_loss, LOSSES.values())])
        case "Recipe":
            return f"{table(Recipe, '')}\n\n## Sections\n\n{index_of_sections()}"
        case _ if name.startswith("Recipe."):
            return recipe_section(name.removeprefix("Recipe."))
        case "commands":
            return index_of_commands()
        case _ if name.startswith("commands."):
            topic = name.removeprefix("commands.")
            return "\n\n".join(_command(COMMANDS[each]) for each in commands() if COMMANDS[each].topic == topic)
        case "extras":
            return extras_table((PAGES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        case _ if name.startswith("migration_"):
            return migration_table(name.removeprefix("migration_"))
        case _:
            kind, anchor = {
                "TrainSource": (TrainSource, "data.train."),
                "EvaluationSet": (EvaluationSet, "evaluation.sets."),
                "VectorFormat": (VectorFormat, "evaluation.vectors."),
                "DataPath": (DataPath, "corpus."),
                "RerankerConfig": (RerankerConfig, "reranker."),
                "PipelineConfig": (PipelineConfig, "pipeline."),
            }[name]
            return tree(kind, "", anchor)


def recipe_section(name: str) -> str:
    """The options of a section of the recipe, such as `optim`; behind those of `model` are those of each kind."""
    (option,) = (option for option in options_of(Recipe) if option.name == name)
    parts = [f"## {name}\n\n{tree(inner, f'{name}.')}" for inner in option.classes if _has_a_table(inner)]
    if ModelConfig in option.classes:
        parts += map(_kind, kinds())
    return "\n\n".join(parts)


def index_of_sections() -> str:
    """A table of the sections of the recipe, each with a link to its options."""
    rows = []
    for option in options_of(Recipe):
        if LossConfig in option.classes:
            rows.append(f"| [`{option.name}`](losses.md) | The loss, chosen by `loss=NAME`. |")
        for inner in option.classes:
            if _has_a_table(inner):
                link = f"{_page_with(f'Recipe.{option.name}')}#{option.name}"
                rows.append(f"| [`{option.name}`]({link}) | {_cell(docstring_line(inner))} |")
    return "| section | options |\n| --- | --- |\n" + "\n".join(rows)


def index_of_commands() -> str:
    """A table of the commands of each topic, each with a link to its options."""
    parts = []
    for topic, title in TOPICS.items():
        rows = []
        for command in COMMANDS.values():
            if command.topic == topic:
                own = command.option_class is not Recipe
                link = f"{_page_with(f'commands.{topic}')}#{command.name}" if own else "recipe.md"
                rows.append(f"| [`{command.name}`]({link}) | {command.summary} |")
        parts.append(f"## {title}\n\n| command | what it does |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _page_with(name: str) -> str:
    """The file name of the page that has the options of this name."""
    (page,) = (page for page in PAGES.glob("*.md") if f"<!-- options: {name} -->" in page.read_text(encoding="utf-8"))
    return page.name


def _command(command: Command) -> str:
    """The heading, the purpose and the options of one command."""
    _, _, options = tree(command.option_class, "", f"{command.name}.").partition("\n\n")  # its docstring names it only
    return f"## {command.name}\n\n`embedtrain {command.name}`: {command.summary}.\n\n{options}"


def keyword_types() -> str:
    """The types of the options of each function of `embedtrain.api`, a TypedDict each, and of their groups."""
    from embedtrain import api  # imports torch

    functions = {
        "Train": (api.train, Recipe),
        "Encoder": (api.load_encoder, api.EncoderOptions),
        **{
            name.title(): (getattr(api, name), COMMANDS[name].option_class)
            for name in ("evaluate", "mine", "filter", "split", "search", "synthesize", "export")
        },
    }
    classes: dict[str, str] = {}
    for name, (function, kind) in functions.items():
        code = function.__code__
        _typed_dict(f"{name}Keywords", [kind], classes, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return "\n\n".join([_KEYWORDS_HEAD, *classes.values()]) + "\n"


def _typed_dict(name: str, of_kinds: list[type], classes: dict[str, str], left_out: tuple[str, ...] = ()) -> None:
    """Add the TypedDict of the options that these dataclasses have, and those of the groups in them."""
    assert name not in classes, f"two classes are called {name}"
    fields: dict[str, str] = {}
    for kind in of_kinds:
        hints = typing.get_type_hints(kind)
        for field, option in zip(dataclasses.fields(kind), options_of(kind), strict=True):
            if field.name not in left_out and field.name not in fields:
                text = _typed(hints[field.name], field, classes)
                about = meaning(option).replace("\\", "\\\\").replace('"', "'")
                fields[field.name] = (
                    f'    {field.name}: {text}\n    """{about}"""' if about else f"    {field.name}: {text}"
                )
    classes[name] = "\n".join([f"class {name}(TypedDict, total=False):", *fields.values()])


def _typed(hint: Any, field: "dataclasses.Field[Any]", classes: dict[str, str]) -> str:
    """The type of an option in Python. What may be code is a class or a function as well."""
    if is_code(field) or hint is Any or hint is LossConfig:
        return "Any"
    if hint is ModelConfig:
        _typed_dict("ModelGroup", [kind.options for kind in kinds()], classes)
        return "str | PathLike[str] | TrainResult | ModelGroup"
    if dataclasses.is_dataclass(hint):
        name = f"{re.sub('(Config|Options)$', '', hint.__name__)}Group"  # a function may have the name of a group
        if name not in classes:
            _typed_dict(name, [hint], classes)
        return name
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"Literal[{', '.join(repr(member.value) for member in hint)}]"
    arguments = [_typed(argument, field, classes) for argument in typing.get_args(hint)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join(arguments)
    if arguments:
        return f"{typing.get_origin(hint).__name__}[{', '.join(arguments)}]"
    if hint is types.NoneType:
        return "None"
    is_path = info(field).is_input or field.name.endswith("_dir")
    return "str | PathLike[str]" if hint is str and is_path else hint.__name__


def extras_table(project: str) -> str:
    """The extras in the text of a pyproject.toml, what their comments say they are for, and the packages they add."""
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    meanings = dict(re.findall(r"^([\w-]+) = \[.*\]  # (.+)$", project, re.MULTILINE))
    lines = []
    for name, requirements in extras.items():
        names = [re.split(r"[<>=]", requirement)[0] for requirement in requirements]
        packages = ", ".join(f"`{package}`" for package in names)
        lines.append(f"| `{name}` | {meanings[name]} | {packages if len(names) < 9 else 'those of `pyproject.toml`'} |")
    return "\n".join(["| extra | for | packages |", "| --- | --- | --- |", *lines])


def migration_table(library: str) -> str:
    """The table of the names of one library, such as `TRAINER`, and what embedtrain has instead."""
    rows: tuple[Row, ...] = getattr(migration, library)
    dashes = "--" if library in ("FLAGEMBEDDING", "TEVATRON", "OPEN_CLIP") else ""
    lines = [
        f"| {row.shown or ', '.join(f'`{dashes}{name}`' for name in row.names.split())} | {row.ours} |"
        for row in rows
        if row.shown or row.names
    ]
    return "\n".join([f"| {_LIBRARIES.get(library, library)} | embedtrain |", "| --- | --- |", *lines])


def commands() -> dict[str, type]:
    """The dataclass of the options of each command that has some of its own."""
    return {name: COMMANDS[name].option_class for name in COMMANDS if COMMANDS[name].option_class is not Recipe}


def option_dataclasses() -> Iterator[type]:
    """Every public dataclass of embedtrain/config and of the options of the commands."""
    for module_info in pkgutil.walk_packages(embedtrain.__path__, "embedtrain."):
        name = module_info.name
        if not (
            name.startswith("embedtrain.config.")
            or re.fullmatch(r"embedtrain\.(commands\.\w+(\.options)?|\w+\.options)", name)
        ):
            continue
        for kind in vars(importlib.import_module(name)).values():
            is_own = isinstance(kind, type) and kind.__module__ == name and not kind.__name__.startswith("_")
            if is_own and dataclasses.is_dataclass(kind):
                yield kind


def tree(kind: type, prefix: str, anchor: str = "") -> str:
    """The table of a dataclass, and below it those of its fields that are dataclasses.

    Args:
        kind: the dataclass.
        prefix: precedes the names of its fields, such as `model.`.
        anchor: precedes that in the anchors of a page with several dataclasses.
    """
    parts = [docstring_line(kind), table(kind, prefix, anchor)]
    for option in options_of(kind):
        name = f"{prefix}{option.name}"
        parts += [f"### {name}\n\n{tree(inner, f'{name}.', anchor)}" for inner in option.classes if _has_a_table(inner)]
    return "\n\n".join(part for part in parts if part)


def table(kind: type, prefix: str, anchor: str = "", *, without: type | None = None) -> str:
    """The options of one dataclass as a table, with an anchor for each.

    Args:
        kind: the dataclass.
        prefix: as in `tree`.
        anchor: as in `tree`.
        without: a dataclass whose fields are left out.
    """
    left_out = {field.name for field in dataclasses.fields(without)} if without else set()
    rows = [
        row(option, prefix, anchor)
        for option in options_of(kind)
        if option.name not in left_out and not any(map(_has_a_table, option.classes))
    ]
    return _HEAD + "\n".join(rows) if rows else ""


def row(option: Option, prefix: str, anchor: str) -> str:
    """One option as a row of its table."""
    name = f"{prefix}{option.name}"
    span = f'<span id="{anchor or "option."}{name}" class="option">`{name}`</span>'
    limits = f", {option.info.limits}" if option.info.limits else ""
    return f"| {span}<br>{_cell(_code(type_of(option)) + limits + _default_of(option))} | {_cell(meaning(option))} |"


def _kind(kind: Kind) -> str:
    """The options that one kind of model adds to those of all."""
    options = kind.options
    nested = [f for f in options_of(options) if f.name in kind.own_options and any(map(_has_a_table, f.classes))]
    owners = [name for other in kinds() for name in other.own_options]

    def written(name: str, inner: type) -> str:
        anchor = f"{kind.name}." if owners.count(name) > 1 else ""  # other kinds have a section of this name
        return f"### model.{name}\n\n{tree(inner, f'model.{name}.', anchor)}"

    trees = [written(option.name, inner) for option in nested for inner in option.classes]
    heading = f"### model.kind={kind.name}\n\n{docstring_line(options)}"
    return "\n\n".join([heading, table(options, "model.", f"{kind.name}.", without=ModelConfig), *trees])


def _default_of(option: Option) -> str:
    if LossConfig in option.classes:
        return f", default {_code(InfoNCEConfig.name)}"
    return f", default {_code(option.default)}" if option.default else ", required"


def _has_a_table(kind: type) -> bool:
    """Whether a field of this class has a heading and a table of its own."""
    return dataclasses.is_dataclass(kind) and kind is not LossConfig


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """Text in a cell of a table. GitHub wants bars escaped, also in code."""
    return text.replace("|", "\\|")


def _loss(kind: type[LossConfig]) -> str:
    rows = table(kind, "loss.", f"{kind.name}.", without=LossConfig)
    return f"## {kind.name}\n\n{docstring_line(kind)}\n\n{rows or 'No options of its own.'}"


if __name__ == "__main__":
    main()
