"""The arrows between the rooms run one way, read off the source of every file."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "embedtrain"
UPPER = {"training", "evaluation", "checkpoint", "tracking"}
MIDDLE = {"planning"}
LOWER = {"losses", "models", "data", "distributed"}
GROUND = {"config", "errors"}
# room -> the rooms it may import besides itself, `config` and `errors`.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "data": set(),
    "models": {"data.types"},  # Tokens are what an encoder is called with
    "losses": {"distributed.collectives"},
    "distributed": LOWER,
    "planning": {"models", "losses", "distributed"},
    "launch": set(),  # runs where torch may not be installed
    "health": LOWER,
    "training": UPPER | MIDDLE | LOWER,
    "evaluation": UPPER | MIDDLE | LOWER,
    "checkpoint": UPPER | MIDDLE | LOWER,
    "tracking": UPPER | MIDDLE | LOWER,
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_modules(path: Path) -> set[str]:
    """Modules of embedtrain that a file imports: `config.schema`, `errors`, `train`, ..."""
    found = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "embedtrain" or len(parts) < 2:
            continue
        module = ".".join(parts[1:])
        while module and not ((PACKAGE / f"{module.replace('.', '/')}.py").is_file() or is_room(module)):
            module = module.rpartition(".")[0]
        if module:  # else a name of the package itself, such as __version__
            found.add(module)
    return found


def is_room(module: str) -> bool:
    return (PACKAGE / module.replace(".", "/") / "__init__.py").is_file()


def room_of(path: Path) -> str | None:
    """The folder a file lies in; `errors` for errors.py; None for a door."""
    parts = path.relative_to(PACKAGE).parts
    if len(parts) > 1:
        return parts[0]
    return "errors" if parts[0] == "errors.py" else None


def test_every_room_has_its_rule():
    assert {room for path in files() if (room := room_of(path))} <= set(ALLOWED)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_one_way(path):
    room = room_of(path)
    if room is None:
        return  # a door may import anything
    allowed = ALLOWED[room] | GROUND | {room}
    wrong = {
        module
        for module in own_modules(path)
        if not any(module == place or module.startswith(f"{place}.") for place in allowed)
    }
    assert not wrong, f"{room} must not import {sorted(wrong)}"


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("config", ("torch", "transformers", "datasets")),
        ("launch", ("torch", "transformers", "datasets")),
        ("data", ("transformers.AutoModel", "torch.nn", "torch.distributed", "sentence_transformers")),
        ("losses", ("transformers", "sentence_transformers")),
        ("models", ("torch.distributed",)),
    ],
)
def test_what_a_room_does_not_know(room, never):
    for path in (PACKAGE / room).rglob("*.py"):
        if path.name in ("sentence_transformers.py", "their_classes.py"):
            continue  # whose purpose it is to know their classes
        for name in imported(path):
            assert not any(name == bad or name.startswith(f"{bad}.") for bad in never), f"{path} imports {name}"


def test_no_file_imports_a_door_and_none_is_cyclic():
    """A door may be run by another (`__main__` runs train), but a room never reaches up to one."""
    doors = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "errors"}
    for path in files():
        if room_of(path) is not None:
            assert not own_modules(path) & doors
