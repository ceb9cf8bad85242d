"""Commands of the pages: which lines of a shell block start embedtrain, and what they compose."""

import ast
import importlib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.conftest import ROOT

_MODULE = re.compile(r"embedtrain(\.\w+)?$")
_ENDS = ("||", "&&", "|", ";", "&", ">", "2>&1")


@dataclass(frozen=True)
class Command:
    """A command: the module behind `-m`, what follows it, and whether the page expects it to fail."""

    module: str
    arguments: tuple[str, ...]
    may_fail: bool = False


def commands(shell: str) -> Iterator[Command]:
    """Every `python -m embedtrain...` of a shell's text, under torchrun or not; here-documents are left out."""
    text = re.sub(r"<<-?\s*'?(\w+)'?[^\n]*\n.*?^\s*\1$", "", shell, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        if "embedtrain" not in line:
            continue
        words = shlex.split(line, comments=True)
        for at, (flag, module) in enumerate(itertools.pairwise(words)):
            if flag == "-m" and _MODULE.match(module):
                ends = [place for place, word in enumerate(words) if place > at and word in _ENDS]
                end = min(ends, default=len(words))
                yield Command(module, tuple(words[at + 2 : end]), may_fail="||" in words[end : end + 1])
                break


def compose(command: Command) -> Any:
    """What the command's own compose function makes of its arguments."""
    return _composer(command.module)(list(command.arguments))


def _composer(module: str) -> Callable[[list[str]], Any]:
    """The first argument of the door's `enter(compose_..., act)`."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enter":
            name = node.args[0]
            assert isinstance(name, ast.Name), source
            return getattr(importlib.import_module(f"{module}.__main__" if path.is_dir() else module), name.id)  # type: ignore[no-any-return]
    raise AssertionError(f"{source} does not enter a door")
