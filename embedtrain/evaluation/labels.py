"""Texts with labels: classification and clustering.

Shapes: n training texts, m test texts, D dimensions.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    accuracy_score,
    adjusted_mutual_info_score,
    average_precision_score,
    f1_score,
    precision_score,
    recall_score,
    v_measure_score,
)
from sklearn.neighbors import KNeighborsClassifier

from embedtrain.config.evaluation import Classifier
from embedtrain.errors import DataError
from embedtrain.evaluation.metrics import CLUSTERING_METRICS
from embedtrain.evaluation.tasks import SEED, EncoderContext, reproducible_sklearn
from embedtrain.evaluation.types import ClassificationSet, ClusteringSet

_NUM_NEIGHBORS = 3
# Texts of a bootstrap sample of clustering, drawn with replacement.
_SAMPLE_SIZE = 16384

# True and predicted clusters of the same texts.
Clusterings = Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]


def measure_classification(data: ClassificationSet, context: EncoderContext) -> dict[str, float]:
    """Means over experiments, identical on every rank. A collective.

    Samples, classifier and metrics are those of MTEB's AbsTaskClassification; `classifier=knn` is the classifier of its
    first version, the three nearest neighbours by cosine. Vectors are not normalized. F1, precision and recall are
    means over classes. For average precision, the class that sorts last is the positive one. `classifier=centroid` is
    the zero-shot classification of CLIP (Radford et al., 2021, 3.1.4), where the training texts are the prompts of each
    class; accuracy@5 counts those whose class is among the five nearest. Raises DataError on every rank if all training
    texts have the same class.
    """
    world = context.world
    samples: list[NDArray[np.int64]] = []
    with world.fail_together(f"sampling the training texts of {data.name}"):
        train_classes, classes = _class_numbers(data)
        if len(np.unique(train_classes)) < 2:
            raise DataError(
                f"{data.name}: all training texts have the class {data.train_labels[0]!r}; a classifier needs two"
            )
        takes_all = data.classifier is Classifier.centroid
        samples = _draw_samples(train_classes, None if takes_all else data.samples_per_label, data.experiments)
    used = np.unique(np.concatenate(samples))
    encoded = context.encode_texts([*(data.train_texts[row] for row in used.tolist()), *data.texts])
    metrics: dict[str, float] = {}
    with world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if world.is_main:
            vectors = encoded.cpu().numpy()
            results = []
            for sample in samples:
                classifier = _make_classifier(data.classifier, len(sample))
                classifier.fit(vectors[np.searchsorted(used, sample)], train_classes[sample])
                results.append(_classification_metrics(classes, classifier.predict(vectors[len(used) :])))
                if isinstance(classifier, _Centroids):
                    nearest = classifier.nearest(vectors[len(used) :], 5)
                    results[-1]["accuracy@5"] = float((nearest == classes[:, None]).any(axis=1).mean())
            metrics = {metric: float(np.mean([result[metric] for result in results])) for metric in results[0]}
    return world.broadcast(metrics)


def _class_numbers(data: ClassificationSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The classes of training and test texts as numbers, in the order in which scikit-learn sorts the labels."""
    labels = sorted({*data.train_labels, *data.labels}, key=lambda label: (isinstance(label, str), label))
    number_of = {label: number for number, label in enumerate(labels)}

    def numbers(labels: Sequence[int | str]) -> NDArray[np.int64]:
        return np.array([number_of[label] for label in labels], dtype=np.int64)

    return numbers(data.train_labels), numbers(data.labels)


def _draw_samples(
    classes: NDArray[np.int64], samples_per_label: int | None, experiments: int
) -> list[NDArray[np.int64]]:
    """The training rows of each experiment: a number of each class, or a single experiment with all rows.

    As in MTEB, every experiment shuffles the order that the previous one left, with the same seed.
    """
    rows = np.arange(len(classes))
    if samples_per_label is None:
        return [rows]
    samples = []
    for _ in range(experiments):
        np.random.RandomState(SEED).shuffle(rows)
        counts: Counter[int] = Counter()
        sample = []
        for row, label in zip(rows.tolist(), classes[rows].tolist(), strict=True):
            if counts[label] < samples_per_label:
                counts[label] += 1
                sample.append(row)
        samples.append(np.array(sample))
    return samples


class _Centroids:
    """Classes by the cosine to the mean of the normalised vectors of each; the first of equally near ones."""

    def fit(self, vectors: NDArray[np.float32], classes: NDArray[np.int64]) -> None:
        self._classes = np.unique(classes)
        unit = _normalised(vectors)
        self._means = _normalised(np.stack([unit[classes == label].mean(axis=0) for label in self._classes]))

    def nearest(self, vectors: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """The nearest classes of n vectors, the nearest first, int64 [n, count] or as many as there are."""
        order = np.argsort(-(_normalised(vectors) @ self._means.T), axis=1, kind="stable")
        found: NDArray[np.int64] = self._classes[order[:, :count]]
        return found

    def predict(self, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        return self.nearest(vectors, 1)[:, 0]


def _normalised(vectors: NDArray[Any]) -> NDArray[np.float64]:
    rows = vectors.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def _make_classifier(classifier: Classifier, num_texts: int) -> LogisticRegression | KNeighborsClassifier | _Centroids:
    if classifier is Classifier.centroid:
        return _Centroids()
    if classifier is Classifier.knn:
        return KNeighborsClassifier(n_neighbors=min(_NUM_NEIGHBORS, num_texts), metric="cosine")
    return LogisticRegression(max_iter=100, random_state=SEED)


def _classification_metrics(classes: NDArray[np.int64], predicted: NDArray[np.int64]) -> dict[str, float]:
    metrics = {
        "accuracy": accuracy_score(classes, predicted),
        "f1": f1_score(classes, predicted, average="macro", zero_division=0.0),
        "f1_weighted": f1_score(classes, predicted, average="weighted", zero_division=0.0),
        "precision": precision_score(classes, predicted, average="macro", zero_division=0.0),
        "recall": recall_score(classes, predicted, average="macro", zero_division=0.0),
    }
    if len(np.unique(classes)) == 2:
        metrics["ap"] = average_precision_score(classes == classes.max(), predicted)
    return metrics


def measure_clustering(data: ClusteringSet, context: EncoderContext) -> dict[str, float]:
    """V-measure (mean and standard deviation) and adjusted mutual information, identical on every rank. A collective.

    Clusters, samples and metrics are those of MTEB: AbsTaskClusteringLegacy if texts come in groups, otherwise the
    bootstrap of AbsTaskClustering. Vectors are not normalized.
    """
    encoded = context.encode_texts(data.texts)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if context.world.is_main:
            vectors = encoded.cpu().numpy()
            clusterings = (
                _cluster_samples(vectors, data) if data.groups is None else _cluster_groups(vectors, data, data.groups)
            )
            scores = [(v_measure_score(*pair), adjusted_mutual_info_score(*pair)) for pair in clusterings]
            v_measures, amis = zip(*scores, strict=True)
            values = (np.mean(v_measures), np.std(v_measures), np.mean(amis))
            metrics = {metric: float(value) for metric, value in zip(CLUSTERING_METRICS, values, strict=True)}
    return context.world.broadcast(metrics)


def _cluster_groups(vectors: NDArray[np.float32], data: ClusteringSet, groups: Sequence[Sequence[int]]) -> Clusterings:
    """Cluster the texts of each group, on each level."""
    for level in range(max(map(len, data.labels))):
        rows, clusters = _labels_of_level(data.labels, level)
        cluster_of = dict(zip(rows.tolist(), clusters.tolist(), strict=True))
        for group in groups:
            labelled = [row for row in group if row in cluster_of]
            expected = np.array([cluster_of[row] for row in labelled])
            num_clusters = len(np.unique(expected))
            if num_clusters < 2:  # any prediction of a single cluster is right
                yield expected, np.zeros_like(expected)
                continue
            model = MiniBatchKMeans(n_clusters=num_clusters, batch_size=500, n_init="auto", random_state=SEED)
            yield expected, model.fit(vectors[labelled]).labels_


def _cluster_samples(vectors: NDArray[np.float32], data: ClusteringSet) -> Clusterings:
    """Cluster the texts of each bootstrap sample, on each level."""
    generator = random.Random(SEED)
    for level in range(max(map(len, data.labels))):
        rows, clusters = _labels_of_level(data.labels, level)
        num_clusters = len(np.unique(clusters))
        model = MiniBatchKMeans(n_clusters=num_clusters, batch_size=512, init="k-means++", n_init=1, random_state=SEED)
        for _ in range(data.experiments):
            sample = generator.choices(range(len(rows)), k=max(_SAMPLE_SIZE, num_clusters))
            yield clusters[sample], model.fit_predict(vectors[rows[sample]])


def _labels_of_level(labels: Sequence[Sequence[int | str]], level: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The texts that have a cluster on a level, and their clusters as numbers.

    As in MTEB, a text without a cluster on this level is skipped if clusters are numbers (-1 means none), and belongs
    to a cluster of all such texts if they are strings.
    """
    of_level = np.array([of_text[level] if len(of_text) > level else -1 for of_text in labels])
    has_cluster = np.ones(len(labels), dtype=bool) if of_level.dtype.kind == "U" else of_level != -1
    rows = has_cluster.nonzero()[0]
    return rows, np.unique(of_level[rows], return_inverse=True)[1]
