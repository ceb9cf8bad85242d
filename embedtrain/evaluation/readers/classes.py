"""Tables of texts with classes: classification, with texts to learn from and to be told, and clustering."""

from collections.abc import Iterable, Sequence
from typing import Any

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.data.sources.problems import shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.rows import Row, Table, field_of, name_of, text_field, text_of
from embedtrain.evaluation.types import ClassificationSet, ClusteringSet

TEXT = ("text",)
LABEL = ("label",)
CLUSTERED = ("sentences", "text")
CLUSTERS = ("labels", "label")

Label = int | str


def read_classification(
    name: str, config: EvaluationSet, train: Table, table: Table
) -> tuple[ClassificationSet, list[str]]:
    """Make a set of two tables with `text` and `label`, as MTEB has them.

    Args:
        name: the set's name.
        config: how classes are learnt.
        train: texts to learn from.
        table: texts to be told.

    Returns:
        The set, and notes on what is odd about it.

    Raises:
        DataError: a row lacks a column, or a table is empty.
    """
    train_texts, train_labels = _labelled(train)
    texts, labels = _labelled(table)
    alike = _alike([*train_labels, *labels])
    data = ClassificationSet(
        name,
        train_texts,
        alike[: len(train_labels)],
        texts,
        alike[len(train_labels) :],
        config.classifier,
        config.samples_per_label,
        config.experiments,
    )
    unknown = sorted(set(data.labels) - set(data.train_labels), key=str)
    notes = []
    if unknown:
        count = sum(label in unknown for label in data.labels)
        notes.append(
            f"{name}: {len(unknown)} classes of {table.name} are not in {train.name}, so {count} of its "
            f"{len(texts)} texts cannot be told (the first: {unknown[0]})"
        )
    return data, notes


def read_clustering(name: str, rows: Iterable[Row], experiments: int) -> ClusteringSet:
    """Make a set of `sentences` (or `text`) and `labels` (or `label`).

    A row is a text with its cluster, or with a list of nested ones, from the coarsest to the finest; or a list of texts
    with a list of as many clusters, and is then clustered on its own.

    Raises:
        DataError: a row lacks a column, is of the other form than the first, or its lists differ in length.
    """
    texts: list[str] = []
    labels: list[tuple[Label, ...]] = []
    groups: list[range] = []
    for where, fields in rows:
        of_text, of_label = name_of(fields, CLUSTERED, where), name_of(fields, CLUSTERS, where)
        text, label = fields[of_text], fields[of_label]
        if texts and isinstance(text, list) != bool(groups):
            now, before = ("a list", "single texts") if isinstance(text, list) else ("a single text", "lists")
            raise DataError(f"{where}: {of_text} holds {now}, and rows before hold {before}")
        if not isinstance(text, list):
            texts.append(text_of(text, (of_text,), where))
            labels.append(
                tuple(_label(one, of_label, where) for one in (label if isinstance(label, list) else [label]))
            )
            if not labels[-1]:
                raise DataError(f"{where}: {of_label} is an empty list")
            continue
        if not isinstance(label, list) or len(label) != len(text):
            raise DataError(f"{where}: {len(text)} texts need a list of as many labels, and this is {shorten(label)}")
        groups.append(range(len(texts), len(texts) + len(text)))
        texts += [text_of(one, (of_text,), where) for one in text]
        labels += [(_label(one, of_label, where),) for one in label]
    return ClusteringSet(name, texts, _alike_nested(labels), groups or None, experiments)


def _labelled(table: Table) -> tuple[list[str], list[Label]]:
    texts: list[str] = []
    labels: list[Label] = []
    for where, fields in table.rows():
        texts.append(text_field(fields, TEXT, where))
        labels.append(_label(field_of(fields, LABEL, where), LABEL[0], where))
    if not texts:
        raise DataError(f"{table.name} is empty")
    return texts, labels


def _label(value: Any, name: str, where: str) -> Label:
    """A class: a whole number or a text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {name} must be a whole number or a text, not {shorten(value)}")
    return int(value) if isinstance(value, bool) else value


def _alike(labels: Sequence[Label]) -> list[Label]:
    """Labels of one type: a CSV file has the text 7 for what Parquet has the number 7 for."""
    if all(_is_number(label) for label in labels):
        return [int(label) for label in labels]
    return [str(label) for label in labels]


def _alike_nested(labels: Sequence[tuple[Label, ...]]) -> list[tuple[Label, ...]]:
    """The same for each level of nested labels."""
    deepest = max(map(len, labels), default=0)
    levels = [iter(_alike([label[level] for label in labels if len(label) > level])) for level in range(deepest)]
    return [tuple(next(levels[level]) for level in range(len(label))) for label in labels]


def _is_number(label: Label) -> bool:
    # 01 and 1 are two classes.
    return isinstance(label, int) or (label.removeprefix("-").isdecimal() and str(int(label)) == label)
