"""Long courses of figures made fit for a plot: a moving mean, and few points that look like all of them."""

import numpy as np
from numpy.typing import NDArray

from embedtrain.tracking.report.runs import Series

SMOOTHED_FROM = 60  # points; below that every one of them can be seen


def smoothed(series: Series) -> Series | None:
    """The mean around each point, over a fiftieth of the course; None where there are too few points to need it.

    Points without a value stay so, and count in no mean.
    """
    count = len(series.values)
    if count < SMOOTHED_FROM:
        return None
    width = max(5, count // 50) | 1
    finite = np.isfinite(series.values)
    kernel = np.ones(width)
    sums = np.convolve(np.where(finite, series.values, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(float), kernel, mode="same")
    return Series(series.steps, np.where(finite, sums / np.maximum(counts, 1.0), np.nan))


def thinned(series: Series, most: int) -> Series:
    """At most about `most` points: of each stretch the lowest and the highest, so that no spike is lost.

    The first and the last point stay, and a stretch with a point without a value keeps one such point.
    """
    count = len(series.steps)
    if count <= most:
        return series
    keep: set[int] = {0, count - 1}
    for part in np.array_split(np.arange(count), max(1, most // 2)):
        values = series.values[part]
        finite = np.isfinite(values)
        if not finite.all():
            keep.add(int(part[int(np.argmin(finite))]))
        if finite.any():
            keep.add(int(part[int(np.argmin(np.where(finite, values, np.inf)))]))
            keep.add(int(part[int(np.argmax(np.where(finite, values, -np.inf)))]))
    places: NDArray[np.int64] = np.array(sorted(keep), dtype=np.int64)
    return Series(series.steps[places], series.values[places])


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, the first and the last among them."""
    if count <= most or most < 2:
        return list(range(min(count, most)))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
