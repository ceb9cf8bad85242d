"""The gate for options that make code run: `module:name` of a loss or an evaluation function, and trust in a model.

Recipes, pipelines, checkpoints and model directories come from others, so none of them can name code that is run, or
trust a model: whoever starts a command says so, on the command line or in Python. `code_option` marks such options.
"""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from embedtrain.config.validation import written
from embedtrain.errors import ConfigError

Options = TypeVar("Options")

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PATH = re.compile(r"\w+(\.\w+)*:[\w.<>]+")
_RUNS_CODE = "runs_code"  # metadata of a field: names of the options with models whose code it allows
_NAMES = "names"  # metadata of a field: values that name no code
_RUNS = ("run", "adapters")  # options that are never ids of the Hub
_TRUE = ("true", "yes", "on", "y", "1")  # as OmegaConf reads them, in lower case
_registered: dict[str, Callable[..., Any]] = {}  # of this program, by path
_named: set[str] = set()  # paths that a command line of this process has named


def code_option(default: Any, *models: str, names: Iterable[str] = ()) -> Any:
    """A field whose value can make code run: a path `module:name`, or true for the code of models.

    Args:
        default: its default, which runs none.
        models: fields of the same dataclass, as far as it has them, that choose the models whose code true allows:
            their paths, and what else chooses their code, such as a revision.
        names: all values that are no path, such as the modes of the package; they make no code run.
    """
    return field(default=default, metadata={_RUNS_CODE: models, _NAMES: tuple(names)})


def names_of(of_field: "Field[Any]") -> tuple[str, ...]:
    """The values that an option has besides paths `module:name`, as `code_option` declares them."""
    names: tuple[str, ...] = of_field.metadata.get(_NAMES, ())
    return names


def is_code(of_field: "Field[Any]") -> bool:
    """Whether `code_option` has made a field."""
    return _RUNS_CODE in of_field.metadata


def is_code_path(path: str) -> bool:
    """Whether a text has the form `module:name`."""
    return _PATH.fullmatch(path) is not None


def register_code(code: Callable[..., Any]) -> str:
    """The path of a class or function of this program, such as a cell of a notebook; `load_code` returns it."""
    path = f"{code.__module__}:{code.__qualname__}"
    _registered[path] = code
    return path


def is_own_code(kind: type) -> bool:
    """Whether a class is one of a user's module, not of the package."""
    return kind.__module__.partition(".")[0] != "embedtrain"


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


def load_named_code(path: str, option: str) -> Any:
    """The same, of a path that may come from a file; a ConfigError unless the user has named it as well."""
    if path not in _registered and path not in _named:
        raise ConfigError(
            f"{option}={path}: a file cannot name code to run; if you trust it, name it yourself: write "
            f"{option}={path} on the command line"
        )
    return load_code(path, option)


@dataclass(frozen=True, slots=True)
class CodeOption:
    """An option that makes code run, and its value."""

    name: str  # in full, such as data.train[0].loss.path
    value: Any
    names: tuple[str, ...]  # values that make no code run
    models: Mapping[str, Any]  # options that choose the code that it allows, by full name, as far as they are set


def code_options(options: Any, prefix: str = "") -> Iterator[CodeOption]:
    """The options of a dataclass tree that make code run and are set."""
    for option in fields(options):
        value, name = getattr(options, option.name), f"{prefix}{option.name}"
        if _RUNS_CODE in option.metadata:
            if value and value not in names_of(option):
                others = {other.name for other in fields(options)}
                models = {other: getattr(options, other) for other in option.metadata[_RUNS_CODE] if other in others}
                chosen = {f"{prefix}{other}": model for other, model in models.items() if model}
                yield CodeOption(name, value, names_of(option), chosen)
        elif is_dataclass(value):
            yield from code_options(value, f"{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if is_dataclass(item):
                    yield from code_options(item, f"{name}[{index}].")


@dataclass(frozen=True)
class UserOptions:
    """What the user wrote on the command line or in Python.

    Attributes:
        values: texts, numbers and booleans by full name: {"data.train[0].loss.path": "losses:Mine"}.
        prefix: precedes the names of options on the command line: `stages.weak.` for those of a stage.
        outputs: results of earlier stages of a pipeline. Such a model is its own and not named by a file.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    outputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, overrides: Sequence[str]) -> "UserOptions":
        """Those of a command line, which Hydra can parse."""
        values: dict[str, Any] = {}
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            values |= _leaves(override.key_or_group, override.value())
        return cls(values)

    def of_stage(self, origins: Sequence[str], outputs: Iterable[str]) -> "UserOptions":
        """Those that end up in one stage: what was written below `origins`, such as stages.a and stages.a.each.b."""
        values = {
            name.removeprefix(f"{origin}."): value
            for origin in origins
            for name, value in self.values.items()
            if name.startswith(f"{origin}.")
        }
        return UserOptions(values, f"{origins[0]}.", frozenset(map(os.path.abspath, outputs)))

    def wrote(self, name: str, value: Any) -> bool:
        """Whether this option has this value because the user wrote exactly that, and all of it."""
        return all(_is_same(self.values.get(leaf), item) for leaf, item in _leaves(name, value).items())

    def is_output(self, value: Any) -> bool:
        """Whether this is the path of a result of the pipeline, or a list of such paths."""
        items = value if isinstance(value, list) else [value]
        return all(isinstance(item, str) and os.path.abspath(item) in self.outputs for item in items)


_OF_STAGE: ContextVar[UserOptions | None] = ContextVar("user_options_of_stage", default=None)


@contextlib.contextmanager
def composing_stage(user: UserOptions) -> Iterator[None]:
    """Within the block, the arguments that are composed come from the file of a pipeline: only `user` is the user's."""
    token = _OF_STAGE.set(user)
    try:
        yield
    finally:
        _OF_STAGE.reset(token)


def names_code(option: str, path: Any, overrides: Sequence[str]) -> bool:
    """Whether a value is a path `module:name`, and the user, not a file, has given the option this value."""
    if not isinstance(path, str) or not is_code_path(path):
        return False
    return (_OF_STAGE.get() or UserOptions.of(overrides)).wrote(option, path)


def require_named_code(options: Options, overrides: Sequence[str]) -> Options:
    """The options themselves; a ConfigError if they make code run that the user has not named.

    `overrides` are the user's command line, except for a stage of a pipeline, whose arguments its file has written.
    """
    running = list(code_options(options))
    if not running:
        return options
    user = _OF_STAGE.get() or UserOptions.of(overrides)
    # A source inherits the class of the recipe's loss, so a path counts wherever it is used.
    paths = [
        option.value for option in running if isinstance(option.value, str) and user.wrote(option.name, option.value)
    ]
    for option in running:
        if option.value not in paths and not user.wrote(option.name, option.value):
            what = "trust the code of a model" if option.value is True else "name code to run"
            missing = {option.name: option.value, **_not_named(option, user)}
            raise ConfigError(
                f"{option.name}={written(option.value)}: a file cannot {what}; if you trust it, name it yourself: "
                f"write {_command_line(missing, user.prefix)} on the command line"
            )
        for name, model in _not_named(option, user).items():
            raise ConfigError(
                f"{name}={written(model)}: a file names it, and {option.name}=true would run its code; if you trust "
                f"it, name it yourself: write {_command_line({name: model}, user.prefix)} on the command line"
            )
        for name, model in option.models.items():
            if name not in _RUNS:
                _require_no_namesake(f"{user.prefix}{name}", model)
    _named.update(paths)
    return options


def require_named_path(name: str, value: Any, user: UserOptions) -> None:
    """Raise ConfigError for a path `module:name` that the user has not named; other values name no code."""
    if isinstance(value, str) and is_code_path(value) and not user.wrote(name, value):
        raise ConfigError(
            f"{name}={value}: a file cannot name code to run; if you trust it, name it yourself: write "
            f"{_command_line({name: value}, user.prefix)} on the command line"
        )


def _require_no_namesake(name: str, model: Any) -> None:
    """Raise ConfigError for an id of the Hub that is also a folder here: it may hold data of others, and their code."""
    for leaf, text in _leaves(name, model).items():
        if isinstance(text, str) and _HUB_ID.fullmatch(text) and os.path.isdir(text):
            raise ConfigError(
                f"{leaf}={text}: has the form of a Hub id and is a folder in {Path.cwd()}, whose code would run: "
                f"write ./{text} for the folder, or start the command elsewhere for the model of the Hub"
            )


def _not_named(option: CodeOption, user: UserOptions) -> dict[str, Any]:
    """The options of models whose code it allows, and that the user has not written."""
    return {n: model for n, model in option.models.items() if not user.wrote(n, model) and not user.is_output(model)}


def _command_line(options: Mapping[str, Any], prefix: str) -> str:
    """Options as they are written on the command line, where an element of a list is written with the whole list."""
    return " ".join(
        f"{prefix}{name.partition('[')[0]}={'[...]' if '[' in name else written(value)}"
        for name, value in options.items()
    )


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """The texts, numbers and booleans of a value, by full name."""
    match value:
        case QuotedString():
            return {name: value.text}
        case Mapping():
            return {leaf: item for key in value for leaf, item in _leaves(f"{name}.{key}", value[key]).items()}
        case list() | tuple():
            return {
                leaf: item for i, element in enumerate(value) for leaf, item in _leaves(f"{name}[{i}]", element).items()
            }
        case _:
            return {name: value}


def _is_same(written: Any, value: Any) -> bool:
    """Whether OmegaConf makes a value of what was written, which may be of another type; never of an interpolation."""
    if written is None or "${" in str(written):
        return written is value
    return str(written).lower() in _TRUE if value is True else str(written) == str(value)
