"""One declaration of an option: a field of a dataclass with its type, its default, its comment, and what `option` adds.

Checks of single values, the rules of a resumed run, the digests of pipelines and the identity of mined folders read
the fields.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from embedtrain.config.validation import MAX_SEED, OptionChecks

_KEY = "option"
_NAMES = re.compile(r"[^.\[\]]+|\[\d+\]")


class Effect(Enum):
    """Effect of changing an option on a resumed run; the value is the message about it."""

    must_match = "rejected if it changes what is trained on which rows"
    changes_training = "changed since step {step}, which affects training or the exported step"
    changes_rounding = "changed since step {step}, which only affects rounding and dropout masks"
    no_effect = "changed since step {step}, without effect on training"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """What a field declares besides its type, its default and its comment.

    Attributes:
        at_least: the smallest number.
        above: a number that it has to exceed.
        within: the smallest and the largest number.
        at_most: the largest number.
        below: a number that it has to be smaller than.
        finite: whether it is any number except NaN and infinity, as with each of the limits.
        hint: what follows the limit in the error, such as the meaning of null.
        resume: effect of changing it on a resumed run; None: that of the section that it is in.
        is_measured: whether it decides what evaluations measure.
        chooses_best: whether it decides which step is the best one (`checkpoint.best_metric`).
        is_input: whether it names files, directories or ids of the Hub, whose content counts instead of the name.
        values_are_inputs: whether each value does, if it is a mapping whose keys are the user's.
        is_revision: whether it chooses a revision of what another option names.
        in_result: whether what a command writes depends on it. None: on each option of a command; of training, on those
            whose change on a resumed run is rejected or changes training.
        items: the dataclass that a mapping, or each mapping of a list, is parsed into.
    """

    at_least: float | None = None
    above: float | None = None
    within: tuple[float, float] | None = None
    at_most: float | None = None
    below: float | None = None
    finite: bool = False
    hint: str = ""
    resume: Effect | None = None
    is_measured: bool = False
    chooses_best: bool = False
    is_input: bool = False
    values_are_inputs: bool = False
    is_revision: bool = False
    in_result: bool | None = None
    items: type | None = None

    @property
    def limits(self) -> str:
        """The allowed numbers in words, such as `at least 1`; empty without limits."""
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        texts = [f"{word} {limit}" for word, limit in words.items() if limit is not None]
        if self.within is not None:
            texts.append(f"from {self.within[0]} to {self.within[1]}")
        return " and ".join(texts)


_NOTHING = OptionInfo()
# Limits that several options have: `option(None, **LENGTH)`.
LENGTH: dict[str, Any] = {"at_least": 3, "hint": "two of them are special tokens"}
SEED: dict[str, Any] = {"within": (0, MAX_SEED)}


def option(default: Any = MISSING, *, factory: Any = MISSING, **declared: Any) -> Any:
    """A field of a dataclass of options; `declared` are attributes of OptionInfo.

    `chunk_tokens: int = option(16384, at_least=1)`
    """
    metadata = {_KEY: OptionInfo(**declared)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def declare(of_field: Any, **declared: Any) -> Any:
    """A field that another function made, such as `code_option`, with these attributes of OptionInfo."""
    of_field.metadata = {**of_field.metadata, _KEY: replace(of_field.metadata.get(_KEY, _NOTHING), **declared)}
    return of_field


def info(of_field: Any) -> OptionInfo:
    """What a field declares."""
    declared: OptionInfo = of_field.metadata.get(_KEY, _NOTHING)
    return declared


def check_values(options: Any, prefix: str = "") -> None:
    """Raise a ConfigError for a number outside of its limits, in this dataclass and the sections in it."""
    check = OptionChecks(options, prefix)
    for each in fields(options):
        value, declared = getattr(options, each.name), info(each)
        if is_dataclass(value):
            check_values(value, f"{prefix}{each.name}.")
        for limit, require in (
            (declared.at_least, check.at_least),
            (declared.above, check.above),
            (declared.at_most, check.at_most),
            (declared.below, check.below),
        ):
            if limit is not None:
                require(limit, each.name, declared.hint)
        if declared.within is not None:
            check.within(*declared.within, each.name, declared.hint)
        if declared.finite:
            check.number(each.name, declared.hint)


def declarations(options: Any, name: str) -> Iterator[OptionInfo]:
    """What is declared on the way to an option, such as `data.train[0].weight`, from the outermost section on.

    The way ends where the dataclasses do, as in a mapping, or in an option of another loss.
    """
    value = options
    for part in _NAMES.findall(name):
        if part.startswith("["):
            index = int(part[1:-1])
            if not isinstance(value, list) or index >= len(value):
                return
            value = value[index]
            continue
        if not is_dataclass(value):
            return
        found = next((each for each in fields(value) if each.name == part), None)
        if found is None:
            return
        yield info(found)
        value = getattr(value, part)


def effect_of(name: str, recipe: Any) -> Effect:
    """The effect of changing an option on a run resumed with this recipe."""
    found = list(declarations(recipe, name))
    if recipe.checkpoint.best_metric is not None and any(each.is_measured or each.chooses_best for each in found):
        return Effect.changes_training
    return next(each.resume for each in reversed(found) if each.resume is not None)


def is_in_result(name: str, options: Any) -> bool:
    """Whether what a command, or training, writes depends on an option."""
    found = list(declarations(options, name))
    stated = next((each.in_result for each in reversed(found) if each.in_result is not None), None)
    if stated is not None:
        return stated
    if found[0].resume is None:  # of a command; all sections of a recipe declare an effect
        return True
    return effect_of(name, options) in (Effect.must_match, Effect.changes_training)


def is_input(name: str, options: Any) -> bool:
    """Whether an option, or the list that it is an element of, names files whose content counts.

    What is below a key of a mapping does only if the option declares `values_are_inputs`.
    """
    found = list(declarations(options, name))
    is_below_key = len(found) < sum(not part.startswith("[") for part in _NAMES.findall(name))
    return found[-1].values_are_inputs if is_below_key else found[-1].is_input
