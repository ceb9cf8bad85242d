"""Pair classification against scikit-learn, sentence-transformers and MTEB, on the same vectors."""

import random

import numpy as np
import pytest
import sentence_transformers
from mteb.abstasks import AbsTaskPairClassification
from packaging.version import Version
from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator
from sklearn.metrics import average_precision_score

from embedtrain.evaluation.types import LabelledPairs, LoadedSet
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, scores_of_task, splits, task_of, unit
from tests.small import text


def labelled_pairs(number=41):
    """Pairs with a label that the small model predicts in part; pairs of equal texts, and repeated pairs."""
    generator = random.Random(1)
    first = [text(i, 3 + i % 5) for i in range(number)]
    second = [text(i if i % 3 == 0 else i + 1 + i % 4, 3 + (i + i % 2) % 5) for i in range(number)]
    labels = [int(generator.random() < (0.8 if i % 3 == 0 else 0.3)) for i in range(number)]
    return LabelledPairs("pairs", [*first, first[1]], [*second, second[1]], [*labels, 1 - labels[1]])


def test_metrics_equal_other_libraries(ranks):
    data = labelled_pairs()
    metrics = on_any_ranks(ranks, LoadedSet(data))["pairs"]
    vectors = ranks(1, encoded, [*data.first, *data.second])[0]

    cosines = (unit([vectors[t] for t in data.first]) * unit([vectors[t] for t in data.second])).sum(1).float().numpy()
    assert len(set(cosines.tolist())) < len(cosines)  # there are ties
    assert metrics["ap"] == pytest.approx(average_precision_score(data.labels, cosines), abs=1e-6)
    accuracy, at = BinaryClassificationEvaluator.find_best_acc_and_threshold(cosines, np.array(data.labels), True)
    f1, precision, recall, f1_at = BinaryClassificationEvaluator.find_best_f1_and_threshold(
        cosines, np.array(data.labels), True
    )
    theirs = [accuracy, at, f1, precision, recall, f1_at]
    names = ["accuracy", "accuracy_threshold", "f1", "precision", "recall", "f1_threshold"]
    assert [metrics[name] for name in names] == pytest.approx(theirs, abs=1e-6)
    # What the thresholds say by themselves.
    predicted = cosines > metrics["accuracy_threshold"]
    assert metrics["accuracy"] == pytest.approx(np.mean(predicted == data.labels), abs=1e-9)
    assert 0.5 < metrics["ap"] < 1

    columns = {"sentence1": data.first, "sentence2": data.second, "labels": data.labels}
    task = task_of(AbsTaskPairClassification, "PairClassification", "max_ap", splits(test=columns))
    mteb = scores_of_task(task, vectors)
    for name in ("ap", "accuracy", "f1", "precision", "recall"):
        assert metrics[name] == pytest.approx(mteb[f"cosine_{name}"], abs=1e-6), name


@pytest.mark.skipif(
    Version(sentence_transformers.__version__) < Version("6.2"),
    reason="the accuracy and F1 of sentence-transformers are 0 for a single class before 6.2",
)
@pytest.mark.parametrize("labels", [[1], [0], [1, 1, 1], [0, 0, 0]])
def test_pairs_of_one_class_have_finite_metrics(ranks, labels):
    sentences = [text(i, 3) for i in range(len(labels))]
    metrics = on_any_ranks(ranks, LoadedSet(LabelledPairs("pairs", sentences, sentences[::-1], labels)))["pairs"]
    assert all(np.isfinite(value) for value in metrics.values())
    assert (metrics["ap"], metrics["accuracy"], metrics["f1"]) == (labels[0], 1.0, labels[0])
