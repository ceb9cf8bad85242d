"""What kind of set a table is, told by the columns of its first row."""

from collections.abc import Mapping
from typing import Any

from embedtrain.config.evaluation import SetKind
from embedtrain.errors import DataError
from embedtrain.evaluation.reading.classes import CLUSTERED, CLUSTERS
from embedtrain.evaluation.reading.pairs import LABEL, SCORE, has_pair
from embedtrain.evaluation.reading.reranking import NEGATIVE, POSITIVE, QUERY
from embedtrain.evaluation.reading.rows import Table


def kind_of(table: Table) -> SetKind:
    """The kind of set that a table is.

    Raises:
        DataError: it is empty, its columns are those of no kind, or of several.
    """
    _, fields = table.first()
    if has_pair(fields):
        if _has(fields, SCORE):
            return SetKind.sts
        return SetKind.pair_classification if _has(fields, LABEL) else SetKind.bitext
    if _has(fields, QUERY) and _has(fields, POSITIVE) and _has(fields, NEGATIVE):
        return SetKind.reranking
    if _has(fields, CLUSTERED) and _has(fields, CLUSTERS):
        return _of_texts(fields, table.name)
    if len(fields) == 2 and all(isinstance(value, str) for value in fields.values()):
        return SetKind.bitext
    raise DataError(
        f"{table.name}: the columns {', '.join(fields)} are those of no set: expected sentence1, sentence2 (and score "
        f"or label), query, positive, negative, text and label, sentences and labels, or two columns of translations"
    )


def _of_texts(fields: Mapping[str, Any], name: str) -> SetKind:
    """Texts with labels are to be classified, or clustered: MTEB's names of the columns say which."""
    if "sentences" in fields or isinstance(fields["text"], list):
        return SetKind.clustering
    if "label" in fields:
        return SetKind.classification
    raise DataError(
        f"{name}: the columns {', '.join(fields)} may be those of kind=classification or of kind=clustering: say which"
    )


def _has(fields: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(name in fields for name in names)
