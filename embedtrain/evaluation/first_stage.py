"""The documents that a reranker gets for each query: the best of BM25, of a run file, or of a bi-encoder.

BM25 is that of the bm25s library: Lucene's, k1 = 1.5 and b = 0.75. Texts are lowercased and cut into words of letters,
digits and underscores; Chinese, Japanese and Korean characters, which no spaces separate, into overlapping pairs, as
Lucene's CJKAnalyzer does. There are no stop words and no stems, so that every language is treated alike.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.evaluation import BM25
from embedtrain.data.cache.document_store import select_texts
from embedtrain.data.images.item import has_pictures
from embedtrain.data.sources.files import read_lines
from embedtrain.data.sources.values import not_utf8, shorten
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, EmbedtrainError
from embedtrain.evaluation.metrics import RETRIEVAL_METRICS
from embedtrain.evaluation.types import RUN_TAG, Corpus, LabelledPairs, LoadedSet, RetrievalSet, ScoredPairs, kind_of
from embedtrain.inference.index import trec_order

# Hiragana, katakana, Han (with extensions and compatibility ideographs) and Hangul.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORDS = re.compile(rf"[{_CJK}]+|[^\W{_CJK}]+")
_IS_CJK = re.compile(f"[{_CJK}]")


def words(text: str) -> list[str]:
    """The terms of a text for BM25."""
    terms: list[str] = []
    for word in _WORDS.findall(text.lower()):
        if len(word) > 1 and _IS_CJK.match(word):
            terms += map("".join, itertools.pairwise(word))
        else:
            terms.append(word)
    return terms


def bm25_rankings(queries: Sequence[str], documents: Corpus, depth: int) -> list[list[int]]:
    """Indices of the `depth` best documents of each query, best first, ties by descending id.

    A document that shares no term with the query is not found. Raises EmbedtrainError without the bm25s library.
    """
    try:
        import bm25s
    except ImportError:
        raise EmbedtrainError("BM25 needs the library bm25s, which is not installed: pip install bm25s") from None
    terms = [words(text) for text in documents.texts]
    if not any(terms):
        return [[] for _ in queries]
    index: Any = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend="numpy")
    index.index(terms, show_progress=False)
    del terms
    priorities = trec_order(documents.ids).numpy()
    rankings = []
    for query in queries:
        scores: NDArray[np.float32] = index.get_scores_from_ids(index.get_tokens_ids(words(query)))
        rows = np.flatnonzero(scores > 0)
        if len(rows) > depth:
            # All documents with the score of the last one stay, so that ties are broken by id alone.
            limit = np.partition(scores[rows], len(rows) - depth)[len(rows) - depth]
            rows = rows[scores[rows] >= limit]
        order = np.lexsort((-priorities[rows], -scores[rows]))
        rankings.append(rows[order][:depth].tolist())
    return rankings


def with_bm25_candidates(loaded: LoadedSet, depth: int, world: World) -> LoadedSet:
    """The retrieval set with BM25's best documents as candidates. A collective: rank 0 searches."""
    data = loaded.data
    assert isinstance(data, RetrievalSet)
    judged = data.judged_queries
    rankings: list[list[int]] = []
    with world.fail_together(f"searching {data.name} with BM25"):
        if world.is_main:
            # One more: the query itself may be among them.
            texts = [data.queries[query] for query in judged]
            if any(map(has_pictures, itertools.chain(texts, data.documents.texts))):
                raise DataError(
                    f"{data.name} has pictures, and BM25 searches words: write first_stage=[model], or a run file as "
                    "the candidates of the set"
                )
            rankings = bm25_rankings(texts, data.documents, depth + data.ignore_identical_ids)
            if not any(rankings):
                raise DataError(f"{data.name}: no document shares a word with a query, so BM25 finds none to rank")
    rankings = world.broadcast(rankings)
    return with_rankings(loaded, dict(zip(judged, rankings, strict=True)), BM25, depth)


def with_rankings(loaded: LoadedSet, rankings: Mapping[str, Sequence[int]], first_stage: str, depth: int) -> LoadedSet:
    """The set with the `depth` best documents of each query, given by their indices, as its only documents."""
    data = loaded.data
    assert isinstance(data, RetrievalSet)
    ids = data.documents.ids
    best = {
        query: [row for row in rows if not (data.ignore_identical_ids and ids[row] == query)][:depth]
        for query, rows in rankings.items()
    }
    rows = sorted(set(itertools.chain.from_iterable(best.values())))
    number = {row: index for index, row in enumerate(rows)}
    documents = Corpus(select_texts(ids, rows), select_texts(data.documents.texts, rows))
    candidates = {query: [number[row] for row in kept] for query, kept in best.items()}
    data = replace(data, documents=documents, candidates=candidates, first_stage=first_stage)
    return replace(loaded, data=data, metrics=loaded.metrics or RETRIEVAL_METRICS)


def first_stage_note(loaded: LoadedSet) -> str:
    """A line about the candidates of a set, with their metric before reranking."""
    data, metrics = loaded.data, loaded.first_stage_metrics
    assert metrics is not None, "measured"
    assert isinstance(data, RetrievalSet)
    assert data.candidates is not None, "it has a first stage"
    relevant = [
        (query, document)
        for query, gains in data.judgements.items()
        for document, gain in gains.items()
        if gain > 0 and query in data.queries
    ]
    pairs = {(query, data.documents.ids[row]) for query, candidates in data.candidates.items() for row in candidates}
    depth = max(map(len, data.candidates.values()), default=0)
    fraction = sum(pair in pairs for pair in relevant) / max(1, len(relevant))
    name, value = next(iter(metrics.items()))
    source = "BM25" if data.first_stage == BM25 else "its run"
    return (
        f"{data.name}: the best {depth} documents of {source} are ranked, {name} {value:.4f} before; they hold "
        f"{fraction:.1%} of the relevant ones"
    )


def limit_candidates(loaded: LoadedSet, depth: int) -> LoadedSet:
    """The set with at most `depth` candidates of each query, if they are in the order of a first stage."""
    data = loaded.data
    if not isinstance(data, RetrievalSet) or data.candidates is None or data.first_stage is None:
        return loaded
    return with_rankings(loaded, data.candidates, data.first_stage, depth)


def has_scores(loaded: LoadedSet) -> bool:
    """Whether a cross-encoder can measure the set: it ranks documents, or compares pairs of texts."""
    return isinstance(loaded.data, RetrievalSet | ScoredPairs | LabelledPairs)


def check_scored_sets(sets: Sequence[LoadedSet], option: str) -> None:
    """Raise ConfigError for a set, or an option of a set, that is of models that compute vectors."""
    for loaded in sets:
        name = loaded.data.name
        if not has_scores(loaded):
            raise ConfigError(
                f"{option}: {name} is a set of the kind {kind_of(loaded.data).value}, which needs vectors of texts, "
                "and a cross-encoder computes scores of pairs: leave it out (allowed are retrieval, reranking, sts and "
                "pair_classification)"
            )
        for length in ("query_max_length", "document_max_length"):
            value = getattr(loaded, length)
            if value is not None:
                raise ConfigError(
                    f"{option}, {name}: {length}={value} is of texts that are encoded alone; the length of a pair is "
                    "max_length of the cross-encoder: leave it out"
                )


def with_candidates_of(
    sets: Sequence[LoadedSet], world: World, depth: int, option: str = "evaluation.sets"
) -> list[LoadedSet]:
    """The sets as a cross-encoder measures them: of each query the `depth` best candidates, else of BM25.

    Candidates in no order (rows with positives and negatives) all stay. A collective. Raises ConfigError for a set that
    a cross-encoder cannot measure.
    """
    with world.fail_together("reading evaluation sets"):
        check_scored_sets(sets, option)
    return [
        with_bm25_candidates(loaded, depth, world)
        if isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None
        else limit_candidates(loaded, depth)
        for loaded in sets
    ]


def read_run(path: Path) -> dict[str, dict[str, str]]:
    """The documents of each query in a TREC run (`query Q0 document rank score tag`), with their locations by id.

    They are in the order of trec_eval: by descending score, in float32, and descending id. Ids of runs that embedtrain
    has written are decoded; in other runs they are as written.

    Raises DataError if the file is unreadable or empty, a line has too few or many fields, a score is no number, or a
    document is repeated.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such run file")
    run: dict[str, dict[str, str]] = {}
    scores: dict[tuple[str, str], float] = {}
    for location, line in _text_lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise DataError(
                f"{location}: {len(fields)} fields, but a line of a run is query, Q0, document, rank, score, tag: "
                f"{shorten(line)}"
            )
        query, _, document, _, score, tag = fields
        if tag == RUN_TAG:
            query, document = unquote(query), unquote(document)
        before = run.setdefault(query, {}).setdefault(document, location)
        if before != location:
            raise DataError(f"{location}: document {document} is repeated for query {query}, first at {before}")
        try:
            scores[query, document] = float(np.float32(score))
        except ValueError:
            scores[query, document] = math.nan
        if math.isnan(scores[query, document]):
            raise DataError(f"{location}: the score is not a number: {shorten(score)}")
    if not run:
        raise DataError(f"{path} is empty")
    return {
        query: dict(sorted(locations.items(), key=lambda item: (scores[query, item[0]], item[0]), reverse=True))
        for query, locations in run.items()
    }


def _text_lines(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in read_lines(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: {not_utf8(line, error.start)}") from None
        if text.strip():
            yield f"{path}:{number}", text


def with_candidates(
    data: RetrievalSet, ranked: Mapping[str, Collection[str]], source: str, first_stage: str | None = None
) -> tuple[RetrievalSet, list[str]]:
    """The set with the documents to rank for each query, without other documents, and notes on mismatches.

    A judged query without candidates stays: it finds nothing and counts as 0, as with trec_eval -c. `ranked` holds
    document ids by query id, best first if `first_stage` names what has ranked them; `source` is its name in messages.
    Raises DataError if no judged query has a
    candidate that is a document.
    """
    judged = data.judged_queries
    candidate_ids = {document for query in judged for document in ranked.get(query, ())}
    rows = [row for row, document in enumerate(data.documents.ids) if document in candidate_ids]
    ids = list(select_texts(data.documents.ids, rows))
    indices = {document: index for index, document in enumerate(ids)}
    candidates = {
        query: list(dict.fromkeys(indices[document] for document in ranked.get(query, ()) if document in indices))
        for query in judged
    }
    if not ids:
        if candidate_ids:
            kind, unknown, example = "documents", candidate_ids, data.documents.ids[0]
        else:
            kind, unknown, example = "judged queries", set(ranked), judged[0]
        raise DataError(
            f"{source}: none of its {len(unknown)} {kind.split()[-1]} is one of {data.name}; it has "
            f"{min(unknown, default='')!r} where {kind} are called {example!r}"
        )
    notes = []
    missing = [query for query in judged if query not in ranked]
    if missing:
        notes.append(
            f"{data.name}: {len(missing)} judged queries have no candidates in {source} and count as 0 "
            f"(the first: {missing[0]})"
        )
    if len(candidate_ids) > len(ids):
        notes.append(
            f"{data.name}: {len(candidate_ids) - len(ids)} candidates of {source} are not documents and are left out "
            f"(the first: {min(candidate_ids.difference(ids))})"
        )
    documents = Corpus(ids, select_texts(data.documents.texts, rows))
    return replace(data, documents=documents, candidates=candidates, first_stage=first_stage), notes
