"""Conditions on the columns of a row, such as `rank <= 2 and score > 0.3`: parsed, and never executed as code."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from embedtrain.errors import ConfigError

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
