"""Which checks of a module a test makes fail, so that no check is without a case."""

import ast
import traceback
from pathlib import Path
from types import ModuleType

Line = tuple[str, int]


def all_checks(*modules: ModuleType) -> set[Line]:
    """File and line of every call of a method of `OptionChecks`, and of every `raise`, in the modules."""
    lines = set()
    for module in modules:
        path = str(module.__file__)
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.cause is None:
                lines.add((path, node.lineno))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                holder = node.func.value
                name = holder.func if isinstance(holder, ast.Call) else holder
                if isinstance(name, ast.Name) and name.id in ("check", "OptionChecks"):
                    lines.add((path, node.lineno))
    return lines


def failed_check(error: BaseException, *modules: ModuleType) -> Line:
    """File and line of the check in one of the modules that raised the error."""
    paths = [str(module.__file__) for module in modules]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in paths]
    return frames[-1].filename, frames[-1].lineno or 0
