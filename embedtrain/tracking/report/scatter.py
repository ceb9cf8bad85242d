"""The map: every text of the sample as a point, queries joined to the documents that answer them."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from embedtrain.tracking.report.chart import element
from embedtrain.tracking.report.flat import Projection
from embedtrain.tracking.report.sample import PairRelation, Role, Sample

SIZE, MARGIN = 560, 14
_JOINED = (PairRelation.positive, PairRelation.high, PairRelation.same)


def scatter(
    title: str, sample: Sample, flat: Projection, colours: Mapping[tuple[str, bool], int], snippets: Sequence[str]
) -> Markup:
    """One map.

    Args:
        title: which it is.
        sample: the texts.
        flat: where they lie.
        colours: of each origin.
        snippets: of each text what is shown of it.
    """
    low, high = flat.points.min(axis=0), flat.points.max(axis=0)
    # One scale for both directions, so that distances are what they seem.
    span = max(float((high - low).max()), 1e-12)
    centre = (low + high) / 2
    places = (flat.points - centre) / span * (SIZE - 2 * MARGIN) * np.array([1.0, -1.0]) + SIZE / 2
    joined = [
        element(
            "path",
            d="".join(_line(places[p.first], places[p.second]) for p in sample.pairs if p.relation in _JOINED),
            class_="joined",
        )
    ]
    points = [
        _point(number, places[number], text.role, colours[text.origin, text.held_out], snippets[number])
        for number, text in enumerate(sample.texts)
    ]
    queries = sum(text.role is Role.query for text in sample.texts)
    told = f"{title}: {len(sample.texts)} texts, {queries} of them queries; {flat.shown:.0%} of the variance is shown"
    return element(
        "svg",
        element("desc", told),
        *joined,
        *points,
        viewBox=f"0 0 {SIZE} {SIZE}",
        role="img",
        aria_label=told,
        class_="map",
    )


def _line(one: np.ndarray, other: np.ndarray) -> str:
    return f"M{one[0]:.1f} {one[1]:.1f}L{other[0]:.1f} {other[1]:.1f}"


def _point(number: int, at: np.ndarray, role: Role, colour: int, snippet: str) -> Markup:
    """Queries are round and filled, documents are square and hollow."""
    title, kind = element("title", snippet), f"k{colour}"
    x, y = float(at[0]), float(at[1])
    if role is Role.document:
        return element(
            "rect", title, x=x - 3.5, y=y - 3.5, width=7, height=7, class_=f"document {kind}", data_text=number
        )
    return element("circle", title, cx=x, cy=y, r=4, class_=f"query {kind}", data_text=number)
