"""One idiom for checks of options: a check that fails raises the option, its value and what is allowed.

Paths that earlier stages of a pipeline will write count as present.
"""

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any

from embedtrain.errors import ConfigError

MAX_SEED = 2**63 - 1
TEXT_ALONE = "{text}"  # the instruction_format of rows whose instructions are not used
# That earlier stages of a pipeline will write; None outside of the composition of a stage.
_DIRECTORIES: ContextVar[tuple[Path, ...] | None] = ContextVar("expected_directories", default=None)


# How the command that runs names options of the model: by their names in `model`, and what precedes the others.
_MODEL_OPTIONS: ContextVar[tuple[Mapping[str, str], str]] = ContextVar("model_options", default=({}, "model."))


def model_option(name: str) -> str:
    """An option of the model as the user writes it: `model.pooling` in a recipe, `pooling` of a command."""
    names, prefix = _MODEL_OPTIONS.get()
    return names.get(name, f"{prefix}{name}")


@contextlib.contextmanager
def model_options_named(names: Mapping[str, str], prefix: str = "model.") -> Iterator[None]:
    """Within the block `model_option` gives these names, and the others with `prefix`."""
    token = _MODEL_OPTIONS.set((names, prefix))
    try:
        yield
    finally:
        _MODEL_OPTIONS.reset(token)


@contextlib.contextmanager
def tower_options_named(role: str) -> Iterator[None]:
    """Within the block `model_option` gives the options of the tower `role`, as `model.query.max_length` of a recipe.

    A command has one option for both towers, and keeps its names.
    """
    names, prefix = _MODEL_OPTIONS.get()
    with model_options_named(names, prefix if names else f"{prefix}{role}."):
        yield


class OptionChecks:
    """Checks of the fields of one dataclass; `prefix`, such as `train.`, precedes their names in messages.

    Numbers that are None pass: null stands for a default. NaN and infinity never pass.
    """

    def __init__(self, options: Any, prefix: str = "") -> None:
        self.options, self._prefix = options, prefix

    def require(self, condition: bool, name: str, message: str) -> None:
        """Raise a ConfigError `name=value: message` unless the condition holds."""
        if not condition:
            full = f"{self._prefix}{name}"
            full = model_option(full.removeprefix("model.")) if full.startswith("model.") else full
            raise ConfigError(f"{full}={written(getattr(self.options, name))}: {message}")

    def at_least(self, minimum: float, name: str, hint: str = "") -> None:
        """Require a number that is `minimum` or larger."""
        self._number(name, lambda value: value >= minimum, f"must be at least {minimum}", hint)

    def number(self, name: str, hint: str = "") -> None:
        """Require a finite number."""
        self._number(name, lambda _: True, "must be a number", hint)

    def above(self, minimum: float, name: str, hint: str = "") -> None:
        """Require a number above `minimum`."""
        self._number(name, lambda value: value > minimum, f"must be above {minimum}", hint)

    def at_most(self, maximum: float, name: str, hint: str = "") -> None:
        """Require a number that is `maximum` or smaller."""
        self._number(name, lambda value: value <= maximum, f"must be at most {maximum}", hint)

    def below(self, maximum: float, name: str, hint: str = "") -> None:
        """Require a number below `maximum`."""
        self._number(name, lambda value: value < maximum, f"must be below {maximum}", hint)

    def positive(self, name: str, hint: str = "") -> None:
        """Require a number above 0."""
        self.above(0, name, hint)

    def within(self, minimum: float, maximum: float, name: str, hint: str = "") -> None:
        """Require a number from `minimum` to `maximum`."""
        self._number(name, lambda value: minimum <= value <= maximum, f"must be from {minimum} to {maximum}", hint)

    def _number(self, name: str, is_allowed: Callable[[float], bool], message: str, hint: str) -> None:
        value = getattr(self.options, name)
        holds = value is None or (is_allowed(value) and math.isfinite(value))
        self.require(holds, name, f"{message}; {hint}" if hint else message)

    def length(self, name: str) -> None:
        """Require a maximum length in tokens that leaves room for text."""
        self.at_least(3, name, "two of them are special tokens")

    def instruction_format(self) -> None:
        """Require `{instruction}` and then `{text}` in `instruction_format`, each once, or `{text}` alone."""
        if self.options.instruction_format in (None, TEXT_ALONE):
            return
        before, marker, after = self.options.instruction_format.partition("{instruction}")
        self.require(
            bool(marker) and "{text}" not in before and after.count("{text}") == 1 and "{instruction}" not in after,
            "instruction_format",
            'must have {instruction} and then {text}, each once, such as "Instruct: {instruction}\\nQuery: {text}"; '
            f'"{TEXT_ALONE}" leaves the instructions of rows out',
        )


def written(value: Any) -> str:
    """A value as the user writes it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    text = str(value)
    return text if text and text.isprintable() else repr(text)


def did_you_mean(name: str, allowed: Sequence[str], *, cutoff: float = 0.6) -> str:
    """`, did you mean X?` with the nearest of the allowed names; a full stop if none is near."""
    lowercase = {candidate.lower(): candidate for candidate in allowed}
    nearest = difflib.get_close_matches(name.lower(), lowercase, n=1, cutoff=cutoff)
    return f", did you mean {lowercase[nearest[0]]}?" if nearest else "."


def unknown_option(option: str, allowed: Sequence[str]) -> str:
    """The message for an option, by its full name; `allowed` are the names that its last part may have."""
    hint = did_you_mean(option.rpartition(".")[2], allowed)
    return f"unknown option {option}{hint} Allowed are {', '.join(allowed)}"


def require_single_process(command: str) -> None:
    """Raise a ConfigError if `command` was started under torchrun or srun with several ranks."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and not composes_stage():
        raise ConfigError(f"{command} runs in a single process: start it with python, not with torchrun or srun")


@contextlib.contextmanager
def expected_directories(directories: Sequence[Path]) -> Iterator[None]:
    """Within the block, options of a stage are composed, and paths below these directories count as present."""
    token = _DIRECTORIES.set(tuple(Path(os.path.abspath(directory)) for directory in directories))
    try:
        yield
    finally:
        _DIRECTORIES.reset(token)


def composes_stage() -> bool:
    """Whether options of a stage of a pipeline are composed, whose ranks run commands of a single process as well."""
    return _DIRECTORIES.get() is not None


def is_expected(path: str) -> bool:
    """Whether an earlier stage will write this path."""
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    return any(absolute.is_relative_to(directory) for directory in _DIRECTORIES.get() or ())
