"""What the sample says of a run: cosines told apart, the map, and neighbours, before and after training."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from embedtrain.tracking.report.flat import project
from embedtrain.tracking.report.histogram import bins_of, histogram, shares
from embedtrain.tracking.report.likeness import (
    PairFamily,
    PairGroup,
    QueryResult,
    cosines,
    group_pairs,
    nearest_documents,
    select_queries,
)
from embedtrain.tracking.report.runs import Run
from embedtrain.tracking.report.sample import PairRelation, Sample, Vectors
from embedtrain.tracking.report.scatter import scatter

TEXT_SHOWN, SNIPPET = 240, 90
MOST_COLOURS = 8
# Marks that turn the direction of what follows.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """When the sample was encoded: in words, and the vectors."""

    name: str
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class Histograms:
    """Cosines of one family of pairs, held out or trained on: a picture for each moment, and the kinds of pairs."""

    heading: str
    kinds: tuple[str, ...]
    pictures: tuple[tuple[str, Markup], ...]


@dataclass(frozen=True, slots=True)
class Separation:
    """How well one origin's pairs are told apart: for each moment the mean cosines and the chance to be right."""

    origin: str
    what: str
    pairs: str
    means: tuple[str, ...]
    chances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A document that was found, as it is shown."""

    cosine: str
    mark: str  # `yes`, `no` or empty
    text: str


@dataclass(frozen=True, slots=True)
class QueryExample:
    """A query, and for each moment the rank of its best answer in words, and its neighbours."""

    text: str
    origin: str
    moments: tuple[tuple[str, str, tuple[Neighbour, ...]], ...]


@dataclass(frozen=True, slots=True)
class SampleSection:
    """All that the page shows of a run's sample."""

    label: str
    num_texts: int
    moments: tuple[str, ...]
    histograms: tuple[Histograms, ...]
    separations: tuple[Separation, ...]
    origins: tuple[tuple[str, int], ...]
    maps: tuple[tuple[str, str, Markup], ...]
    questions: tuple[QueryExample, ...]
    held_out: bool


def sample_section(run: Run) -> SampleSection | None:
    """What a run's sample says; None where there is none with vectors."""
    sample = run.sample
    moments = _moments(run)
    if sample is None or not sample.texts or not moments:
        return None
    told = group_pairs(sample)
    colours = _colours(sample)
    queries = select_queries(sample)
    origins: dict[str, int] = {}
    for (origin, held_out), colour in colours.items():
        name = origin if held_out else f"{origin} (training)"
        origins["others" if colour == MOST_COLOURS - 1 and len(colours) > MOST_COLOURS else name] = colour
    return SampleSection(
        run.label,
        len(sample.texts),
        tuple(moment.name for moment in moments),
        tuple(_histograms(told, moments)),
        tuple(_separation(one, moments) for one in told if len(one.kinds) > 1),
        tuple(origins.items()),
        tuple(_maps(sample, moments, colours)),
        tuple(_question(sample, moments, query) for query in queries),
        any(sample.texts[query].held_out for query in queries),
    )


def shown(text: str, length: int = TEXT_SHOWN) -> str:
    """A text on one line, cut where it is long; what cannot be seen, or would turn what follows around, is left out."""
    # A little more than is shown is enough to look at.
    some = (" " if one.isspace() else one for one in text[: 2 * length + 100])
    seen = "".join(one for one in some if unicodedata.category(one) not in ("Cc", "Cs", "Co") and one not in _TURNING)
    line = " ".join(seen.split())
    if len(line) > length:
        line = line[:length].rstrip() + " …"
    return line or "(nothing)"


def _moments(run: Run) -> list[Snapshot]:
    found = []
    if run.before is not None:
        found.append(Snapshot("before training", run.before))
    if run.after is not None:
        found.append(Snapshot(f"after step {run.after.step:,}", run.after))
    if len({moment.vectors.values.shape[1] for moment in found}) > 1:
        return found[-1:]  # of another model
    return found


def _colours(sample: Sample) -> dict[tuple[str, bool], int]:
    """Held-out sets first; the last colour is for all that are too many."""
    origins = dict.fromkeys((text.origin, text.held_out) for text in sample.texts)
    ordered = sorted(origins, key=lambda origin: not origin[1])
    return {origin: min(number, MOST_COLOURS - 1) for number, origin in enumerate(ordered)}


def _histograms(told: Sequence[PairGroup], moments: Sequence[Snapshot]) -> list[Histograms]:
    found = []
    for held_out in (True, False):
        for family in PairFamily:
            some = [one for one in told if one.held_out == held_out and one.family is family]
            kinds = list(dict.fromkeys(kind.name for one in some for kind in one.kinds))
            if not kinds:
                continue
            pairs = {
                name: np.concatenate([kind.pairs for one in some for kind in one.kinds if kind.name == name])
                for name in kinds
            }
            values = [{name: cosines(moment.vectors, of) for name, of in pairs.items()} for moment in moments]
            edges = bins_of([one for each in values for one in each.values()])
            most = max(float(shares(one, edges).max()) for each in values for one in each.values())
            what = f"{'Held out' if held_out else 'Training rows'}: {family.value}"
            pictures = tuple(
                (moment.name, histogram(f"{what}, {moment.name}", each, edges, most))
                for moment, each in zip(moments, values, strict=True)
            )
            found.append(Histograms(what, tuple(kinds), pictures))
    return found


def _separation(told: PairGroup, moments: Sequence[Snapshot]) -> Separation:
    kinds = (told.kinds[0], told.kinds[-1])
    means = tuple(
        " / ".join(f"{cosines(moment.vectors, kind.pairs).mean():.3f}" for kind in kinds) for moment in moments
    )
    chances = (told.separation(moment.vectors) for moment in moments)
    return Separation(
        told.origin if told.held_out else f"{told.origin} (training)",
        f"{kinds[0].name} / {kinds[1].name}",
        f"{len(kinds[0].pairs):,} / {len(kinds[1].pairs):,}",
        means,
        tuple("—" if chance is None else f"{chance:.1%}" for chance in chances),
    )


def _maps(
    sample: Sample, moments: Sequence[Snapshot], colours: Mapping[tuple[str, bool], int]
) -> list[tuple[str, str, Markup]]:
    snippets = [f"{text.role.value}, {shown(text.origin, 40)}: {shown(text.text, SNIPPET)}" for text in sample.texts]
    found, before = [], None
    for moment in moments:
        flat = project(moment.vectors, before)
        if flat is None:
            continue
        picture = scatter(f"Map {moment.name}", sample, flat, colours, snippets)
        found.append((moment.name, f"{flat.shown:.0%}", picture))
        before = before or flat
    return found


def _question(sample: Sample, moments: Sequence[Snapshot], query: int) -> QueryExample:
    text = sample.texts[query]
    found = [(moment.name, nearest_documents(sample, moment.vectors, query)) for moment in moments]
    return QueryExample(
        shown(text.text),
        text.origin if text.held_out else f"{text.origin} (training)",
        tuple((name, _rank(one), _neighbours(sample, one)) for name, one in found),
    )


def _rank(found: QueryResult) -> str:
    return "no answer in the sample" if found.rank is None else f"best answer at {found.rank} of {found.among}"


def _neighbours(sample: Sample, found: QueryResult) -> tuple[Neighbour, ...]:
    marks = {PairRelation.positive: "yes", PairRelation.negative: "no"}
    return tuple(
        Neighbour(
            f"{one.cosine:.3f}", marks.get(one.relation, "") if one.relation else "", shown(sample.texts[one.text].text)
        )
        for one in found.nearest
    )
