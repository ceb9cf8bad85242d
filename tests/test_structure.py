"""One fact stands in one place: counts what the next kind of model, command or option would cost, from the source."""

import ast
import collections
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "embedtrain"
KINDS = ("dense", "dual_encoder", "cross_encoder", "late_interaction", "m3", "sparse")
REGISTRY = "config/kinds.py"  # the only file outside of kinds/ that names them

# The largest numbers that are allowed. Lower them when the source does; a change that needs a higher one is in the
# wrong place.
MAX_LINES_THAT_DECIDE_ON_A_KIND = 2
MAX_FILES_THAT_DECIDE_ON_A_KIND = 2
MAX_TABLES_OF_COMMANDS = 1
MAX_OPTIONS_WRITTEN_TWICE = 0
MAX_FOLDERS = 19
MAX_FILES = 353
MAX_LARGE_CLASSES = 0


@cache
def sources() -> dict[str, ast.Module]:
    """Each file of the package, by its path in it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def classes_of_kinds() -> set[str]:
    """The classes that are defined in kinds/."""
    trees = [tree for path, tree in sources().items() if path.startswith("kinds/")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def decisions(tree: ast.Module, own_classes: set[str]) -> Iterator[int]:
    """The lines that name a kind, ask for one of its classes, or import from its package."""
    annotated = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # docstrings
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in KINDS[1:] and id(node) not in annotated:
            yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value in KINDS for side in sides):
                yield node.lineno
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name == "ModelKind":
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            names = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
            if names & own_classes or ast.unparse(node.args[0]).endswith(".settings"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("embedtrain.kinds"):
            yield node.lineno


def test_kinds_are_named_in_their_packages_and_the_registry():
    own_classes = classes_of_kinds()
    lines = {
        path: sorted(set(decisions(tree, own_classes)))
        for path, tree in sources().items()
        if not path.startswith("kinds/") and path != REGISTRY
    }
    found = {path: numbers for path, numbers in lines.items() if numbers}
    total = sum(map(len, found.values()))
    listing = "\n".join(f"{path}: {numbers}" for path, numbers in found.items())
    assert total <= MAX_LINES_THAT_DECIDE_ON_A_KIND, f"{total} lines decide on a kind:\n{listing}"
    assert len(found) <= MAX_FILES_THAT_DECIDE_ON_A_KIND, f"{len(found)} files decide on a kind:\n{listing}"


def test_one_table_lists_the_commands():
    """A collection with several names of commands is a table of them."""
    from embedtrain.config.commands import COMMANDS

    tables = collections.Counter[str]()
    for path, tree in sources().items():
        if path == "__init__.py":  # the functions of the Python API
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                continue
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            names = {item.value for item in items if isinstance(item, ast.Constant)}
            calls = [item for item in items if isinstance(item, ast.Call) and item.args]
            names |= {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
            if len(names & set(COMMANDS)) >= 3:
                tables[path] += 1
    assert sum(tables.values()) <= MAX_TABLES_OF_COMMANDS, dict(tables)


def test_an_option_of_commands_is_written_once():
    """Several commands have an option of the same name and type from one class, which they inherit."""
    import typing

    from embedtrain.config.commands import COMMANDS
    from embedtrain.config.recipe import Recipe

    owners: dict[tuple[str, str], set[type]] = collections.defaultdict(set)
    for command in COMMANDS.values():
        options = command.option_class
        if options is Recipe:
            continue
        hints = typing.get_type_hints(options)
        for field in fields(options):
            owner = next(base for base in options.__mro__ if field.name in vars(base).get("__annotations__", {}))
            owners[field.name, str(hints[field.name])].add(owner)
    twice = {name: sorted(owner.__name__ for owner in found) for (name, _), found in owners.items() if len(found) > 1}
    assert len(twice) <= MAX_OPTIONS_WRITTEN_TWICE, twice


def test_the_package_is_small():
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    assert len(folders) <= MAX_FOLDERS, sorted(path.name for path in folders)
    assert len(sources()) <= MAX_FILES


def test_no_class_has_more_than_ten_fields():
    """Options, whose fields are what users write, may have more."""
    large = {}
    for path, tree in sources().items():
        if path.startswith("config/") or Path(path).name == "options.py":
            continue
        for node in ast.walk(tree):
            is_data = isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
            if is_data and not node.name.endswith(("Options", "Config")):
                count = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                if count > 10:
                    large[f"{path}: {node.name}"] = count
    assert len(large) <= MAX_LARGE_CLASSES, large
