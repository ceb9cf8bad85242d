"""Pairs of sentences: semantic textual similarity, pair classification and bitext mining.

Shapes: n pairs.
"""

from collections.abc import Sequence

import numpy as np

from embedtrain.evaluation.metrics import sts_metrics
from embedtrain.evaluation.tasks.context import EncoderContext, ScorerContext, reproducible_sklearn
from embedtrain.evaluation.types import Bitext, LabelledPairs, ScoredPairs

STS_METRICS = ("spearman", "pearson")
PAIR_CLASSIFICATION_METRICS = ("ap", "accuracy", "f1", "precision", "recall", "accuracy_threshold", "f1_threshold")
BITEXT_METRICS = ("f1", "precision", "recall", "accuracy", "accuracy_back", "accuracy_mean")


def measure_sts(data: ScoredPairs, context: EncoderContext | ScorerContext) -> dict[str, float]:
    """Rank and linear correlation of similarities with gold scores, identical on every rank. A collective."""
    similarities = context.similarities(data.first, data.second)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"):
        if context.world.is_main:
            metrics = sts_metrics(similarities.tolist(), data.scores)
    return context.world.broadcast(metrics)


def measure_pair_classification(data: LabelledPairs, context: EncoderContext | ScorerContext) -> dict[str, float]:
    """Metrics of the similarities of pairs, identical on every rank. A collective.

    Average precision is scikit-learn's. Accuracy, and F1 with its precision and recall, are those at the best threshold
    of each, as found by sentence-transformers' BinaryClassificationEvaluator.
    """
    similarities = context.similarities(data.first, data.second)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if context.world.is_main:
            metrics = _pair_classification_metrics(similarities.numpy(), np.asarray(data.labels))
    return context.world.broadcast(metrics)


def _pair_classification_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    # Imported here because it takes seconds, which only processes with such a set should spend.
    from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator
    from sklearn.metrics import average_precision_score

    accuracy, accuracy_threshold = BinaryClassificationEvaluator.find_best_acc_and_threshold(scores, labels, True)
    f1 = BinaryClassificationEvaluator.find_best_f1_and_threshold(scores, labels, True)
    values = (average_precision_score(labels, scores), accuracy, *f1[:3], accuracy_threshold, f1[3])
    return {metric: float(value) for metric, value in zip(PAIR_CLASSIFICATION_METRICS, values, strict=True)}


def measure_bitext(data: Bitext, context: EncoderContext) -> dict[str, float]:
    """Metrics of nearest neighbours, identical on every rank. A collective.

    From the first sentences to the second, a translation is found if the nearest neighbour is in the same row;
    precision, recall and F1 are means with rows as classes, as in MTEB. `accuracy_back` (from the second to the first)
    and `accuracy_mean` (of both directions) are those of sentence-transformers' TranslationEvaluator, which also
    accepts an equal sentence of another row. Of equally near sentences, the first counts.
    """
    from sklearn.metrics import precision_recall_fscore_support  # takes a second

    forward = context.nearest(data.first, data.second)
    backward = context.nearest(data.first, data.second, swapped=True)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if context.world.is_main:
            rows = range(len(data.first))
            precision, recall, f1, _ = precision_recall_fscore_support(
                rows, forward, average="weighted", zero_division=0.0
            )
            accuracy_back = _fraction_equal(data.first, backward)
            metrics = {
                "f1": float(f1),
                "precision": float(precision),
                "recall": float(recall),
                "accuracy": sum(nearest == row for row, nearest in zip(rows, forward, strict=True)) / len(rows),
                "accuracy_back": accuracy_back,
                "accuracy_mean": (_fraction_equal(data.second, forward) + accuracy_back) / 2,
            }
    return context.world.broadcast(metrics)


def _fraction_equal(texts: Sequence[str], nearest: Sequence[int]) -> float:
    return sum(text == texts[row] for text, row in zip(texts, nearest, strict=True)) / len(texts)
