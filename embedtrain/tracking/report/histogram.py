"""Histograms of cosines: one outline for each kind of pair, before and after training on the same axis."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from embedtrain.tracking.report.chart import Axis, element, round_numbers, tick_labels
from embedtrain.tracking.report.names import NumberFormat

WIDTH, HEIGHT = 380, 170
LEFT, RIGHT, TOP, BOTTOM = 12.0, 368.0, 8.0, 144.0
BINS = 36


def bins_of(cosines: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Edges [BINS + 1] that hold all of these."""
    values = np.concatenate([np.zeros(0, dtype=np.float32), *cosines])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low, high = np.floor(low * 20 + 1e-6) / 20, np.ceil(high * 20 - 1e-6) / 20
    return np.linspace(low, max(high, low + 0.1), BINS + 1)


def histogram(
    title: str, cosines: Mapping[str, NDArray[np.float32]], edges: NDArray[np.float64], most: float
) -> Markup:
    """The shares of pairs in each bin.

    Args:
        title: what it is of.
        cosines: by kind of pair, in the order of their colours.
        edges: of the bins.
        most: the highest share that a bin has in any histogram beside this one.
    """
    x = Axis(float(edges[0]), float(edges[-1]), LEFT, RIGHT, _ticks(edges))
    y = Axis(0.0, most, BOTTOM, TOP, ())
    shapes = [element("path", d=f"M{LEFT:g} {BOTTOM:g}H{RIGHT:g}", class_="grid")]
    for tick, text in zip(x.ticks, tick_labels(x, NumberFormat.plain), strict=True):
        at = x.place(tick)
        anchor = "end" if at > RIGHT - 10 else "start" if at < LEFT + 10 else "middle"
        shapes.append(element("text", text, x=at, y=BOTTOM + 16, text_anchor=anchor))
    told = []
    for colour, (kind, values) in enumerate(cosines.items()):
        if not len(values):
            continue
        path = _outline(shares(values, edges), edges, x, y)
        shapes.append(element("path", d=path, class_=f"area h{colour}"))
        mean = x.place(float(values.mean()))
        shapes.append(element("path", d=f"M{mean:.1f} {BOTTOM:g}v5", class_=f"mean h{colour}"))
        told.append(f"{kind}: {len(values):,} pairs, mean cosine {values.mean():.3f}")
    return element(
        "svg",
        element("desc", f"{title}. {'; '.join(told)}"),
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {'; '.join(told)}",
        class_="histogram",
    )


def shares(values: NDArray[np.float32], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Which share of values lies in each bin."""
    counts, _ = np.histogram(values, edges)
    part: NDArray[np.float64] = counts / max(1, len(values))
    return part


def _outline(heights: NDArray[np.float64], edges: NDArray[np.float64], x: Axis, y: Axis) -> str:
    across, up = x.at(edges), y.at(heights)
    there = np.flatnonzero(heights)
    first, last = int(there[0]), int(there[-1])
    steps = [f"M{across[first]:.1f} {BOTTOM:g}"]
    steps += [f"V{up[at]:.1f}H{across[at + 1]:.1f}" for at in range(first, last + 1)]
    return "".join([*steps, f"V{BOTTOM:g}Z"])


def _ticks(edges: NDArray[np.float64]) -> tuple[float, ...]:
    low, high = float(edges[0]), float(edges[-1])
    return tuple(tick for tick in round_numbers(low, high, 5) if low - 1e-9 <= tick <= high + 1e-9)
