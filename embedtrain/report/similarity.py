"""Cosine similarities within the sample: of positives, negatives and chance pairs, and the nearest documents.

n texts, D dimensions; all vectors have unit length, so products are cosines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from embedtrain.report.chart import evenly_spaced
from embedtrain.report.sample import PairRelation, Role, Sample, Vectors

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
