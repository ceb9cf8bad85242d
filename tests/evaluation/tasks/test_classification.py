"""Classification against MTEB's task on the same vectors: draws, classifiers and metrics."""

import random
from dataclasses import replace

import numpy as np
import pytest
from mteb.abstasks import AbsTaskClassification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.neighbors import KNeighborsClassifier

from embedtrain.config.evaluation import Classifier
from embedtrain.errors import EmbedtrainError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import ClassificationSet, LoadedSet
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, scores_of_task, splits, task_of
from tests.evaluation.tiny import sentence_encoder
from tests.small import WORDS


def classes_of_texts(number, num_classes, seed):
    """Texts most words of which are their class's own; classes of unequal size."""
    generator = random.Random(seed)
    labels = [min(generator.randrange(num_classes + 1), num_classes - 1) for _ in range(number)]
    own = len(WORDS) // num_classes
    texts = [
        " ".join(
            WORDS[(label * own + generator.randrange(own)) if generator.random() < 0.4 else generator.randrange(13)]
            for _ in range(generator.randrange(2, 6))
        )
        for label in labels
    ]
    return texts, labels


def classification_set(num_classes=3, **options):
    train_texts, train_labels = classes_of_texts(90, num_classes, 1)
    texts, labels = classes_of_texts(40, num_classes, 2)
    return ClassificationSet("classes", train_texts, train_labels, texts, labels, **options)


def theirs_of(ranks, data, **attributes):
    vectors = ranks(1, encoded, [*data.train_texts, *data.texts])[0]
    dataset = splits(
        train={"text": data.train_texts, "label": data.train_labels}, test={"text": data.texts, "label": data.labels}
    )
    attributes |= {"samples_per_label": data.samples_per_label, "n_experiments": data.experiments}
    return scores_of_task(task_of(AbsTaskClassification, "Classification", "accuracy", dataset, **attributes), vectors)


@pytest.mark.quick("2-5")
@pytest.mark.parametrize(("num_classes", "samples"), [pytest.param(3, 8, marks=pytest.mark.slow), (2, 5), (3, 1000)])
def test_metrics_equal_mteb(ranks, num_classes, samples):
    data = classification_set(num_classes, samples_per_label=samples)
    metrics = on_any_ranks(ranks, LoadedSet(data))["classes"]
    theirs = theirs_of(ranks, data)
    assert metrics == pytest.approx({metric: theirs[metric] for metric in metrics}, abs=1e-6)
    names = ("accuracy", "f1", "f1_weighted", "precision", "recall")
    assert tuple(metrics) == ((*names, "ap") if num_classes == 2 else names)
    assert 0.3 < metrics["accuracy"] < 1


def test_knn_uses_three_neighbours_by_cosine(ranks):
    data = classification_set(classifier=Classifier.knn, experiments=3)
    metrics = on_any_ranks(ranks, LoadedSet(data))["classes"]
    theirs = theirs_of(ranks, data, evaluator_model=KNeighborsClassifier(n_neighbors=3, metric="cosine"))
    assert metrics == pytest.approx({metric: theirs[metric] for metric in metrics}, abs=1e-6)
    few = replace(data, train_texts=data.train_texts[:9], train_labels=[0, *[1] * 8], samples_per_label=1)
    assert all(np.isfinite(value) for value in on_any_ranks(ranks, LoadedSet(few))["classes"].values())


def test_all_texts_are_one_experiment(ranks):
    data = classification_set(samples_per_label=None)
    metrics = on_any_ranks(ranks, LoadedSet(data))["classes"]
    vectors = ranks(1, encoded, [*data.train_texts, *data.texts])[0]
    model = LogisticRegression(max_iter=100, random_state=42)
    model.fit(np.stack([vectors[text] for text in data.train_texts]), data.train_labels)
    predicted = model.predict(np.stack([vectors[text] for text in data.texts]))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(data.labels, predicted), abs=1e-6)
    assert metrics["f1"] == pytest.approx(f1_score(data.labels, predicted, average="macro"), abs=1e-6)


def test_classes_are_texts_or_numbers_and_may_be_missing_in_training(ranks):
    data = classification_set(2)
    named = replace(
        data,
        train_labels=["no" if label == 0 else "yes" for label in data.train_labels],
        labels=["no" if label == 0 else "yes" for label in data.labels],
    )
    assert on_any_ranks(ranks, LoadedSet(named)) == on_any_ranks(ranks, LoadedSet(data))
    more = replace(classification_set(3), labels=[7, *classification_set(3).labels[1:]])
    metrics = on_any_ranks(ranks, LoadedSet(more))["classes"]
    theirs = theirs_of(ranks, more)
    assert metrics == pytest.approx({metric: theirs[metric] for metric in metrics}, abs=1e-6)


def refused(world, data):
    try:
        return Evaluator([LoadedSet(data)], sentence_encoder(world), world).evaluate()
    except EmbedtrainError as error:
        return str(error)


def test_one_training_class_is_rejected_on_every_rank(ranks):
    data = replace(classification_set(), train_labels=["only"] * 90)
    first, second = ranks(2, refused, data)
    assert first.startswith("classes: ") and "'only'" in first
    assert second.endswith(first)
