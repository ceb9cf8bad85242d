"""Classification: can classes be told from vectors, with a few texts of each to learn from?

Shapes: n texts to learn from, m to be told.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, precision_score, recall_score
from sklearn.neighbors import KNeighborsClassifier

from embedtrain.config.evaluation import Classifier
from embedtrain.errors import DataError
from embedtrain.evaluation.tasks.measuring import SEED, EvaluationContext, fitting
from embedtrain.evaluation.types import ClassificationSet

METRICS = ("accuracy", "f1", "f1_weighted", "precision", "recall")
# Where texts are of two classes.
BINARY_METRICS = (*METRICS, "ap")
_NEIGHBOURS = 3


def metrics_of_classes(data: ClassificationSet) -> tuple[str, ...]:
    """Which figures a set has: average precision is defined for two classes only."""
    return BINARY_METRICS if len(set(data.labels)) == 2 else METRICS


def measure(data: ClassificationSet, measuring: EvaluationContext) -> dict[str, float]:
    """Means over experiments, the same floats on every rank. A collective.

    Draws, classifier and figures are those of MTEB's AbsTaskClassification; `classifier=knn` is the nearest neighbours
    of its first version, three of them by cosine. Vectors are taken as the model gives them. F1, precision and recall
    are means over classes. Of two classes, the one that sorts last is the positive one of average precision.

    Raises:
        DataError: on every rank, if the texts to learn from are of one class.
    """
    world = measuring.world
    draws: list[NDArray[np.int64]] = []
    with world.fail_together(f"drawing the texts that {data.name} learns from"):
        train_classes, classes = _numbered(data)
        if len(np.unique(train_classes)) < 2:
            raise DataError(
                f"{data.name}: the texts to learn from are all of the class {data.train_labels[0]!r}; "
                f"a classifier needs two"
            )
        draws = _draws(train_classes, data.samples_per_label, data.experiments)
    used = np.unique(np.concatenate(draws))
    encoded = measuring.encode_texts([*(data.train_texts[row] for row in used.tolist()), *data.texts])
    figures: dict[str, float] = {}
    with world.fail_together(f"computing the metrics of {data.name}"), fitting():
        if world.is_main:
            vectors = encoded.cpu().numpy()
            each = []
            for draw in draws:
                classifier = _classifier(data.classifier, len(draw))
                classifier.fit(vectors[np.searchsorted(used, draw)], train_classes[draw])
                each.append(_metrics(classes, classifier.predict(vectors[len(used) :])))
            figures = {metric: float(np.mean([of[metric] for of in each])) for metric in each[0]}
    return world.broadcast(figures)


def _numbered(data: ClassificationSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Classes as numbers in their own order, of both lists: what scikit-learn sorts by, and no text."""
    known = {*data.train_labels, *data.labels}
    number = {label: at for at, label in enumerate(sorted(known, key=lambda label: (isinstance(label, str), label)))}

    def numbers(labels: Sequence[int | str]) -> NDArray[np.int64]:
        return np.array([number[label] for label in labels], dtype=np.int64)

    return numbers(data.train_labels), numbers(data.labels)


def _draws(classes: NDArray[np.int64], samples: int | None, experiments: int) -> list[NDArray[np.int64]]:
    """For each experiment the rows it learns from: `samples` of each class, or one experiment with all rows.

    Every experiment shuffles the order that the one before left with the same seed, as MTEB's do.
    """
    rows = np.arange(len(classes))
    if samples is None:
        return [rows]
    draws = []
    for _ in range(experiments):
        np.random.RandomState(SEED).shuffle(rows)
        taken: Counter[int] = Counter()
        draw = []
        for row, label in zip(rows.tolist(), classes[rows].tolist(), strict=True):
            if taken[label] < samples:
                taken[label] += 1
                draw.append(row)
        draws.append(np.array(draw))
    return draws


def _classifier(which: Classifier, num_texts: int) -> LogisticRegression | KNeighborsClassifier:
    match which:
        case Classifier.logistic:
            return LogisticRegression(max_iter=100, random_state=SEED)
        case Classifier.knn:
            return KNeighborsClassifier(n_neighbors=min(_NEIGHBOURS, num_texts), metric="cosine")


def _metrics(classes: NDArray[np.int64], predicted: NDArray[np.int64]) -> dict[str, float]:
    figures = {
        "accuracy": accuracy_score(classes, predicted),
        "f1": f1_score(classes, predicted, average="macro", zero_division=0.0),
        "f1_weighted": f1_score(classes, predicted, average="weighted", zero_division=0.0),
        "precision": precision_score(classes, predicted, average="macro", zero_division=0.0),
        "recall": recall_score(classes, predicted, average="macro", zero_division=0.0),
    }
    if len(np.unique(classes)) == 2:
        figures["ap"] = average_precision_score(classes == classes.max(), predicted)
    return figures
