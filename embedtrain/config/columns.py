"""Where data is, and its columns: `columns` in order or by role, those of pictures, and conditions (`where`)."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedtrain.config.options import option
from embedtrain.errors import ConfigError

# Pixels of a picture: above the first number Pillow warns of a decompression bomb, above the second it opens no file.
DEFAULT_MAX_PIXELS, LARGEST_MAX_PIXELS = 89_478_485, 178_956_970


@dataclass(kw_only=True)
class DataPath:
    """Documents, an element of `corpus` (a string is its `path`)."""

    path: str = option(is_input=True)  # BEIR directory, corpus file, table, or Hub id (ID@REVISION)
    # the folder of pictures that rows or their corpus name; default: that of the file that names them
    image_dir: str | None = option(None, is_input=True)
    # Columns, and keys of objects in rows, that hold pictures: names of files, or bytes. Default: by their names.
    image_columns: list[str] | None = None
    # pixels of a picture, above which its row cannot be used: decoded, one takes three bytes for each
    max_image_pixels: int = option(DEFAULT_MAX_PIXELS, within=(1, LARGEST_MAX_PIXELS))


# What a column may be named as, in the order of the texts of a row. `text` and `sentence1` are the query of rows of one
# text and of pairs of sentences.
_FIRST, _SECOND, _OTHERS, _SCORES, _PROMPT = (
    ("query", "text", "sentence1"),
    ("positive", "sentence2"),
    "negative",
    ("label", "score"),
    ("prompt",),
)
ROLES = (*_FIRST, *_SECOND, _OTHERS, *_SCORES, *_PROMPT)
_EXPECTED = (
    "write columns in the order query, positive, negatives, such as [question,answer], or by role, such as "
    "{query: question1, positive: question2, label: is_duplicate}"
)


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """The columns that a user names."""

    texts: list[str]  # query, positive, negatives; of an unnamed order perhaps a score among them
    score: str | None = None  # that of labels or scores, if roles are named
    prompt: str | None = None  # that of the instructions of queries, if roles are named
    by_role: bool = False
    are_sentences: bool = False  # the roles are sentence1 and sentence2

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [*self.texts, *(name for name in (self.score, self.prompt) if name is not None)]

    def __str__(self) -> str:
        return str(self.names)


def parse_columns(value: Any) -> NamedColumns | None:
    """`columns` as it is written: a list, or a mapping from roles to columns. Raises ConfigError for anything else."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _parse_roles(value)
    names = _names(value, "columns")
    return NamedColumns(names)


def _parse_roles(value: Mapping[Any, Any]) -> NamedColumns:
    unknown = [role for role in value if role not in ROLES]
    if unknown:
        raise ConfigError(f"columns.{unknown[0]}={value[unknown[0]]}: roles are {', '.join(ROLES)}; {_EXPECTED}")
    chosen = {role: _names(of_role, f"columns.{role}") for role, of_role in value.items() if of_role is not None}
    texts: list[str] = []
    for roles in (_FIRST, _SECOND, _SCORES, _PROMPT):
        given = [role for role in roles if role in chosen]
        if len(given) > 1:
            raise ConfigError(f"columns.{given[1]}={chosen[given[1]]}: {given[0]} is the same role: leave one out")
        for role in given:
            if len(chosen[role]) != 1:
                raise ConfigError(f"columns.{role}={chosen[role]}: is one column; only negative may be several")
            texts += chosen[role] if roles in (_FIRST, _SECOND) else []
    first, second = (any(role in chosen for role in roles) for roles in (_FIRST, _SECOND))
    if not first or (not second and _OTHERS in chosen):
        missing = "query" if not first else "positive"
        raise ConfigError(f"columns={dict(value)}: has no {missing}; {_EXPECTED}")
    score, prompt = (next((chosen[role][0] for role in roles if role in chosen), None) for roles in (_SCORES, _PROMPT))
    texts += chosen.get(_OTHERS, [])
    are_sentences = "sentence1" in chosen or "sentence2" in chosen
    return NamedColumns(texts, score, prompt, by_role=True, are_sentences=are_sentences)


def _names(value: Any, option: str) -> list[str]:
    """The names of columns; a number is the name of one as well."""
    names = [value] if isinstance(value, str | int) and option != "columns" else value
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not names or not all(isinstance(name, str | int) for name in names):
        raise ConfigError(f"{option}={value!r}: {_EXPECTED}")
    return [str(name) for name in names]


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARISON = re.compile(rf"([^\W\d][\w.-]*)\s*({'|'.join(_OPERATORS)})\s*({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column that is compared with a number."""

    column: str
    operator: str
    number: float

    def holds(self, value: float) -> bool:
        """Whether it holds for a value of the column."""
        return _OPERATORS[self.operator](value, self.number)


def parse_condition(text: str) -> tuple[Comparison, ...]:
    """The comparisons of a condition, all of which must hold. Raises ConfigError if it is not one."""
    matches = [_COMPARISON.fullmatch(part.strip()) for part in re.split(r"\band\b", text)]
    comparisons = [Comparison(match[1], match[2], float(match[3])) for match in matches if match is not None]
    if len(comparisons) < len(matches):
        raise ConfigError(
            f"where={text}: must be a column, one of {', '.join(_OPERATORS)} and a number, several joined by `and`, "
            'such as "rank <= 2 and score > 0.3"'
        )
    return tuple(comparisons)
