"""Tables of sentence pairs: with scores (STS), with labels (pair classification), or of translations (bitext)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from embedtrain.data.sources.problems import shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.rows import Row, name_of, number_field, text_field
from embedtrain.evaluation.types import Bitext, LabelledPairs, ScoredPairs

FIRST = ("sentence1", "sent1")
SECOND = ("sentence2", "sent2")
SCORE = ("score",)
LABEL = ("label", "labels")


def read_scored(name: str, rows: Iterable[Row]) -> ScoredPairs:
    """Pairs with a gold similarity each: `sentence1`, `sentence2`, `score`.

    Raises:
        DataError: a row lacks a column, or holds something else than texts and a number.
    """
    first, second, scores = [], [], []
    for where, fields in _single(rows):
        first.append(text_field(fields, FIRST, where))
        second.append(text_field(fields, SECOND, where))
        scores.append(number_field(fields, SCORE, where))
    return ScoredPairs(name, first, second, scores)


def read_labelled(name: str, rows: Iterable[Row]) -> LabelledPairs:
    """Pairs that mean the same (1) or do not (0): `sentence1`, `sentence2`, `label`.

    In older sets of MTEB the columns are called `sent1`, `sent2`, `labels`.

    Raises:
        DataError: a row lacks a column, or a label is neither 0 nor 1.
    """
    first, second, labels = [], [], []
    for where, fields in _single(rows):
        first.append(text_field(fields, FIRST, where))
        second.append(text_field(fields, SECOND, where))
        column = name_of(fields, LABEL, where)
        value = fields[column]
        label = value if isinstance(value, bool) else number_field(fields, LABEL, where)
        if label not in (0, 1):
            raise DataError(f"{where}: {column} must be 0 or 1, not {shorten(value)}")
        labels.append(int(label))
    return LabelledPairs(name, first, second, labels)


def read_bitext(name: str, rows: Iterable[Row], columns: Sequence[str] | None) -> Bitext:
    """Sentences and their translations.

    Args:
        name: the set's name.
        rows: rows with `sentence1` and `sentence2`, or two columns of whatever names.
        columns: which two columns, where a table has one of each language; None: as above.

    Raises:
        DataError: a row lacks a column, or holds something else than texts.
    """
    first, second = [], []
    for where, fields in _single(rows):
        one, other = _sides(fields) if columns is None else ((columns[0],), (columns[1],))
        first.append(text_field(fields, one, where))
        second.append(text_field(fields, other, where))
    return Bitext(name, first, second)


def has_pair(fields: Mapping[str, Any]) -> bool:
    """Whether a row holds two sentences under the names that pairs have."""
    return any(name in fields for name in FIRST) and any(name in fields for name in SECOND)


def _sides(fields: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    if len(fields) == 2 and not has_pair(fields):
        one, other = fields
        return (one,), (other,)
    return FIRST, SECOND


def _single(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of one pair each; MTEB's older sets have one row, with a list in each column."""
    for where, fields in rows:
        lists = {name: value for name, value in fields.items() if isinstance(value, list)}
        if not lists or not any(name in lists for name in (*FIRST, *SECOND)):
            yield where, fields
            continue
        lengths = {len(value) for value in lists.values()}
        if len(lengths) > 1:
            told = ", ".join(f"{name} {len(value)}" for name, value in lists.items())
            raise DataError(f"{where}: its lists must be of one length, and they have {told} elements")
        for number in range(lengths.pop()):
            yield f"{where}, element {number + 1}", {name: value[number] for name, value in lists.items()}
