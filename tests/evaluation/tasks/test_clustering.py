"""Clustering against MTEB's two tasks on the same vectors, and scikit-learn's metrics."""

import random

import numpy as np
import pytest
from mteb.abstasks import AbsTaskClustering
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import adjusted_mutual_info_score

from embedtrain.evaluation.types import ClusteringSet, LoadedSet
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, scores_of_task, splits, task_of
from tests.evaluation.tasks.test_classification import classes_of_texts


def theirs_of(ranks, data, labels):
    vectors = ranks(1, encoded, data.texts)[0]
    dataset = splits(test={"sentences": data.texts, "labels": labels})
    # All texts, as in the set.
    task = task_of(
        AbsTaskClustering, "Clustering", "v_measure", dataset,
        n_clusters=data.experiments, max_fraction_of_documents_to_embed=None,
    )  # fmt: skip
    return scores_of_task(task, vectors)


def test_drawn_clusters_equal_mteb(ranks):
    texts, labels = classes_of_texts(50, 3, 1)
    data = ClusteringSet("clusters", texts, [[label] for label in labels], experiments=2)
    metrics = on_any_ranks(ranks, LoadedSet(data))["clusters"]
    theirs = theirs_of(ranks, data, labels)
    assert metrics == pytest.approx({metric: theirs[metric] for metric in metrics}, abs=1e-6)
    assert tuple(metrics) == ("v_measure", "v_measure_std", "ami")
    assert 0 < metrics["v_measure"] < 1


@pytest.mark.parametrize("named", [True, False])
def test_nested_clusters_equal_mteb(ranks, named):
    """A text without a finer cluster: a cluster of its own kind where clusters are texts, left out otherwise."""
    generator = random.Random(3)
    texts, coarse = classes_of_texts(40, 2, 1)
    labels = [[c, 10 * c + generator.randrange(3)][: 1 + (i % 5 > 0)] for i, c in enumerate(coarse)]
    if named:
        labels = [[f"c{label}" for label in own] for own in labels]
    data = ClusteringSet("clusters", texts, labels, experiments=1)
    metrics = on_any_ranks(ranks, LoadedSet(data))["clusters"]
    theirs = theirs_of(ranks, data, labels)
    assert metrics == pytest.approx({metric: theirs[metric] for metric in metrics}, abs=1e-6)


def test_grouped_clusters_equal_mteb(ranks):
    texts, labels = classes_of_texts(60, 4, 1)
    groups = [list(range(25)), list(range(20, 50)), [3], [i for i in range(60) if labels[i] == 1]]
    data = ClusteringSet("clusters", texts, [[label] for label in labels], groups)
    metrics = on_any_ranks(ranks, LoadedSet(data))["clusters"]
    vectors = ranks(1, encoded, data.texts)[0]
    dataset = splits(
        test={
            "sentences": [[texts[i] for i in group] for group in groups],
            "labels": [[labels[i] for i in group] for group in groups],
        }
    )
    theirs = scores_of_task(task_of(AbsTaskClusteringLegacy, "Clustering", "v_measure", dataset), vectors)
    assert metrics["v_measure"] == pytest.approx(theirs["v_measure"], abs=1e-6)
    assert metrics["v_measure_std"] == pytest.approx(theirs["v_measure_std"], abs=1e-6)
    amis = []
    for group in groups:
        own = [labels[i] for i in group]
        model = MiniBatchKMeans(n_clusters=len(set(own)), batch_size=500, n_init="auto", random_state=42)
        amis.append(adjusted_mutual_info_score(own, model.fit(np.stack([vectors[texts[i]] for i in group])).labels_))
    assert metrics["ami"] == pytest.approx(np.mean(amis), abs=1e-6)
