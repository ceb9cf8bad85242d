"""The sample's vectors in two dimensions: the two directions in which they vary most."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from sklearn.decomposition import PCA

from embedtrain.tracking.report.sample import Vectors


@dataclass(frozen=True, slots=True)
class Projection:
    """Vectors in two dimensions, [n, 2], and which share of their variance that shows."""

    points: NDArray[np.float64]
    shown: float


def project(vectors: Vectors, like: Projection | None = None) -> Projection | None:
    """Principal components of all vectors: exact, so the same figures in every run.

    Args:
        vectors: [n, D].
        like: turned and mirrored, which changes no distance, so that texts lie where they lay there as far as can be.

    Returns:
        None where there is nothing to see: fewer than three texts, or all with one vector.
    """
    values = vectors.values.astype(np.float64)
    if len(values) < 3 or values.shape[1] < 2 or np.ptp(values, axis=0).max() < 1e-9:
        return None
    fitted = PCA(n_components=2, svd_solver="full").fit(values)
    points = fitted.transform(values)
    if like is not None and like.points.shape == points.shape:
        turned, _ = orthogonal_procrustes(points, like.points)
        points = points @ turned
    return Projection(points, float(fitted.explained_variance_ratio_.sum()))
