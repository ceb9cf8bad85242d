"""Sets of texts with labels: classification, with texts to learn from and texts to classify, and clustering."""

from collections.abc import Iterable, Sequence

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.data.sources import values
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.rows import Row, read_rows, table_name
from embedtrain.evaluation.types import ClassificationSet, ClusteringSet

CLUSTER_TEXTS = ("sentences", "text")
CLUSTER_LABELS = ("labels", "label")

Label = int | str


def read_classification(
    name: str, config: EvaluationSet, train: Part, test: Part, keys: tuple[str, str]
) -> tuple[ClassificationSet, list[str]]:
    """A set of two tables, and notes on its irregularities. `keys` are the columns of the text and the label."""
    train_texts, train_labels = _read_labelled_texts(train, *keys)
    texts, labels = _read_labelled_texts(test, *keys)
    unified = _unify_types([*train_labels, *labels])
    data = ClassificationSet(
        name,
        train_texts,
        unified[: len(train_labels)],
        texts,
        unified[len(train_labels) :],
        config.classifier,
        config.samples_per_label,
        config.experiments,
    )
    unknown = sorted(set(data.labels) - set(data.train_labels), key=str)
    notes = []
    if unknown:
        count = sum(label in unknown for label in data.labels)
        notes.append(
            f"{name}: {len(unknown)} classes of {table_name(test)} are not in {table_name(train)}, so {count} of its "
            f"{len(texts)} texts cannot be classified (the first: {unknown[0]})"
        )
    return data, notes


def read_clustering(name: str, rows: Iterable[Row], text_key: str, label_key: str, experiments: int) -> ClusteringSet:
    """A set of texts and their clusters, in two columns.

    A row is a text with its cluster, or with a list of nested ones, from the coarsest to the finest; or a list of texts
    with a list of their clusters, which is then clustered by itself. Raises DataError if rows differ in form.
    """
    texts: list[str] = []
    labels: list[tuple[Label, ...]] = []
    groups: list[range] = []
    for row in rows:
        text, label = row.fields[row.key(text_key)], row.fields[row.key(label_key)]
        if texts and isinstance(text, list) != bool(groups):
            form, before = ("a list", "single texts") if isinstance(text, list) else ("a single text", "lists")
            raise row.error(f"{text_key} holds {form}, and rows before hold {before}")
        if not isinstance(text, list):
            texts.append(row.text(text_key))
            nested = label if isinstance(label, list) else [label]
            if not nested:
                raise row.error(f"{label_key} is an empty list")
            labels.append(tuple(row.check(_check_label, element, label_key) for element in nested))
            continue
        if not isinstance(label, list) or len(label) != len(text):
            raise row.error(f"{len(text)} texts need a list of as many labels, and this is {shorten(label)}")
        groups.append(range(len(texts), len(texts) + len(text)))
        texts += [row.check(values.string, element, text_key) for element in text]
        labels += [(row.check(_check_label, element, label_key),) for element in label]
    return ClusteringSet(name, texts, _unify_nested_types(labels), groups or None, experiments)


def _read_labelled_texts(table: Part, text_key: str, label_key: str) -> tuple[list[str], list[Label]]:
    texts: list[str] = []
    labels: list[Label] = []
    for row in read_rows(table):
        texts.append(row.text(text_key))
        labels.append(row.check(_check_label, row.fields[row.key(label_key)], label_key))
    if not texts:
        raise DataError(f"{table_name(table)} is empty")
    return texts, labels


def _check_label(value: object, name: str) -> Label:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str | int) or value == "":
        raise BadRow(f"{name} must be a whole number or a text, not {shorten(value)}")
    return int(value) if isinstance(value, bool) else value


def _unify_types(labels: Sequence[Label]) -> list[Label]:
    """Labels of one type: a CSV file has the text 7 where Parquet has the number 7."""
    if all(_is_whole_number(label) for label in labels):
        return [int(label) for label in labels]
    return [str(label) for label in labels]


def _unify_nested_types(labels: Sequence[tuple[Label, ...]]) -> list[tuple[Label, ...]]:
    """The same for each level of nested labels."""
    depth = max(map(len, labels), default=0)
    levels = [iter(_unify_types([label[level] for label in labels if len(label) > level])) for level in range(depth)]
    return [tuple(next(levels[level]) for level in range(len(label))) for label in labels]


def _is_whole_number(label: Label) -> bool:
    # 01 and 1 are two classes.
    # Python converts no more than 4300 digits.
    return isinstance(label, int) or (
        len(label) <= 100 and label.removeprefix("-").isdecimal() and str(int(label)) == label
    )
