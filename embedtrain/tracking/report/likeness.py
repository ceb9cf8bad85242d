"""How like vectors of the sample are: of positives, negatives and chance pairs, and which documents are nearest.

n texts, D dimensions; all vectors are of unit length, so products are cosines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from embedtrain.tracking.report.chart import spread
from embedtrain.tracking.report.sample import PairRelation, Role, Sample, Vectors

PairIndices = NDArray[np.int64]  # [P, 2], numbers of two texts

NEIGHBOURS = 5
QUERIES_SHOWN = 10


class PairFamily(str, Enum):
    """What pairs are told apart by."""

    search = "queries and documents"
    scored = "scored pairs"
    classes = "labelled pairs and classes"


@dataclass(frozen=True, slots=True)
class PairKind:
    """Pairs of one kind: its name in a legend, and their texts."""

    name: str
    pairs: PairIndices


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Pairs of one origin that a good model tells apart.

    Attributes:
        origin: the evaluation set or training source.
        held_out: whether that is an evaluation set.
        family: what they are told apart by.
        kinds: those that should be alike first, those that should not last.
    """

    origin: str
    held_out: bool
    family: PairFamily
    kinds: tuple[PairKind, ...]

    def separation(self, vectors: Vectors) -> float | None:
        """The chance that a pair of the first kind is more alike than one of the last (area under the ROC curve)."""
        alike, other = self.kinds[0], self.kinds[-1]
        if len(self.kinds) < 2 or not len(alike.pairs) or not len(other.pairs):
            return None
        scores = np.concatenate([cosines(vectors, alike.pairs), cosines(vectors, other.pairs)])
        return float(roc_auc_score(np.repeat([1, 0], [len(alike.pairs), len(other.pairs)]), scores))


@dataclass(frozen=True, slots=True)
class NearestDocument:
    """A document that was found: its text's number, its cosine, and whether it is known to answer."""

    text: int
    cosine: float
    relation: PairRelation | None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The documents nearest to a query, and the rank of the best one that answers it, of how many."""

    nearest: tuple[NearestDocument, ...]
    rank: int | None
    among: int


def cosines(vectors: Vectors, pairs: PairIndices) -> NDArray[np.float32]:
    """Of pairs [P, 2]: [P]."""
    found = np.einsum("pd,pd->p", vectors.values[pairs[:, 0]], vectors.values[pairs[:, 1]])
    clipped: NDArray[np.float32] = np.clip(found, -1.0, 1.0)  # rounding gives 1.0000001
    return clipped


def group_pairs(sample: Sample) -> list[PairGroup]:
    """All pairs of the sample, by origin and by what they are told apart by."""
    origins = dict.fromkeys((text.origin, text.held_out) for text in sample.texts)
    known: dict[tuple[str, bool], dict[PairRelation, list[tuple[int, int]]]] = {origin: {} for origin in origins}
    for pair in sample.pairs:
        text = sample.texts[pair.first]
        known[text.origin, text.held_out].setdefault(pair.relation, []).append((pair.first, pair.second))
    found = []
    for (origin, held_out), pairs in known.items():
        for family, kinds in (
            (PairFamily.search, _searched(sample, origin, held_out, pairs)),
            (
                PairFamily.scored,
                [
                    PairKind(f"{one.value} score", _places(pairs.get(one, [])))
                    for one in (PairRelation.high, PairRelation.middle, PairRelation.low)
                ],
            ),
            (PairFamily.classes, _labelled(sample, origin, held_out, pairs)),
        ):
            there = tuple(kind for kind in kinds if len(kind.pairs))
            if there:
                found.append(PairGroup(origin, held_out, family, there))
    return found


def _searched(
    sample: Sample, origin: str, held_out: bool, pairs: Mapping[PairRelation, list[tuple[int, int]]]
) -> list[PairKind]:
    """Positives, hard negatives, and each query with every document that nothing is known of."""
    positives = pairs.get(PairRelation.positive, [])
    if not positives:
        return []
    here = [number for number, text in enumerate(sample.texts) if (text.origin, text.held_out) == (origin, held_out)]
    queries = dict.fromkeys(first for first, _ in positives)
    documents = [number for number in here if sample.texts[number].role is Role.document]
    documents = documents or list(dict.fromkeys(second for _, second in positives))
    related = {pair for of in pairs.values() for pair in of}
    same = {number: sample.texts[number].text for number in here}
    chance = [
        (query, document)
        for query in queries
        for document in documents
        if query != document and (query, document) not in related and same[query] != same[document]
    ]
    negatives = pairs.get(PairRelation.negative, [])
    return [
        PairKind("positives", _places(positives)),
        PairKind("negatives judged or given" if held_out else "hard negatives", _places(negatives)),
        PairKind("chance pairs", _places(chance)),
    ]


def _labelled(
    sample: Sample, origin: str, held_out: bool, pairs: Mapping[PairRelation, list[tuple[int, int]]]
) -> list[PairKind]:
    """Pairs with a label, and texts of one class or of two."""
    same, different = (list(pairs.get(relation, [])) for relation in (PairRelation.same, PairRelation.different))
    here = [
        number
        for number, text in enumerate(sample.texts)
        if (text.origin, text.held_out) == (origin, held_out) and text.label is not None
    ]
    for place, one in enumerate(here):
        for other in here[place + 1 :]:
            (same if sample.texts[one].label == sample.texts[other].label else different).append((one, other))
    return [PairKind("same", _places(same)), PairKind("different", _places(different))]


def _places(pairs: Sequence[tuple[int, int]]) -> PairIndices:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def select_queries(sample: Sample) -> list[int]:
    """Some queries whose neighbours are worth a look: held-out ones where there are any, from every origin in turn."""
    answered = {pair.first for pair in sample.pairs if pair.relation is PairRelation.positive}
    of_origin: dict[str, list[int]] = {}
    held_out = any(sample.texts[number].held_out for number in answered)
    for number in sorted(answered):
        text = sample.texts[number]
        if text.held_out == held_out and text.role is Role.query:
            of_origin.setdefault(text.origin, []).append(number)
    shown: list[int] = []
    each = -(-QUERIES_SHOWN // max(1, len(of_origin)))
    for numbers in of_origin.values():
        shown += [numbers[place] for place in spread(len(numbers), each)]
    return shown[:QUERIES_SHOWN]


def nearest_documents(sample: Sample, vectors: Vectors, query: int) -> QueryResult:
    """The documents of the query's own set or source that are nearest to it."""
    asked = sample.texts[query]
    documents = np.array(
        [
            number
            for number, text in enumerate(sample.texts)
            if (text.origin, text.held_out, text.role) == (asked.origin, asked.held_out, Role.document)
            and text.text != asked.text
        ],
        dtype=np.int64,
    )
    known = {pair.second: pair.relation for pair in sample.pairs if pair.first == query}
    scores = vectors.values[documents] @ vectors.values[query]
    order = np.lexsort((documents, -scores))
    ranks = [place for place, at in enumerate(order, 1) if known.get(int(documents[at])) is PairRelation.positive]
    nearest = tuple(
        NearestDocument(int(documents[at]), float(scores[at]), known.get(int(documents[at])))
        for at in order[:NEIGHBOURS]
    )
    return QueryResult(nearest, ranks[0] if ranks else None, len(documents))
