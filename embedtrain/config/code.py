"""Code that an option names as `module:name`: a loss, an evaluation function.

Recipes, checkpoints and model directories come from others, so none of them can name code that is run: whoever starts
a run names it, on the command line or in Python.
"""

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString

from embedtrain.config.losses import CombinedConfig, CustomConfig, LossConfig
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError

_PATH = re.compile(r"\w+(\.\w+)*:[\w.<>]+")
_registered: dict[str, Callable[..., Any]] = {}  # of this program, by path


def is_code_path(path: str) -> bool:
    """Whether a text has the form `module:name`."""
    return _PATH.fullmatch(path) is not None


def register_code(code: Callable[..., Any]) -> str:
    """The path of a class or function of this program, such as a cell of a notebook; `load_code` returns it."""
    path = f"{code.__module__}:{code.__qualname__}"
    _registered[path] = code
    return path


def load_code(path: str, option: str) -> Any:
    """Import what a path names, from sys.path and the working directory. Raises a ConfigError if that fails."""
    if path in _registered:
        return _registered[path]
    module, _, name = path.partition(":")
    folder = str(Path.cwd())
    sys.path.append(folder)  # last: it hides no installed module
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{option}={path}: {error}; write module:name, of a module in {folder} or installed"
        ) from error
    except Exception as error:
        raise ConfigError(f"{option}={path}: importing {module} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    return value


def require_named_code(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe itself; a ConfigError if it names code that the overrides, which the user wrote, do not name."""
    paths = list(code_paths(recipe))
    parsed = OverridesParser.create().parse_overrides(list(overrides)) if paths else []
    for option, path in paths:
        values = [
            override.value() for override in parsed if re.match(rf"{re.escape(override.key_or_group)}(\W|$)", option)
        ]
        if path not in itertools.chain.from_iterable(map(_texts, values)):
            raise ConfigError(
                f"{option}={path}: a recipe cannot name code to run; if you trust it, name it yourself: write "
                f"{option}={path} on the command line"
            )
    return recipe


def code_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The options of a recipe that name code, and their values."""
    yield from _loss_paths(recipe.loss, "loss")
    for index, source in enumerate(recipe.data.train):
        if isinstance(source.loss, LossConfig):
            yield from _loss_paths(source.loss, f"data.train[{index}].loss")
    if recipe.evaluation.function is not None:
        yield "evaluation.function", recipe.evaluation.function


def _loss_paths(loss: LossConfig, option: str) -> Iterator[tuple[str, str]]:
    if isinstance(loss, CustomConfig):
        yield f"{option}.path", loss.path
    elif isinstance(loss, CombinedConfig):
        for index, part in enumerate(loss.losses):
            yield from _loss_paths(part, f"{option}.losses[{index}]")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of an override."""
    match value:
        case QuotedString():
            yield value.text
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for item in value.values():
                yield from _texts(item)
        case ChoiceSweep():
            yield from _texts(value.list)
