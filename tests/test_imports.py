"""Imports follow one total order of packages and form no cycle, read from the source of every file."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "embedtrain"
# A package imports those below it, never those above it; a command imports no other command.
ORDER = (
    "__init__",
    "__main__",
    ("api", "testing"),
    "results",
    "commands",
    "cli",
    "pipeline",
    "training",
    ("evaluation", "mining"),
    "kinds",  # of which lower packages get what they need by `config.kinds`
    "inference",
    "planning",
    "formats",
    "checkpoint",
    "report",
    "tracking",
    "models",
    "losses",
    "data",
    "distributed",
    "config",
    "utils",
    "errors",
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in ((names,) if isinstance(names, str) else names)}
# Stricter than the order: what a package imports of embedtrain besides itself, the recipe and what lies below it.
NARROW = {
    "models": {"data.types"},
    "losses": {"distributed.collectives"},
}
GROUND = ("config", "utils", "errors")
FORBIDDEN = [
    ("config", ("torch", "transformers", "datasets")),
    ("commands/submit", ("torch", "transformers", "datasets")),
    ("commands/split", ("torch", "transformers", "datasets")),
    ("data", ("transformers.AutoModel", "torch.nn", "torch.distributed", "sentence_transformers")),
    ("losses", ("transformers", "sentence_transformers")),
    ("models", ("torch.distributed",)),
]
# The files whose purpose is to use the classes of sentence-transformers.
ADAPTERS = ("sentence_transformers.py",)


def module_name(path: Path) -> str:
    """`training.loop` for embedtrain/training/loop.py; a package is named without `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere when it runs, also inside functions; not what only types need."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_modules(path: Path) -> set[str]:
    """Modules of embedtrain that a file imports: `config.recipe`, `errors`, ..."""
    modules = set()
    for name in imported(path):
        module = name.removeprefix("embedtrain.")
        if module == name:
            continue
        while module and module not in MODULES:
            module = module.rpartition(".")[0]
        if module:  # else a name of the package itself, such as __version__
            modules.add(module)
    return modules


GRAPH = {module: own_modules(path) - {module} for module, path in MODULES.items()}


def package_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_order_of_packages(module):
    package = package_of(module)
    above = {
        other for other in GRAPH[module] if package_of(other) != package and RANK[package_of(other)] <= RANK[package]
    }
    assert not above, f"{module} imports {sorted(above)}, which come before {package} in ORDER"
    if package in NARROW:
        others = {other for other in GRAPH[module] if package_of(other) not in (package, *GROUND)}
        assert others <= NARROW[package], f"{package} may import {sorted(NARROW[package])} only"


def test_no_modules_import_each_other():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(("package", "never"), FORBIDDEN)
def test_packages_without_a_library(package, never):
    for path in (PACKAGE / package).rglob("*.py"):
        if path.name in ADAPTERS:
            continue
        for name in imported(path):
            assert not any(name == bad or name.startswith(f"{bad}.") for bad in never), f"{path} imports {name}"
