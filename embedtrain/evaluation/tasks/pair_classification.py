"""Pair classification: do cosines tell pairs that mean the same from those that do not?"""

import numpy as np
from sklearn.metrics import average_precision_score

from embedtrain.evaluation.tasks.measuring import EvaluationContext, fitting
from embedtrain.evaluation.types import LabelledPairs
from embedtrain.inference.exact import cosines

METRICS = ("ap", "accuracy", "f1", "precision", "recall", "accuracy_threshold", "f1_threshold")


def measure(data: LabelledPairs, measuring: EvaluationContext) -> dict[str, float]:
    """Figures of cosines as scores of pairs, the same floats on every rank. A collective.

    Average precision is scikit-learn's. Accuracy, and F1 with its precision and recall, are those at the threshold
    that is best for each, as sentence-transformers' BinaryClassificationEvaluator finds it.
    """
    vectors = measuring.encode_texts([*data.first, *data.second])
    first, second = vectors[: len(data.first)], vectors[len(data.first) :]
    figures: dict[str, float] = {}
    with measuring.world.fail_together(f"computing the metrics of {data.name}"), fitting():
        if measuring.world.is_main:
            # As float32, the cosine of two equal texts is 1 and no neighbour of it: they tie.
            figures = _metrics(cosines(first, second).float().cpu().numpy(), np.asarray(data.labels))
    return measuring.world.broadcast(figures)


def _metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    # Seconds to import, which only a process that has such a set should pay.
    from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator

    accuracy, accuracy_threshold = BinaryClassificationEvaluator.find_best_acc_and_threshold(scores, labels, True)
    best = BinaryClassificationEvaluator.find_best_f1_and_threshold(scores, labels, True)
    values = (average_precision_score(labels, scores), accuracy, *best[:3], accuracy_threshold, best[3])
    return {metric: float(value) for metric, value in zip(METRICS, values, strict=True)}
