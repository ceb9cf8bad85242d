"""Sets of sentence pairs: with scores (STS), with labels (pair classification), or of translations (bitext)."""

from collections.abc import Iterable, Iterator, Sequence

from embedtrain.data.sources.values import shorten
from embedtrain.evaluation.readers.rows import Row
from embedtrain.evaluation.types import Bitext, LabelledPairs, ScoredPairs

FIRST = ("sentence1", "sent1")
SECOND = ("sentence2", "sent2")
SCORE = ("score",)
LABEL = ("label", "labels")


def read_scored(name: str, rows: Iterable[Row]) -> ScoredPairs:
    """Pairs with a gold similarity: `sentence1`, `sentence2`, `score`."""
    first, second, scores = [], [], []
    for row in _single_pairs(rows):
        first.append(row.text(*FIRST))
        second.append(row.text(*SECOND))
        scores.append(row.number(*SCORE))
    return ScoredPairs(name, first, second, scores)


def read_labelled(name: str, rows: Iterable[Row]) -> LabelledPairs:
    """Pairs with the same meaning (1) or not (0): `sentence1`, `sentence2`, `label` (older sets: `sent1`, `labels`)."""
    first, second, labels = [], [], []
    for row in _single_pairs(rows):
        first.append(row.text(*FIRST))
        second.append(row.text(*SECOND))
        key = row.key(*LABEL)
        value = row.fields[key]
        label = value if isinstance(value, bool) else row.number(key)
        if label not in (0, 1):
            raise row.error(f"{key} must be 0 or 1, not {shorten(value)}")
        labels.append(int(label))
    return LabelledPairs(name, first, second, labels)


def read_bitext(name: str, rows: Iterable[Row], languages: Sequence[str] | None) -> Bitext:
    """Sentences and translations: `sentence1` and `sentence2`, two columns of any names, or those of `languages`."""
    first, second = [], []
    for row in _single_pairs(rows):
        if languages is not None:
            columns: tuple[Sequence[str], Sequence[str]] = (languages[:1], languages[1:])
        elif len(row.fields) == 2 and not has_pair(row):
            names = list(row.fields)
            columns = (names[:1], names[1:])
        else:
            columns = (FIRST, SECOND)
        first.append(row.text(*columns[0]))
        second.append(row.text(*columns[1]))
    return Bitext(name, first, second)


def has_pair(row: Row) -> bool:
    """Whether a row holds two sentences under the usual names."""
    return row.has(*FIRST) and row.has(*SECOND)


def _single_pairs(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of one pair each; older sets of MTEB have one row with a list in each column."""
    for row in rows:
        lists = {name: value for name, value in row.fields.items() if isinstance(value, list)}
        if not any(name in lists for name in (*FIRST, *SECOND)):
            yield row
            continue
        lengths = {len(value) for value in lists.values()}
        if len(lengths) > 1:
            shown = ", ".join(f"{name} {len(value)}" for name, value in lists.items())
            raise row.error(f"its lists must have one length, and they have {shown} elements")
        for number in range(lengths.pop()):
            fields = {name: value[number] for name, value in lists.items()}
            yield Row(f"{row.location}, element {number + 1}", fields)
