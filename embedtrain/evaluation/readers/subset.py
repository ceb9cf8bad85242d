"""Subsets of evaluation sets, for speed: the same in every run, and a smaller one within a larger.

Texts and document ids are sorted by their hashes, and the first ones are remaining.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from embedtrain.data.cache.documents import select_texts
from embedtrain.data.text_format import text_key
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

# Precedes each text, so that the order is independent of other orders by keys of texts.
_KEY_PREFIX = "subset\0"


def take_subset(
    data: EvaluationData, subset: int | None, subset_documents: int | None
) -> tuple[EvaluationData, list[str]]:
    """A subset, and notes on it.

    `subset` is the maximal number of judged queries, pairs, texts to classify or cluster, or groups of texts;
    `subset_documents` that of documents besides those that are judged for a remaining query.
    """
    notes: list[str] = []
    if subset is not None:
        total, unit = _size(data)
        if subset < total:
            data = _take_subset(data, subset)
            notes.append(
                f"{data.name}: {subset:,} of its {total:,} {unit} are measured (subset={subset}); "
                "metrics are not those of the whole set"
            )
    if subset_documents is not None and isinstance(data, RetrievalSet):
        total = len(data.documents)
        data = _fewer_documents(data, subset_documents)
        if len(data.documents) < total:
            notes.append(
                f"{data.name}: {len(data.documents):,} of its {total:,} documents are searched "
                f"(subset_documents={subset_documents}); metrics are not those of the whole set"
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


def _take_subset(data: EvaluationData, count: int) -> EvaluationData:
    match data:
        case RetrievalSet():
            return _fewer_queries(data, count)
        case ScoredPairs():
            rows = _first_by_hash(_pairs(data), count)
            return replace(
                data,
                first=_select(data.first, rows),
                second=_select(data.second, rows),
                scores=_select(data.scores, rows),
            )
        case LabelledPairs():
            rows = _first_by_hash(_pairs(data), count)
            return replace(
                data,
                first=_select(data.first, rows),
                second=_select(data.second, rows),
                labels=_select(data.labels, rows),
            )
        case Bitext():
            rows = _first_by_hash(_pairs(data), count)
            return replace(data, first=_select(data.first, rows), second=_select(data.second, rows))
        case ClassificationSet():
            rows = _first_by_hash(data.texts, count)
            return replace(data, texts=_select(data.texts, rows), labels=_select(data.labels, rows))
        case ClusteringSet():
            return _fewer_clustered(data, count)


def _fewer_queries(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = data.judged_queries
    remaining = [judged[row] for row in _first_by_hash([data.queries[query] for query in judged], count)]
    data = replace(
        data,
        queries={query: data.queries[query] for query in remaining},
        judgements={query: data.judgements[query] for query in remaining},
    )
    if data.candidates is None:
        return data
    # Documents that no remaining query ranks need not be encoded.
    rows = sorted(set(chain.from_iterable(data.candidates[query] for query in remaining)))
    indices = {row: index for index, row in enumerate(rows)}
    candidates = {query: [indices[row] for row in data.candidates[query]] for query in remaining}
    return replace(data, documents=_documents(data.documents, rows), candidates=candidates)


def _fewer_documents(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = set(chain.from_iterable(data.judgements[query] for query in data.judged_queries))
    is_judged = np.fromiter((document in judged for document in data.documents.ids), bool, len(data.documents))
    unjudged = np.flatnonzero(~is_judged)
    if count >= len(unjudged):
        return data
    ids = select_texts(data.documents.ids, unjudged.tolist())
    rows = np.concatenate([np.flatnonzero(is_judged), unjudged[_first_by_hash(ids, count)]])
    return replace(data, documents=_documents(data.documents, np.sort(rows).tolist()))


def _fewer_clustered(data: ClusteringSet, count: int) -> ClusteringSet:
    if data.groups is None:
        rows = _first_by_hash(data.texts, count)
        return replace(data, texts=_select(data.texts, rows), labels=_select(data.labels, rows))
    numbers = _first_by_hash(["\0".join(data.texts[row] for row in group) for group in data.groups], count)
    groups = [data.groups[number] for number in numbers]
    rows = list(chain.from_iterable(groups))
    starts = np.cumsum([0, *map(len, groups)]).tolist()
    return replace(
        data,
        texts=_select(data.texts, rows),
        labels=_select(data.labels, rows),
        groups=[range(start, stop) for start, stop in pairwise(starts)],
    )


def _pairs(data: ScoredPairs | LabelledPairs | Bitext) -> list[str]:
    return [f"{first}\0{second}" for first, second in zip(data.first, data.second, strict=True)]


def _first_by_hash(texts: Sequence[str], count: int) -> list[int]:
    """The numbers of the `count` texts with the smallest hashes, in the order of the texts."""
    keys = np.fromiter((text_key(_KEY_PREFIX + text) for text in texts), np.int64, len(texts))
    return sorted(np.argsort(keys, kind="stable")[:count].tolist())


def _select(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[row] for row in rows]


def _documents(documents: Corpus, rows: Sequence[int]) -> Corpus:
    return Corpus(select_texts(documents.ids, rows), select_texts(documents.texts, rows))
