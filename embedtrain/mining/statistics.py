"""Quantiles of scores and ranks, for summaries."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


def quantiles(values: NDArray[Any]) -> dict[str, float] | None:
    """The quantiles of QUANTILES; None without values."""
    if not len(values):
        return None
    results = np.quantile(values.astype(np.float64), list(QUANTILES.values()))
    return dict(zip(QUANTILES, results.tolist(), strict=True))
