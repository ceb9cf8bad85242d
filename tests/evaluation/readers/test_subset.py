"""Parts of sets: the same in every run and on every rank, smaller ones within larger ones, whatever the order."""

from dataclasses import replace

import pytest

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.errors import ConfigError
from embedtrain.evaluation.sets import load_sets, read_set, take_subset
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    LabelledPairs,
    RetrievalSet,
    ScoredPairs,
)
from tests.evaluation.files import beir, jsonl, read

MANY = [f"text {number}" for number in range(50)]
JUDGED = {f"q{number}": {f"d{number}": 1, f"d{number + 50}": 0} for number in range(50)}
RETRIEVAL = RetrievalSet(
    "r",
    {f"q{number}": f"query {number}" for number in range(60)},
    Corpus([f"d{number}" for number in range(200)], [f"document {number}" for number in range(200)]),
    JUDGED,
)


def subset_of(data, subset=None, documents=None):
    return take_subset(data, subset, documents)[0]


def test_queries():
    few, more = subset_of(RETRIEVAL, 5), subset_of(RETRIEVAL, 20)
    assert len(few.judged_queries) == len(few.queries) == 5
    assert len(more.judged_queries) == 20
    assert set(few.queries) < set(more.queries) < set(RETRIEVAL.queries)
    assert list(few.queries) != list(RETRIEVAL.queries)[:5]
    assert list(few.queries) == [query for query in RETRIEVAL.queries if query in few.queries]  # in the file's order
    assert few.judgements == {query: JUDGED[query] for query in few.queries}
    assert few.documents == RETRIEVAL.documents
    turned = replace(RETRIEVAL, queries=dict(reversed(RETRIEVAL.queries.items())))
    assert set(subset_of(turned, 5).queries) == set(few.queries)


def test_documents():
    few, more = subset_of(RETRIEVAL, 5, 10), subset_of(RETRIEVAL, 5, 30)
    judged = {document for query in few.queries for document in JUDGED[query]}
    assert len(few.documents) == 20 and len(more.documents) == 40
    assert judged < set(few.documents.ids) < set(more.documents.ids)
    indices = [RETRIEVAL.documents.ids.index(document) for document in few.documents.ids]
    assert indices == sorted(indices)
    assert few.documents.texts == [RETRIEVAL.documents.texts[index] for index in indices]
    assert subset_of(RETRIEVAL, None, 1000) == RETRIEVAL


def test_candidates():
    candidates = {f"q{number}": [number + 100, number] for number in range(50)}
    data = subset_of(replace(RETRIEVAL, candidates=candidates), 3)
    for query in data.queries:
        candidates_found = [data.documents.ids[index] for index in data.candidates[query]]
        assert candidates_found == [f"d{int(query[1:]) + 100}", f"d{query[1:]}"]
    assert len(data.documents) == 6


def test_rows():
    back = MANY[::-1]
    scores, labels = [float(number) for number in range(50)], [number % 2 for number in range(50)]
    scored = subset_of(ScoredPairs("s", MANY, back, scores), 7)
    assert len(scored.scores) == 7
    assert all(MANY[int(score)] == first for first, score in zip(scored.first, scored.scores, strict=True))
    assert all(back[int(score)] == second for second, score in zip(scored.second, scored.scores, strict=True))
    assert set(scored.first) < set(subset_of(ScoredPairs("s", MANY, back, scores), 9).first)
    assert subset_of(LabelledPairs("p", MANY, back, labels), 7).first == scored.first
    assert subset_of(LabelledPairs("p", MANY, back, labels), 7).labels == [int(score) % 2 for score in scored.scores]
    assert subset_of(Bitext("b", MANY, back), 7) == Bitext("b", scored.first, scored.second)


def test_texts():
    data = ClassificationSet("c", ["t"], [0], MANY, list(range(50)))
    few = subset_of(data, 4)
    assert (few.train_texts, few.train_labels) == (["t"], [0])
    assert [MANY[label] for label in few.labels] == few.texts
    assert len(few.texts) == 4
    clusters = subset_of(ClusteringSet("k", MANY, [(number,) for number in range(50)]), 4)
    assert clusters.texts == few.texts
    assert clusters.labels == [(label,) for label in few.labels]


def test_groups():
    groups = [range(start, start + 5) for start in range(0, 50, 5)]
    data = ClusteringSet("k", MANY, [(number,) for number in range(50)], groups)
    few = subset_of(data, 3)
    assert [list(group) for group in few.groups] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert [MANY[label] for (label,) in few.labels] == few.texts
    assert all(few.labels[group[0]][0] % 5 == 0 for group in few.groups)


@pytest.fixture
def folder(tmp_path):
    corpus = dict(zip(RETRIEVAL.documents.ids, RETRIEVAL.documents.texts, strict=True))
    qrels = "".join(f"{query}\t{document}\t{gain}\n" for query, of in JUDGED.items() for document, gain in of.items())
    return beir(tmp_path / "r", corpus, RETRIEVAL.queries, qrels)


def test_notes_of_subsets(folder, tmp_path):
    loaded = read(folder, subset=5, subset_documents=10)
    assert loaded.data == subset_of(RETRIEVAL, 5, 10)
    of_queries, of_documents = loaded.notes
    assert of_queries.startswith("r: 5 of its 50 judged queries are measured (subset=5)")
    assert of_documents.startswith("r: 20 of its 200 documents are searched (subset_documents=10)")
    assert read(folder, subset=50, subset_documents=500).notes == ()
    assert len(read_set(EvaluationSet(path=str(folder)), subset=6).data.queries) == 6
    assert len(read_set(EvaluationSet(path=str(folder), subset=7), subset=6).data.queries) == 7
    rows = jsonl(tmp_path / "x.jsonl", [{"query": "q", "positive": ["a"], "negative": ["b"]}])
    with pytest.raises(ConfigError, match=r"subset_documents=3 .*candidates"):
        read(rows, kind=SetKind.reranking, subset_documents=3)


def load(world, folder, subset):
    [loaded] = load_sets([EvaluationSet(path=folder, subset_documents=10)], world, subset=subset)
    return list(loaded.data.queries), loaded.data.documents.ids


def test_every_rank_has_the_same(ranks, folder):
    expected = subset_of(RETRIEVAL, 5, 10)
    assert ranks(2, load, str(folder), 5) == [(list(expected.queries), expected.documents.ids)] * 2
