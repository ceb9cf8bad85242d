"""One idiom for checks of options: a check that fails raises the option, its value and what is allowed."""

import difflib
import math
import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

from embedtrain.errors import ConfigError

MAX_SEED = 2**63 - 1


class OptionChecks:
    """Checks fields of one dataclass of options.

    Numbers that are None pass: null stands for a default. NaN and infinity never pass.

    Args:
        options: the dataclass.
        prefix: what precedes the names of its fields where the user writes them, such as `train.`.
    """

    def __init__(self, options: Any, prefix: str = "") -> None:
        self.options, self._prefix = options, prefix

    def require(self, condition: bool, name: str, message: str) -> None:
        """Raise `name=value: message` unless the condition holds.

        Raises:
            ConfigError: it does not.
        """
        if not condition:
            raise ConfigError(f"{self._prefix}{name}={written(getattr(self.options, name))}: {message}")

    def at_least(self, minimum: float, name: str, hint: str = "") -> None:
        """Raise unless the number is `minimum` or larger."""
        value = getattr(self.options, name)
        holds = value is None or (math.isfinite(value) and value >= minimum)
        self.require(holds, name, _with_hint(f"must be at least {minimum}", hint))

    def number(self, name: str, hint: str = "") -> None:
        """Raise unless the number is finite."""
        value = getattr(self.options, name)
        self.require(value is None or math.isfinite(value), name, _with_hint("must be a number", hint))

    def positive(self, name: str, hint: str = "") -> None:
        """Raise unless the number is above 0."""
        value = getattr(self.options, name)
        holds = value is None or (math.isfinite(value) and value > 0)
        self.require(holds, name, _with_hint("must be above 0", hint))

    def within(self, minimum: float, maximum: float, name: str, hint: str = "") -> None:
        """Raise unless the number is from `minimum` to `maximum`."""
        value = getattr(self.options, name)
        holds = value is None or minimum <= value <= maximum
        self.require(holds, name, _with_hint(f"must be from {minimum} to {maximum}", hint))

    def seed(self, name: str) -> None:
        """Raise unless the number is a seed that every generator accepts."""
        self.within(0, MAX_SEED, name)

    def length(self, name: str) -> None:
        """Raise unless a maximum length in tokens leaves room for text."""
        self.at_least(3, name, "two of them are special tokens")

    def instruction_format(self) -> None:
        """Raise unless `instruction_format` has `{instruction}` and then `{text}`, each once."""
        if self.options.instruction_format is None:
            return
        before, marker, after = self.options.instruction_format.partition("{instruction}")
        self.require(
            bool(marker) and "{text}" not in before and after.count("{text}") == 1 and "{instruction}" not in after,
            "instruction_format",
            'must have {instruction} and then {text}, each once, such as "Instruct: {instruction}\\nQuery: {text}"',
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
    """The message for an option that does not exist.

    Args:
        option: its full name; the part behind the last dot is the one that does not exist.
        allowed: the names that its last part may have.
    """
    hint = did_you_mean(option.rpartition(".")[2], allowed)
    return f"unknown option {option}{hint} Allowed are {', '.join(allowed)}"


def require_single_process(command: str) -> None:
    """Refuse to start `command` under torchrun or srun.

    Raises:
        ConfigError: there are several ranks.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(f"{command} runs in a single process: start it with python, not with torchrun or srun")


def _with_hint(message: str, hint: str) -> str:
    return f"{message}; {hint}" if hint else message
