"""Reranking sets and retrieval sets of several languages, as mteb itself reads the same files; LlamaIndex's file."""

import json

import pytest

from embedtrain.config.evaluation import SetKind
from embedtrain.evaluation.types import Corpus
from tests.evaluation.files import error_of, jsonl, parquet, read, repository

ROWS = [
    {"query": "one", "positive": ["a", "b"], "negative": ["c"]},
    {"query": "left out", "positive": [], "negative": ["c"]},
    {"query": "two", "positive": ["c"], "negative": ["a", "a", "d"]},
    {"query": "left out", "positive": ["c"], "negative": []},
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_rows_equal_those_of_mteb(tmp_path):
    from mteb.abstasks.text.reranking import AbsTaskReranking

    for path in (jsonl(tmp_path / "test.jsonl", ROWS), parquet(tmp_path / "p" / "test.parquet", ROWS)):
        loaded = read(path, name="r")
        assert loaded.notes == (
            f"r: 2 rows without positives or without negatives are left out, as in mteb (the first: {path}:2)",
        )
        mteb_data = [AbsTaskReranking._process_example(None, ROWS[row], "test", i) for i, row in enumerate([0, 2])]
        data = loaded.data
        assert data.queries == {row["query_id"]: row["query"] for row in mteb_data}
        assert data.documents.ids == [key for row in mteb_data for key in row["doc_ids"]]
        assert data.documents.texts == [text for row in mteb_data for text in row["doc_texts"]]
        for row in mteb_data:
            assert data.judgements[row["query_id"]] == dict(zip(row["doc_ids"], row["relevance_scores"], strict=True))
            candidates = [data.documents.ids[index] for index in data.candidates[row["query_id"]]]
            assert candidates == row["doc_ids"]


def test_one_text_is_a_list_of_one(tmp_path):
    (tmp_path / "t.csv").write_text("query,positive,negative\nq,a,b\nr,c,\n")
    loaded = read(tmp_path / "t.csv")
    assert loaded.data.documents.texts == ["a", "b"]
    assert len(loaded.notes) == 1


CORPUS = [{"_id": "d1", "title": "T", "text": "x"}, {"_id": "d2", "title": "", "text": "y"}, {"_id": "d3", "text": "z"}]
QUERIES = [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}, {"_id": "q3", "text": "not judged"}]
QRELS = [{"query-id": "q1", "corpus-id": "d1", "score": 1}, {"query-id": "q2", "corpus-id": "d2", "score": 2}]
RANKED = [{"query-id": "q1", "corpus-ids": ["d3", "d1"]}, {"query-id": "q2", "corpus-ids": ["d2"]}]
TOLD = [{"query-id": f"q{number}", "instruction": f"do {number}"} for number in (1, 2, 3)]


def tables(before="", behind="", **more):
    named = {"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS, **more}
    return {f"{before}{part}{behind}": {"test": rows} for part, rows in named.items()}


def mteb_data(folder, config):
    """Queries with their instructions, documents, judgements and candidates as mteb reads them."""
    from mteb._create_dataloaders import _combine_queries_with_instruction_text, _corpus_to_dict
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalDatasetLoader

    candidates = RetrievalDatasetLoader(str(folder), None, split="test", config=config).load()
    queries = _combine_queries_with_instruction_text(candidates["queries"])
    documents = [_corpus_to_dict({**row, "title": row["title"] or ""}) for row in candidates["corpus"]]
    return (
        dict(zip(queries["id"], queries["text"], strict=True)),
        {row["id"]: row["text"] for row in documents},
        candidates["relevant_docs"],
        candidates["top_ranked"],
    )


@pytest.mark.parametrize("language", [None, "de"])
@pytest.mark.parametrize("more", [{}, {"top_ranked": RANKED, "instruction": TOLD}])
def test_repositories_equal_those_of_mteb(tmp_path, language, more):
    parts = tables("" if language is None else "de-", **more)
    other = {} if language is None else {"en-corpus": {"test": CORPUS[:1]}, "en-queries": {"test": QUERIES}}
    folder = repository(tmp_path / "set", {**parts, **other})
    queries, documents, judgements, ranked = mteb_data(folder, language)
    data = read(folder, config=language, kind=SetKind.retrieval).data
    assert {query: data.queries[query] for query in data.judged_queries} == queries
    assert dict(zip(data.documents.ids, data.documents.texts, strict=True)) == documents
    assert data.judgements == judgements
    assert data.candidates is None
    if ranked is not None:
        data = read(folder, config=language).data
        candidates = {
            query: [data.documents.ids[index] for index in indices] for query, indices in data.candidates.items()
        }
        assert candidates == ranked
        assert data == read(folder, config=language, kind=SetKind.reranking).data
    elif language is not None:
        assert error_of(folder).startswith(f"{folder} holds sets of de, en: ")


@pytest.mark.parametrize("behind", ["-de", "_de"])
def test_languages_behind(tmp_path, behind):
    data = read(repository(tmp_path / "set", tables(behind=behind)), config="de").data
    assert data.judgements == {"q1": {"d1": 1}, "q2": {"d2": 2}}
    judged = {"corpus-de": {"test": CORPUS}, "queries-de": {"test": QUERIES}, "de": {"test": QRELS}}
    assert read(repository(tmp_path / "other", judged), config="de").data == data.__class__(
        "other", data.queries, data.documents, data.judgements
    )


def test_configurations_of_tables(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": 1.5}, {"sentence1": "c", "sentence2": "d", "score": 3.0}]
    folder = repository(tmp_path / "sts", {"en": {"test": rows}, "de": {"test": rows[::-1], "train": rows}})
    assert read(folder, config="de").data.first == ["c", "a"]
    assert read(folder, config="de", split="train").data.first == ["a", "c"]
    assert error_of(folder).startswith(f"{folder} holds the configurations en, de: ")
    assert error_of(folder, config="fr") == f"{folder} holds no configuration 'fr', only en, de"
    assert error_of(folder, config="de", split="dev") == f"{folder} (de) holds no split 'dev', only test, train"


def test_two_languages_of_a_table_of_many(tmp_path):
    rows = [{"deu": "eins", "eng": "one", "fra": "un"}, {"deu": "zwei", "eng": "two", "fra": "deux"}]
    folder = repository(tmp_path / "many", {"default": {"test": rows}})
    data = read(folder, config="fra-deu").data
    assert (data.first, data.second) == (["un", "deux"], ["eins", "zwei"])
    assert "holds no configuration 'fra-xyz', only default" in error_of(folder, config="fra-xyz")


def test_classification_of_a_repository(tmp_path):
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    folder = repository(tmp_path / "set", {"en": {"train": rows, "test": rows[:1], "dev": rows[1:]}})
    data = read(folder, config="en").data
    assert (data.train_texts, data.texts) == (["a", "b"], ["a"])
    assert read(folder, config="en", split="dev").data.texts == ["b"]
    assert "all 1 texts to learn from have the label 0" in error_of(folder, config="en", train="test")


def test_a_file_of_llama_index(tmp_path):
    whole = {
        "queries": {"q1": "one", "q2": "two"},
        "corpus": {"n1": "first", "n2": "second"},
        "relevant_docs": {"q1": ["n1"], "q2": ["n2", "n1"]},
        "mode": "text",
    }
    for indent in (None, 4):
        (tmp_path / "qa.json").write_text(json.dumps(whole, indent=indent))
        for kind in (SetKind.auto, SetKind.retrieval):
            data = read(tmp_path / "qa.json", kind=kind).data
            assert (data.name, data.queries, data.documents) == (
                "qa",
                whole["queries"],
                Corpus.from_dict(whole["corpus"]),
            )
            assert data.judgements == {"q1": {"n1": 1}, "q2": {"n2": 1, "n1": 1}}
    assert "is a retrieval set (one file with corpus, " in error_of(tmp_path / "qa.json", kind=SetKind.sts)
    for key, value, message in [
        ("relevant_docs", {"q1": "n1"}, "qa.json: relevant_docs: q1 must have a list of ids, not 'n1'"),
        ("relevant_docs", {"q1": ["n7"]}, "none of its 1 documents is in {}/qa.json: corpus; it has 'n7'"),
        ("corpus", {}, "{}/qa.json: corpus is empty"),
        ("queries", ["one"], "{}/qa.json: queries must be an object of texts by id, not ['one']"),
        ("queries", {"q1": 7}, "{}/qa.json: queries: q1 must be a text, not a number (7)"),
    ]:
        (tmp_path / "qa.json").write_text(json.dumps({**whole, key: value}))
        assert message.format(tmp_path) in error_of(tmp_path / "qa.json")
