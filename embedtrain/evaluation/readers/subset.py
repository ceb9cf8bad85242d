"""A part of a set, for speed: the same in every run, a smaller one within a larger, and nothing to do with the order.

Texts, and ids of documents, are put in the order of their hashes, and the first ones are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from embedtrain.data.keys import text_key
from embedtrain.evaluation.readers.mapped_texts import select_texts
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    EvaluationData,
    LabelledPairs,
    RetrievalSet,
    ScoredPairs,
)

T = TypeVar("T")

# Before each text: so that the order is no other one that is made of keys of texts.
_KEY = "subset\0"


def take_subset(
    data: EvaluationData, subset: int | None, subset_documents: int | None
) -> tuple[EvaluationData, list[str]]:
    """What is left of a set, and notes on it.

    Args:
        data: the whole set.
        subset: at most so many judged queries; pairs, or texts to be told, or to be clustered, or groups of them.
        subset_documents: at most so many documents beside those that are judged for a query that is left.
    """
    notes: list[str] = []
    if subset is not None:
        total, what = _size(data)
        if subset < total:
            data = _reduced(data, subset)
            notes.append(
                f"{data.name}: {subset:,} of its {total:,} {what} are measured (subset={subset}); "
                f"figures are not those of the whole set"
            )
    if subset_documents is not None and isinstance(data, RetrievalSet):
        whole = len(data.documents)
        data = _fewer_documents(data, subset_documents)
        if len(data.documents) < whole:
            notes.append(
                f"{data.name}: {len(data.documents):,} of its {whole:,} documents are searched "
                f"(subset_documents={subset_documents}); figures are not those of the whole set"
            )
    return data, notes


def _size(data: EvaluationData) -> tuple[int, str]:
    match data:
        case RetrievalSet():
            return len(data.judged_queries), "judged queries"
        case ClassificationSet():
            return len(data.texts), "texts"
        case ClusteringSet():
            return (len(data.texts), "texts") if data.groups is None else (len(data.groups), "groups")
        case _:
            return len(data.first), "pairs"


def _reduced(data: EvaluationData, count: int) -> EvaluationData:
    match data:
        case RetrievalSet():
            return _fewer_queries(data, count)
        case ScoredPairs():
            rows = _kept(_pairs(data), count)
            return replace(
                data, first=_at(data.first, rows), second=_at(data.second, rows), scores=_at(data.scores, rows)
            )
        case LabelledPairs():
            rows = _kept(_pairs(data), count)
            return replace(
                data, first=_at(data.first, rows), second=_at(data.second, rows), labels=_at(data.labels, rows)
            )
        case Bitext():
            rows = _kept(_pairs(data), count)
            return replace(data, first=_at(data.first, rows), second=_at(data.second, rows))
        case ClassificationSet():
            rows = _kept(data.texts, count)
            return replace(data, texts=_at(data.texts, rows), labels=_at(data.labels, rows))
        case ClusteringSet():
            return _fewer_clustered(data, count)


def _fewer_queries(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = data.judged_queries
    kept = [judged[row] for row in _kept([data.queries[query] for query in judged], count)]
    data = replace(
        data,
        queries={query: data.queries[query] for query in kept},
        judgements={query: data.judgements[query] for query in kept},
    )
    if data.candidates is None:
        return data
    # What no query that is left ranks need not be encoded.
    rows = sorted(set(chain.from_iterable(data.candidates[query] for query in kept)))
    places = {row: place for place, row in enumerate(rows)}
    candidates = {query: [places[row] for row in data.candidates[query]] for query in kept}
    return replace(data, documents=_documents(data.documents, rows), candidates=candidates)


def _fewer_documents(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = set(chain.from_iterable(data.judgements[query] for query in data.judged_queries))
    is_judged = np.fromiter((document in judged for document in data.documents.ids), bool, len(data.documents))
    others = np.flatnonzero(~is_judged)
    if count >= len(others):
        return data
    ids = select_texts(data.documents.ids, others.tolist())
    rows = np.concatenate([np.flatnonzero(is_judged), others[_kept(ids, count)]])
    return replace(data, documents=_documents(data.documents, np.sort(rows).tolist()))


def _fewer_clustered(data: ClusteringSet, count: int) -> ClusteringSet:
    if data.groups is None:
        rows = _kept(data.texts, count)
        return replace(data, texts=_at(data.texts, rows), labels=_at(data.labels, rows))
    numbers = _kept(["\0".join(data.texts[row] for row in group) for group in data.groups], count)
    groups = [data.groups[number] for number in numbers]
    rows = list(chain.from_iterable(groups))
    starts = np.cumsum([0, *map(len, groups)]).tolist()
    return replace(
        data,
        texts=_at(data.texts, rows),
        labels=_at(data.labels, rows),
        groups=[range(start, stop) for start, stop in pairwise(starts)],
    )


def _pairs(data: ScoredPairs | LabelledPairs | Bitext) -> list[str]:
    return [f"{first}\0{second}" for first, second in zip(data.first, data.second, strict=True)]


def _kept(texts: Sequence[str], count: int) -> list[int]:
    """The numbers of the `count` texts whose hashes come first, in the order of the texts; of equal ones the first."""
    keys = np.fromiter((text_key(_KEY + text) for text in texts), np.int64, len(texts))
    return sorted(np.argsort(keys, kind="stable")[:count].tolist())


def _at(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[row] for row in rows]


def _documents(documents: Corpus, rows: Sequence[int]) -> Corpus:
    return Corpus(select_texts(documents.ids, rows), select_texts(documents.texts, rows))
