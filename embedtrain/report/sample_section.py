"""The sections of the page about the sample: separation of pairs, the map, and neighbours, with their plots.

n texts, D dimensions; all vectors have unit length, so products are cosines.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from embedtrain.data.images.item import Picture, described, pictures_of
from embedtrain.report.chart import Axis, NumberFormat, element, evenly_spaced, round_numbers, tick_labels
from embedtrain.report.runs import RunRecords
from embedtrain.report.sample import EncodedSample, PairRelation, Role, Sample, Vectors

PairIndices = NDArray[np.int64]  # [P, 2], indices of two texts

NUM_NEIGHBOURS = 5
NUM_QUERIES = 10


class PairFamily(str, Enum):
    """What kind of data pairs come from."""

    search = "queries and documents"
    scored = "scored pairs"
    classes = "labelled pairs and classes"


@dataclass(frozen=True, slots=True)
class PairKind:
    """Pairs of one kind: their name in a legend, and their texts."""

    name: str
    pairs: PairIndices


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Pairs of one origin that a good model separates."""

    origin: str  # the evaluation set or training source
    held_out: bool  # whether that is an evaluation set
    family: PairFamily
    kinds: tuple[PairKind, ...]  # pairs that should be similar first, pairs that should not be similar last

    def separation(self, vectors: Vectors) -> float | None:
        """The probability that a pair of the first kind is more similar than one of the last (area under the ROC)."""
        from sklearn.metrics import roc_auc_score  # takes a second, which the start of a training should not wait for

        similar, dissimilar = self.kinds[0], self.kinds[-1]
        if len(self.kinds) < 2 or not len(similar.pairs) or not len(dissimilar.pairs):
            return None
        scores = np.concatenate([cosines(vectors, similar.pairs), cosines(vectors, dissimilar.pairs)])
        return float(roc_auc_score(np.repeat([1, 0], [len(similar.pairs), len(dissimilar.pairs)]), scores))


@dataclass(frozen=True, slots=True)
class NearestDocument:
    """A retrieved document: the index of its text, its cosine, and its labelled relation to the query, if any."""

    text: int
    cosine: float
    relation: PairRelation | None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The documents nearest to a query, and the rank of the best relevant one among `num_documents`."""

    nearest: tuple[NearestDocument, ...]
    rank: int | None
    num_documents: int


def cosines(vectors: Vectors, pairs: PairIndices) -> NDArray[np.float32]:
    """Of pairs [P, 2]: [P]."""
    products = np.einsum("pd,pd->p", vectors.values[pairs[:, 0]], vectors.values[pairs[:, 1]])
    clipped: NDArray[np.float32] = np.clip(products, -1.0, 1.0)  # rounding gives 1.0000001
    return clipped


def group_pairs(sample: Sample) -> list[PairGroup]:
    """All pairs of the sample, by origin and family."""
    origins = dict.fromkeys((text.origin, text.held_out) for text in sample.texts)
    labelled: dict[tuple[str, bool], dict[PairRelation, list[tuple[int, int]]]] = {origin: {} for origin in origins}
    for pair in sample.pairs:
        text = sample.texts[pair.first]
        labelled[text.origin, text.held_out].setdefault(pair.relation, []).append((pair.first, pair.second))
    groups = []
    for (origin, held_out), pairs in labelled.items():
        scored = [
            PairKind(f"{relation.value} score", _indices(pairs.get(relation, [])))
            for relation in (PairRelation.high, PairRelation.middle, PairRelation.low)
        ]
        for family, kinds in (
            (PairFamily.search, _search_kinds(sample, origin, held_out, pairs)),
            (PairFamily.scored, scored),
            (PairFamily.classes, _class_kinds(sample, origin, held_out, pairs)),
        ):
            not_empty = tuple(kind for kind in kinds if len(kind.pairs))
            if not_empty:
                groups.append(PairGroup(origin, held_out, family, not_empty))
    return groups


def _search_kinds(
    sample: Sample, origin: str, held_out: bool, pairs: Mapping[PairRelation, list[tuple[int, int]]]
) -> list[PairKind]:
    """Positives, hard negatives, and each query with every unlabelled document."""
    positives = pairs.get(PairRelation.positive, [])
    if not positives:
        return []
    indices = [index for index, text in enumerate(sample.texts) if (text.origin, text.held_out) == (origin, held_out)]
    queries = dict.fromkeys(first for first, _ in positives)
    documents = [index for index in indices if sample.texts[index].role is Role.document]
    documents = documents or list(dict.fromkeys(second for _, second in positives))
    labelled = {pair for of_relation in pairs.values() for pair in of_relation}
    texts = {index: sample.texts[index].text for index in indices}
    chance = [
        (query, document)
        for query in queries
        for document in documents
        if query != document and (query, document) not in labelled and texts[query] != texts[document]
    ]
    negatives = pairs.get(PairRelation.negative, [])
    return [
        PairKind("positives", _indices(positives)),
        PairKind("judged or given negatives" if held_out else "hard negatives", _indices(negatives)),
        PairKind("chance pairs", _indices(chance)),
    ]


def _class_kinds(
    sample: Sample, origin: str, held_out: bool, pairs: Mapping[PairRelation, list[tuple[int, int]]]
) -> list[PairKind]:
    """Labelled pairs, and pairs of texts with the same class or different classes."""
    same, different = (list(pairs.get(relation, [])) for relation in (PairRelation.same, PairRelation.different))
    indices = [
        index
        for index, text in enumerate(sample.texts)
        if (text.origin, text.held_out) == (origin, held_out) and text.label is not None
    ]
    for number, first in enumerate(indices):
        for second in indices[number + 1 :]:
            (same if sample.texts[first].label == sample.texts[second].label else different).append((first, second))
    return [PairKind("same", _indices(same)), PairKind("different", _indices(different))]


def _indices(pairs: Sequence[tuple[int, int]]) -> PairIndices:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def select_queries(sample: Sample) -> list[int]:
    """Queries to show with their neighbours: held-out ones if there are any, evenly from every origin."""
    answered = {pair.first for pair in sample.pairs if pair.relation is PairRelation.positive}
    by_origin: dict[str, list[int]] = {}
    held_out = any(sample.texts[index].held_out for index in answered)
    for index in sorted(answered):
        text = sample.texts[index]
        if text.held_out == held_out and text.role is Role.query:
            by_origin.setdefault(text.origin, []).append(index)
    selected: list[int] = []
    per_origin = -(-NUM_QUERIES // max(1, len(by_origin)))
    for queries in by_origin.values():
        selected += [queries[index] for index in evenly_spaced(len(queries), per_origin)]
    return selected[:NUM_QUERIES]


def nearest_documents(sample: Sample, vectors: Vectors, query: int) -> QueryResult:
    """The nearest documents among those of the query's own set or source."""
    query_text = sample.texts[query]
    documents = np.array(
        [
            index
            for index, text in enumerate(sample.texts)
            if (text.origin, text.held_out, text.role) == (query_text.origin, query_text.held_out, Role.document)
            and text.text != query_text.text
        ],
        dtype=np.int64,
    )
    relations = {pair.second: pair.relation for pair in sample.pairs if pair.first == query}
    scores = vectors.values[documents] @ vectors.values[query]
    order = np.lexsort((documents, -scores))
    relevant_ranks = [
        rank for rank, index in enumerate(order, 1) if relations.get(int(documents[index])) is PairRelation.positive
    ]
    nearest = tuple(
        NearestDocument(int(documents[index]), float(scores[index]), relations.get(int(documents[index])))
        for index in order[:NUM_NEIGHBOURS]
    )
    return QueryResult(nearest, relevant_ranks[0] if relevant_ranks else None, len(documents))


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


TEXT_LENGTH, SNIPPET_LENGTH = 240, 90  # characters
MAX_COLOURS = 8
# Characters that change the direction of the text after them.
_DIRECTION_MARKS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sample as encoded at one time: a name for that time, and the vectors."""

    name: str
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class Histograms:
    """Cosines of one family of pairs, held out or trained on: a picture per snapshot, and the kinds of pairs."""

    heading: str
    kinds: tuple[str, ...]
    pictures: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True, slots=True)
class Separation:
    """How well the pairs of one origin are separated: for each snapshot the mean cosines and the ROC area."""

    origin: str
    kinds: str
    pairs: str
    means: tuple[str, ...]
    areas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A retrieved document as it is shown."""

    cosine: str
    mark: str  # `yes`, `no` or empty
    text: str
    images: tuple[str, ...]  # data URIs


@dataclass(frozen=True, slots=True)
class QueryExample:
    """A query, and for each snapshot the rank of its best document in words, and its neighbours."""

    text: str
    images: tuple[str, ...]  # data URIs
    origin: str
    results: tuple[tuple[str, str, tuple[Neighbour, ...]], ...]


@dataclass(frozen=True, slots=True)
class SampleSection:
    """Everything that the page shows about a run's sample."""

    label: str
    num_texts: int
    snapshots: tuple[str, ...]
    histograms: tuple[Histograms, ...]
    separations: tuple[Separation, ...]
    origins: tuple[tuple[str, int], ...]
    maps: tuple[tuple[str, str, Markup], ...]
    queries: tuple[QueryExample, ...]
    held_out: bool


def sample_section(run: RunRecords) -> SampleSection | None:
    """The section of a run; None if it has no sample with vectors."""
    if run.sample is None or not run.sample.sample.texts:
        return None
    sample, snapshots, thumbnails = run.sample.sample, _snapshots(run.sample), run.sample.thumbnails
    if not snapshots:
        return None
    groups = group_pairs(sample)
    colours = _colours(sample)
    queries = select_queries(sample)
    origins: dict[str, int] = {}
    for (origin, held_out), colour in colours.items():
        name = origin if held_out else f"{origin} (training)"
        origins["others" if colour == MAX_COLOURS - 1 and len(colours) > MAX_COLOURS else name] = colour
    return SampleSection(
        run.label,
        len(sample.texts),
        tuple(snapshot.name for snapshot in snapshots),
        tuple(_histograms(groups, snapshots)),
        tuple(_separation(group, snapshots) for group in groups if len(group.kinds) > 1),
        tuple(origins.items()),
        tuple(_maps(sample, snapshots, colours)),
        tuple(_query_example(sample, snapshots, query, thumbnails) for query in queries),
        any(sample.texts[query].held_out for query in queries),
    )


def shown_pictures(encoded: EncodedSample) -> list[Picture]:
    """The pictures among the queries and neighbours that the page shows."""
    sample = encoded.sample
    texts = queries = select_queries(sample)
    for snapshot in _snapshots(encoded):
        results = [nearest_documents(sample, snapshot.vectors, query) for query in queries]
        texts = texts + [document.text for result in results for document in result.nearest]
    return [picture for number in texts for picture in pictures_of(sample.texts[number].text)]


def shorten(text: str, length: int = TEXT_LENGTH) -> str:
    """At most `length` characters of a text on one line, without invisible characters and direction marks."""
    text = described(text)
    # The beginning, with some reserve for removed characters, is enough.
    beginning = (" " if letter.isspace() else letter for letter in text[: 2 * length + 100])
    visible = "".join(
        letter
        for letter in beginning
        if unicodedata.category(letter) not in ("Cc", "Cs", "Co") and letter not in _DIRECTION_MARKS
    )
    line = " ".join(visible.split())
    if len(line) > length:
        line = line[:length].rstrip() + " …"
    return line or "(nothing)"


def _snapshots(encoded: EncodedSample) -> list[Snapshot]:
    snapshots = []
    if encoded.before is not None:
        snapshots.append(Snapshot("before training", encoded.before))
    if encoded.after is not None:
        snapshots.append(Snapshot(f"after step {encoded.after.step:,}", encoded.after))
    if len({snapshot.vectors.values.shape[1] for snapshot in snapshots}) > 1:
        return snapshots[-1:]  # of different models
    return snapshots


def _colours(sample: Sample) -> dict[tuple[str, bool], int]:
    """Colours by origin, held-out sets first; origins beyond the last colour share it."""
    origins = dict.fromkeys((text.origin, text.held_out) for text in sample.texts)
    ordered = sorted(origins, key=lambda origin: not origin[1])
    return {origin: min(number, MAX_COLOURS - 1) for number, origin in enumerate(ordered)}


def _histograms(groups: Sequence[PairGroup], snapshots: Sequence[Snapshot]) -> list[Histograms]:
    histograms = []
    for held_out in (True, False):
        for family in PairFamily:
            selected = [group for group in groups if group.held_out == held_out and group.family is family]
            kinds = list(dict.fromkeys(kind.name for group in selected for kind in group.kinds))
            if not kinds:
                continue
            pairs = {
                name: np.concatenate([kind.pairs for group in selected for kind in group.kinds if kind.name == name])
                for name in kinds
            }
            values = [{name: cosines(snapshot.vectors, of) for name, of in pairs.items()} for snapshot in snapshots]
            edges = bin_edges([of_kind for by_kind in values for of_kind in by_kind.values()])
            highest = max(
                float(bin_fractions(of_kind, edges).max()) for by_kind in values for of_kind in by_kind.values()
            )
            heading = f"{'Held out' if held_out else 'Training rows'}: {family.value}"
            pictures = tuple(
                (snapshot.name, histogram(f"{heading}, {snapshot.name}", by_kind, edges, highest))
                for snapshot, by_kind in zip(snapshots, values, strict=True)
            )
            histograms.append(Histograms(heading, tuple(kinds), pictures))
    return histograms


def _separation(group: PairGroup, snapshots: Sequence[Snapshot]) -> Separation:
    kinds = (group.kinds[0], group.kinds[-1])
    means = tuple(
        " / ".join(f"{cosines(snapshot.vectors, kind.pairs).mean():.3f}" for kind in kinds) for snapshot in snapshots
    )
    areas = (group.separation(snapshot.vectors) for snapshot in snapshots)
    return Separation(
        group.origin if group.held_out else f"{group.origin} (training)",
        f"{kinds[0].name} / {kinds[1].name}",
        f"{len(kinds[0].pairs):,} / {len(kinds[1].pairs):,}",
        means,
        tuple("—" if area is None else f"{area:.1%}" for area in areas),
    )


def _maps(
    sample: Sample, snapshots: Sequence[Snapshot], colours: Mapping[tuple[str, bool], int]
) -> list[tuple[str, str, Markup]]:
    snippets = [
        f"{text.role.value}, {shorten(text.origin, 40)}: {shorten(text.text, SNIPPET_LENGTH)}" for text in sample.texts
    ]
    maps, reference = [], None
    for snapshot in snapshots:
        projection = project(snapshot.vectors, reference)
        if projection is None:
            continue
        picture = scatter_plot(f"Map {snapshot.name}", sample, projection, colours, snippets)
        maps.append((snapshot.name, f"{projection.variance:.0%}", picture))
        reference = reference or projection
    return maps


def _query_example(
    sample: Sample, snapshots: Sequence[Snapshot], query: int, thumbnails: Mapping[str, str]
) -> QueryExample:
    text = sample.texts[query]
    results = [(snapshot.name, nearest_documents(sample, snapshot.vectors, query)) for snapshot in snapshots]
    return QueryExample(
        shorten(text.text),
        _images(text.text, thumbnails),
        text.origin if text.held_out else f"{text.origin} (training)",
        tuple((name, _rank(result), _neighbours(sample, result, thumbnails)) for name, result in results),
    )


def _images(text: str, thumbnails: Mapping[str, str]) -> tuple[str, ...]:
    found = (thumbnails.get(str(picture)) for picture in pictures_of(text))
    return tuple(uri for uri in found if uri is not None)


def _rank(result: QueryResult) -> str:
    if result.rank is None:
        return "no relevant document in the sample"
    return f"first relevant document at rank {result.rank} of {result.num_documents}"


def _neighbours(sample: Sample, result: QueryResult, thumbnails: Mapping[str, str]) -> tuple[Neighbour, ...]:
    marks = {PairRelation.positive: "yes", PairRelation.negative: "no"}
    return tuple(
        Neighbour(
            f"{document.cosine:.3f}",
            marks.get(document.relation, "") if document.relation else "",
            shorten(sample.texts[document.text].text),
            _images(sample.texts[document.text].text, thumbnails),
        )
        for document in result.nearest
    )
