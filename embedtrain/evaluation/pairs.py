"""Tables of scored sentence pairs: `sentence1`, `sentence2`, `score`."""

from collections.abc import Iterable

from embedtrain.errors import DataError
from embedtrain.evaluation.rows import Row, number_field, text_field
from embedtrain.evaluation.types import ScoredPairs


def read_pairs(name: str, rows: Iterable[Row], source: object) -> ScoredPairs:
    """Make a set of the rows of one table.

    Args:
        name: the set's name.
        rows: rows with sentence1, sentence2 and score.
        source: what to call the table in messages.

    Raises:
        DataError: a row lacks a column, or all scores are equal, so that no correlation exists.
    """
    first, second, scores = [], [], []
    for where, fields in rows:
        first.append(text_field(fields, ("sentence1",), where))
        second.append(text_field(fields, ("sentence2",), where))
        scores.append(number_field(fields, ("score",), where))
    if len(set(scores)) < 2:
        raise DataError(f"{source}: {len(scores)} pairs with {len(set(scores))} different scores, so no correlation")
    return ScoredPairs(name, first, second, scores)
