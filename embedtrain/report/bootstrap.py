"""Confidence intervals of differences between two evaluations of the same queries, by a paired bootstrap.

Efron and Tibshirani, "An Introduction to the Bootstrap" (1993); for rankings Sakai, "Evaluating Evaluation Metrics
Based on the Bootstrap" (SIGIR 2006). Queries are drawn with replacement; a resample has the same queries for both.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
_MAX_CELLS = 1 << 22  # of the differences that are drawn at a time


def _resampled_means(differences: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Differences of queries [Q] to their means in each resample: [RESAMPLES]. The same for the same arguments."""
    generator, count = np.random.default_rng(seed), len(differences)
    rows = max(1, _MAX_CELLS // count)
    return np.concatenate(
        [
            differences[generator.integers(0, count, (min(rows, RESAMPLES - start), count))].mean(axis=1)
            for start in range(0, RESAMPLES, rows)
        ]
    )


def interval(differences: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The percentile interval of the mean over sets of the mean difference over the queries of each set.

    One array per set, at least one query in each: the queries of a set are drawn from that set only.
    """
    means = np.mean([_resampled_means(of_set, number) for number, of_set in enumerate(differences)], axis=0)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
