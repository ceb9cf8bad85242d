"""A row of the tables for migrating users (`config/migration/`), and conversions of values of other libraries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Answer(str):
    """What a conversion returns if the value needs no option: the sentence to show instead of an assignment."""


# From one of our options and a value of theirs to an assignment of ours; None if the value has no counterpart.
Convert = Callable[[str, str], str | None]


@dataclass(frozen=True)
class Row:
    """Names of another library, and what embedtrain has instead.

    Attributes:
        names: of the library, separated by blanks.
        ours: Markdown that begins with an option of embedtrain in backticks, or a sentence if there is none.
        convert: a value of theirs as an assignment of ours, which messages show instead of `ours`.
        also: other names that people type, separated by blanks; the pages do not list them.
        shown: how the pages write the names; default: each in backticks.
    """

    names: str
    ours: str
    convert: Convert | None = None
    also: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Flag:
    """A conversion to assignments of a true and a false value; a flag without a value is true."""

    on: str
    off: str

    def __call__(self, option: str, value: str) -> str | None:
        """The assignment; None for another value."""
        return {"true": self.on, "1": self.on, "false": self.off, "0": self.off}.get(value.lower())


def same(option: str, value: str) -> str:
    """For an option that takes their values as they are."""
    return f"{option}={value}"


def in_list(option: str, value: str) -> str:
    """For an option that takes a list of their values."""
    return f"{option}={value}" if value.startswith("[") else f"{option}=[{value}]"


def integer(option: str, value: str) -> str | None:
    """For an option that takes their values if they are integers, and not if they are flags."""
    return f"{option}={value}" if value.isdecimal() else None


def integers(option: str, value: str) -> str | None:
    """For an option that takes a list of their values if they are integers, and not if they are flags."""
    return in_list(option, value) if any(map(str.isdecimal, value)) else None


def of_source(option: str) -> Convert:
    """For an option of a source in `data.train` that takes their values if they are integers."""
    return lambda _, value: f"data.train=[{{path: ..., {option}: {value}}}]" if value.isdecimal() else None


def one_of(values: Mapping[str, str]) -> Convert:
    """For an option whose values have other names; theirs are the keys, in lower case, without the class of an enum."""
    return lambda option, value: (
        f"{option}={values[name]}" if (name := value.lower().rpartition(".")[2]) in values else None
    )


def number(template: str, convert: Callable[[float], float]) -> Convert:
    """The template with a converted number in it."""

    def assignment(_: str, value: str) -> str | None:
        try:
            return template.format(f"{convert(float(value)):.10g}")
        except (ValueError, ArithmeticError):
            return None

    return assignment


POOLING = one_of(
    {
        **{name: name for name in ("cls", "mean", "last", "max", "weighted_mean")},
        "weightedmean": "weighted_mean",
        "avg": "mean",
        "average": "mean",
        "last_token": "last",
        "lasttoken": "last",
        "eos": "last",
    }
)
PRECISIONS = one_of(
    {
        **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half", "16", "16-mixed", "bf16-mixed"), "bf16"),
        **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "no"), "fp32"),
    }
)
