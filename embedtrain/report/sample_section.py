"""The sections of the page about the sample: separation of pairs, the map, and neighbours."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from embedtrain.report.runs import Run
from embedtrain.report.sample import PairRelation, Sample, Vectors
from embedtrain.report.sample_plots import bin_edges, bin_fractions, histogram, project, scatter_plot
from embedtrain.report.similarity import (
    PairFamily,
    PairGroup,
    QueryResult,
    cosines,
    group_pairs,
    nearest_documents,
    select_queries,
)

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


@dataclass(frozen=True, slots=True)
class QueryExample:
    """A query, and for each snapshot the rank of its best document in words, and its neighbours."""

    text: str
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


def sample_section(run: Run) -> SampleSection | None:
    """The section of a run; None if it has no sample with vectors."""
    if run.sample is None or not run.sample.sample.texts:
        return None
    sample, snapshots = run.sample.sample, _snapshots(run)
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
        tuple(_query_example(sample, snapshots, query) for query in queries),
        any(sample.texts[query].held_out for query in queries),
    )


def shorten(text: str, length: int = TEXT_LENGTH) -> str:
    """At most `length` characters of a text on one line, without invisible characters and direction marks."""
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


def _snapshots(run: Run) -> list[Snapshot]:
    snapshots = []
    if run.sample is not None and run.sample.before is not None:
        snapshots.append(Snapshot("before training", run.sample.before))
    if run.sample is not None and run.sample.after is not None:
        snapshots.append(Snapshot(f"after step {run.sample.after.step:,}", run.sample.after))
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


def _query_example(sample: Sample, snapshots: Sequence[Snapshot], query: int) -> QueryExample:
    text = sample.texts[query]
    results = [(snapshot.name, nearest_documents(sample, snapshot.vectors, query)) for snapshot in snapshots]
    return QueryExample(
        shorten(text.text),
        text.origin if text.held_out else f"{text.origin} (training)",
        tuple((name, _rank(result), _neighbours(sample, result)) for name, result in results),
    )


def _rank(result: QueryResult) -> str:
    if result.rank is None:
        return "no relevant document in the sample"
    return f"first relevant document at rank {result.rank} of {result.num_documents}"


def _neighbours(sample: Sample, result: QueryResult) -> tuple[Neighbour, ...]:
    marks = {PairRelation.positive: "yes", PairRelation.negative: "no"}
    return tuple(
        Neighbour(
            f"{document.cosine:.3f}",
            marks.get(document.relation, "") if document.relation else "",
            shorten(sample.texts[document.text].text),
        )
        for document in result.nearest
    )
