"""Clustering: do clusters of vectors agree with those that people made?

Shapes: n texts, D dimensions.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import adjusted_mutual_info_score, v_measure_score

from embedtrain.evaluation.tasks.measuring import SEED, EvaluationContext, fitting
from embedtrain.evaluation.types import ClusteringSet

METRICS = ("v_measure", "v_measure_std", "ami")

# Texts of a draw, with replacement.
_DRAWN = 16384


def measure(data: ClusteringSet, measuring: EvaluationContext) -> dict[str, float]:
    """V-measure (its mean and deviation) and adjusted mutual information, the same on every rank. A collective.

    Clusters, draws and figures are those of MTEB: AbsTaskClusteringLegacy where texts come in groups, the bootstrap of
    AbsTaskClustering where they do not. Vectors are taken as the model gives them.
    """
    encoded = measuring.encode_texts(data.texts)
    figures: dict[str, float] = {}
    with measuring.world.fail_together(f"computing the metrics of {data.name}"), fitting():
        if measuring.world.is_main:
            vectors = encoded.cpu().numpy()
            found = _drawn(vectors, data) if data.groups is None else _grouped(vectors, data, data.groups)
            each = [(v_measure_score(*pair), adjusted_mutual_info_score(*pair)) for pair in found]
            v_measures, amis = zip(*each, strict=True)
            values = (np.mean(v_measures), np.std(v_measures), np.mean(amis))
            figures = {metric: float(value) for metric, value in zip(METRICS, values, strict=True)}
    return measuring.world.broadcast(figures)


Clusterings = Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]


def _grouped(vectors: NDArray[np.float32], data: ClusteringSet, groups: Sequence[Sequence[int]]) -> Clusterings:
    """For each level and group the clusters of its texts: people's, and those found."""
    for level in range(max(map(len, data.labels))):
        rows, clusters = _level(data.labels, level)
        cluster_of = dict(zip(rows.tolist(), clusters.tolist(), strict=True))
        for group in groups:
            some = [row for row in group if row in cluster_of]
            own = np.array([cluster_of[row] for row in some])
            num_clusters = len(np.unique(own))
            if num_clusters < 2:  # whatever one finds of one cluster is right
                yield own, np.zeros_like(own)
                continue
            model = MiniBatchKMeans(n_clusters=num_clusters, batch_size=500, n_init="auto", random_state=SEED)
            yield own, model.fit(vectors[some]).labels_


def _drawn(vectors: NDArray[np.float32], data: ClusteringSet) -> Clusterings:
    """For each level and experiment the clusters of the texts drawn: people's, and those found."""
    generator = random.Random(SEED)
    for level in range(max(map(len, data.labels))):
        rows, clusters = _level(data.labels, level)
        num_clusters = len(np.unique(clusters))
        model = MiniBatchKMeans(n_clusters=num_clusters, batch_size=512, init="k-means++", n_init=1, random_state=SEED)
        for _ in range(data.experiments):
            draw = generator.choices(range(len(rows)), k=max(_DRAWN, num_clusters))
            yield clusters[draw], model.fit_predict(vectors[rows[draw]])


def _level(labels: Sequence[Sequence[int | str]], level: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which texts have a cluster on a level, and that cluster as a number.

    A text without one is left out where clusters are numbers (-1 is none), and belongs to a cluster of all such texts
    where they are texts: MTEB's figures of nested sets are made so.
    """
    of_level = np.array([own[level] if len(own) > level else -1 for own in labels])
    kept = np.ones(len(labels), dtype=bool) if of_level.dtype.kind == "U" else of_level != -1
    rows = kept.nonzero()[0]
    return rows, np.unique(of_level[rows], return_inverse=True)[1]
