"""Plots of the sample: histograms of cosines, and a map of all texts in two dimensions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from embedtrain.report.axes import Axis, NumberFormat, round_numbers, tick_labels
from embedtrain.report.chart import element
from embedtrain.report.sample import PairRelation, Role, Sample, Vectors

WIDTH, HEIGHT = 380, 170  # of a histogram
LEFT, RIGHT, TOP, BOTTOM = 12.0, 368.0, 8.0, 144.0
NUM_BINS = 36
MAP_SIZE, MAP_MARGIN = 560, 14
_JOINED = (PairRelation.positive, PairRelation.high, PairRelation.same)


def bin_edges(cosines: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Edges [NUM_BINS + 1] that contain all cosines."""
    values = np.concatenate([np.zeros(0, dtype=np.float32), *cosines])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low, high = np.floor(low * 20 + 1e-6) / 20, np.ceil(high * 20 - 1e-6) / 20
    return np.linspace(low, max(high, low + 0.1), NUM_BINS + 1)


def bin_fractions(values: NDArray[np.float32], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The fraction of values in each bin."""
    counts, _ = np.histogram(values, edges)
    fractions: NDArray[np.float64] = counts / max(1, len(values))
    return fractions


def histogram(
    title: str, cosines: Mapping[str, NDArray[np.float32]], edges: NDArray[np.float64], highest: float
) -> Markup:
    """The fraction of pairs in each bin, an outline per kind of pair (kinds in the order of their colours).

    `highest` is the largest fraction of a bin in any histogram with the same axis.
    """
    x = Axis(float(edges[0]), float(edges[-1]), LEFT, RIGHT, _ticks(edges))
    y = Axis(0.0, highest, BOTTOM, TOP, ())
    shapes = [element("path", d=f"M{LEFT:g} {BOTTOM:g}H{RIGHT:g}", class_="grid")]
    for tick, text in zip(x.ticks, tick_labels(x, NumberFormat.plain), strict=True):
        position = x.position(tick)
        anchor = "end" if position > RIGHT - 10 else "start" if position < LEFT + 10 else "middle"
        shapes.append(element("text", text, x=position, y=BOTTOM + 16, text_anchor=anchor))
    summaries = []
    for colour, (kind, values) in enumerate(cosines.items()):
        if not len(values):
            continue
        path = _outline(bin_fractions(values, edges), edges, x, y)
        shapes.append(element("path", d=path, class_=f"area h{colour}"))
        mean = x.position(float(values.mean()))
        shapes.append(element("path", d=f"M{mean:.1f} {BOTTOM:g}v5", class_=f"mean h{colour}"))
        summaries.append(f"{kind}: {len(values):,} pairs, mean cosine {values.mean():.3f}")
    summary = f"{title}. {'; '.join(summaries)}"
    return element(
        "svg",
        element("desc", summary),
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=summary,
        class_="histogram",
    )


def _outline(heights: NDArray[np.float64], edges: NDArray[np.float64], x: Axis, y: Axis) -> str:
    across, up = x.positions(edges), y.positions(heights)
    not_empty = np.flatnonzero(heights)
    first, last = int(not_empty[0]), int(not_empty[-1])
    steps = [f"M{across[first]:.1f} {BOTTOM:g}"]
    steps += [f"V{up[index]:.1f}H{across[index + 1]:.1f}" for index in range(first, last + 1)]
    return "".join([*steps, f"V{BOTTOM:g}Z"])


def _ticks(edges: NDArray[np.float64]) -> tuple[float, ...]:
    low, high = float(edges[0]), float(edges[-1])
    return tuple(tick for tick in round_numbers(low, high, 5) if low - 1e-9 <= tick <= high + 1e-9)


@dataclass(frozen=True, slots=True)
class Projection:
    """Vectors in two dimensions, [n, 2], and the fraction of their variance that this shows."""

    points: NDArray[np.float64]
    variance: float


def project(vectors: Vectors, reference: Projection | None = None) -> Projection | None:
    """The first two principal components; computed exactly, so they are the same in every run.

    With a reference the points are rotated and mirrored, which changes no distance, so that texts lie as near as
    possible to their points there. None if there are fewer than three texts, or if all have the same vector.
    """
    from scipy.linalg import orthogonal_procrustes
    from sklearn.decomposition import PCA  # takes a second, which the start of a training should not wait for

    values = vectors.values.astype(np.float64)
    if len(values) < 3 or values.shape[1] < 2 or np.ptp(values, axis=0).max() < 1e-9:
        return None
    pca = PCA(n_components=2, svd_solver="full").fit(values)
    points = pca.transform(values)
    if reference is not None and reference.points.shape == points.shape:
        rotation, _ = orthogonal_procrustes(points, reference.points)
        points = points @ rotation
    return Projection(points, float(pca.explained_variance_ratio_.sum()))


def scatter_plot(
    title: str, sample: Sample, projection: Projection, colours: Mapping[tuple[str, bool], int], snippets: Sequence[str]
) -> Markup:
    """The map: every text of the sample as a point, with lines between queries and relevant documents."""
    low, high = projection.points.min(axis=0), projection.points.max(axis=0)
    # The same scale in both directions, so that distances are true.
    span = max(float((high - low).max()), 1e-12)
    centre = (low + high) / 2
    positions = (projection.points - centre) / span * (MAP_SIZE - 2 * MAP_MARGIN) * np.array([1.0, -1.0]) + MAP_SIZE / 2
    lines = element(
        "path",
        d="".join(
            _line(positions[pair.first], positions[pair.second]) for pair in sample.pairs if pair.relation in _JOINED
        ),
        class_="joined",
    )
    points = [
        _point(index, positions[index], text.role, colours[text.origin, text.held_out], snippets[index])
        for index, text in enumerate(sample.texts)
    ]
    queries = sum(text.role is Role.query for text in sample.texts)
    summary = (
        f"{title}: {len(sample.texts)} texts, {queries} of them queries; {projection.variance:.0%} of the variance"
    )
    return element(
        "svg",
        element("desc", summary),
        lines,
        *points,
        viewBox=f"0 0 {MAP_SIZE} {MAP_SIZE}",
        role="img",
        aria_label=summary,
        class_="map",
    )


def _line(start: np.ndarray, end: np.ndarray) -> str:
    return f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"


def _point(index: int, position: np.ndarray, role: Role, colour: int, snippet: str) -> Markup:
    """Queries are filled circles, documents are hollow squares."""
    title, class_ = element("title", snippet), f"k{colour}"
    x, y = float(position[0]), float(position[1])
    if role is Role.document:
        return element(
            "rect", title, x=x - 3.5, y=y - 3.5, width=7, height=7, class_=f"document {class_}", data_text=index
        )
    return element("circle", title, cx=x, cy=y, r=4, class_=f"query {class_}", data_text=index)
