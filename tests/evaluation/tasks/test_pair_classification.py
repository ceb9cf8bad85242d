"""Pair classification against scikit-learn, sentence-transformers and MTEB, on the same vectors."""

import random

import numpy as np
import pytest
from mteb.abstasks import AbsTaskPairClassification
from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator
from sklearn.metrics import average_precision_score

from embedtrain.evaluation.types import LabelledPairs, LoadedSet
from tests.evaluation.tasks.mteb_reference import encoded, figures_of, on_any_ranks, splits, task_of, unit
from tests.small import text


def labelled_pairs(number=41):
    """Pairs with a label that the small model half knows; some pairs are of equal texts, some stand twice."""
    generator = random.Random(1)
    first = [text(i, 3 + i % 5) for i in range(number)]
    second = [text(i if i % 3 == 0 else i + 1 + i % 4, 3 + (i + i % 2) % 5) for i in range(number)]
    labels = [int(generator.random() < (0.8 if i % 3 == 0 else 0.3)) for i in range(number)]
    return LabelledPairs("pairs", [*first, first[1]], [*second, second[1]], [*labels, 1 - labels[1]])


def test_figures_are_those_of_the_fields_tools(ranks):
    data = labelled_pairs()
    figures = on_any_ranks(ranks, LoadedSet(data))["pairs"]
    vectors = ranks(1, encoded, [*data.first, *data.second])[0]

    cosines = (unit([vectors[t] for t in data.first]) * unit([vectors[t] for t in data.second])).sum(1).float().numpy()
    assert len(set(cosines.tolist())) < len(cosines)  # there are ties
    assert figures["ap"] == pytest.approx(average_precision_score(data.labels, cosines), abs=1e-6)
    accuracy, at = BinaryClassificationEvaluator.find_best_acc_and_threshold(cosines, np.array(data.labels), True)
    f1, precision, recall, f1_at = BinaryClassificationEvaluator.find_best_f1_and_threshold(
        cosines, np.array(data.labels), True
    )
    theirs = [accuracy, at, f1, precision, recall, f1_at]
    names = ["accuracy", "accuracy_threshold", "f1", "precision", "recall", "f1_threshold"]
    assert [figures[name] for name in names] == pytest.approx(theirs, abs=1e-6)
    # What the thresholds say by themselves.
    said = cosines > figures["accuracy_threshold"]
    assert figures["accuracy"] == pytest.approx(np.mean(said == data.labels), abs=1e-9)
    assert 0.5 < figures["ap"] < 1

    columns = {"sentence1": data.first, "sentence2": data.second, "labels": data.labels}
    task = task_of(AbsTaskPairClassification, "PairClassification", "max_ap", splits(test=columns))
    mteb = figures_of(task, vectors)
    for name in ("ap", "accuracy", "f1", "precision", "recall"):
        assert figures[name] == pytest.approx(mteb[f"cosine_{name}"], abs=1e-6), name


@pytest.mark.parametrize("labels", [[1], [0], [1, 1, 1], [0, 0, 0]])
def test_one_class_has_figures(ranks, labels):
    sentences = [text(i, 3) for i in range(len(labels))]
    figures = on_any_ranks(ranks, LoadedSet(LabelledPairs("pairs", sentences, sentences[::-1], labels)))["pairs"]
    assert all(np.isfinite(value) for value in figures.values())
    assert (figures["ap"], figures["accuracy"], figures["f1"]) == (labels[0], 1.0, labels[0])
