"""Large corpora: mapped from the cache, which all ranks build together, and equal to those held in memory."""

import gzip
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.data.cache import document_store as document_cache
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.document_store import MappedTexts, select_texts
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.readers import retrieval
from embedtrain.evaluation.readers.retrieval import read_any_corpus, read_corpus
from embedtrain.evaluation.sets import load_sets, read_set
from embedtrain.inference.index import trec_order
from tests.evaluation.files import beir, jsonl, parquet, repository
from tests.evaluation.tiny import sentence_encoder

ROWS = [{"_id": f"d{number:04}", "title": "T" * (number % 3), "text": f" text {number} ü"} for number in range(3000)]


@pytest.fixture
def small_pieces(monkeypatch):
    """Every corpus counts as a large one, and is read in many pieces."""
    monkeypatch.setattr(retrieval, "MAPPED_BYTES", 1)
    monkeypatch.setattr(document_cache, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(document_cache, "DOCUMENTS_PER_BATCH", 70)


def test_mapped_texts():
    texts = ["a", "", "ü", "dd", "e"]
    column = pa.chunked_array([pa.array(chunk, pa.large_string()) for chunk in ([], texts[:2], texts[2:3], texts[3:])])
    mapped = MappedTexts(column)
    assert list(mapped) == [mapped[number] for number in range(5)] == texts
    assert mapped[-1] == "e" and mapped[1:4] == texts[1:4] and mapped[np.int64(2)] == "ü"
    assert "dd" in mapped and mapped.index("e") == 4 and len(mapped) == 5
    selected = select_texts(mapped, [4, 0, 2])
    assert isinstance(selected, MappedTexts)
    assert list(selected) == [selected[0], selected[1], selected[2]] == ["e", "a", "ü"]
    assert list(select_texts(selected, [2, 0])) == select_texts(["e", "a", "ü"], [2, 0]) == ["ü", "e"]
    assert trec_order(mapped).tolist() == trec_order(texts).tolist()
    assert trec_order(selected).tolist() == trec_order(["e", "a", "ü"]).tolist()
    with pytest.raises(IndexError):
        mapped[5]
    with pytest.raises(TypeError, match="map the files"):
        pickle.dumps(mapped)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", "csv"])
def test_mapped_and_held_corpora_are_equal(small_pieces, tmp_path, monkeypatch, ending):
    path = tmp_path / f"corpus.{ending}"
    rows = [*ROWS, ROWS[5], ROWS[2000]]  # again, with the same text
    if ending == "parquet":
        parquet(path, rows)
    elif ending == "csv":
        path.write_text("_id,title,text\n" + "".join(f"{row['_id']},{row['title']},{row['text']}\n" for row in rows))
    else:
        jsonl(path, rows)
        if ending.endswith("gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    mapped = read_corpus(path, Cache(directory=tmp_path / "cache"))
    assert isinstance(mapped.texts, MappedTexts)
    monkeypatch.setattr(retrieval, "MAPPED_BYTES", 1 << 30)
    held = read_corpus(path)
    assert isinstance(held.texts, list)
    assert (list(mapped.ids), list(mapped.texts)) == (held.ids, held.texts)
    assert len(held) == len(mapped) == 3000
    assert held.texts[1] == "T  text 1 ü" and held.texts[3] == "text 3 ü"


def test_a_corpus_is_read_again_only_when_it_changes(small_pieces, tmp_path):
    path, cache = jsonl(tmp_path / "corpus.jsonl", ROWS), Cache(directory=tmp_path / "cache")
    read_corpus(path, cache)
    [built] = cache.directory.iterdir()
    before = {file: file.stat().st_mtime_ns for file in built.rglob("*")}
    read_corpus(path, cache)
    assert {file: file.stat().st_mtime_ns for file in built.rglob("*")} == before
    jsonl(path, ROWS[:-1])
    assert len(read_corpus(path, cache)) == 2999
    assert len(list(cache.directory.iterdir())) == 2


def test_errors_of_a_large_corpus(small_pieces, tmp_path):
    cache = Cache(directory=tmp_path / "cache")

    def error_of(rows):
        with pytest.raises(DataError) as caught:
            read_corpus(jsonl(tmp_path / "corpus.jsonl", rows), cache)
        return str(caught.value)

    where = f"{tmp_path}/corpus.jsonl"
    assert error_of([*ROWS, {"_id": "d0007", "text": "x"}]).startswith(f"{where}:3001: the id 'd0007' has another text")
    assert error_of([*ROWS, {"_id": "new"}]).startswith(f'{where}:3001: a document needs a "text"')
    assert error_of([]) == f"{where} is empty"
    (tmp_path / "corpus.jsonl").write_text(json.dumps(ROWS[0]) + "\n{\n")
    with pytest.raises(DataError, match=r"corpus.jsonl:2: broken JSON"):
        read_corpus(tmp_path / "corpus.jsonl", cache)


def test_a_set_of_the_hub_with_a_large_corpus(small_pieces, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    qrels = [{"query-id": "q", "corpus-id": "d0010", "score": 1}]
    tables = {"corpus": {"corpus": ROWS}, "queries": {"queries": [{"_id": "q", "text": "?"}]}, "qrels": {"test": qrels}}
    folder = repository(tmp_path / "set", tables)
    data = read_set(EvaluationSet(path=str(folder)), cache=Cache(directory=tmp_path / "cache")).data
    assert isinstance(data.documents.texts, MappedTexts)
    assert list(data.documents.ids) == [row["_id"] for row in ROWS]
    assert data.documents.texts[10] == "T  text 10 ü"


def load(world, folder, cache, pieces):
    before = retrieval.MAPPED_BYTES, document_cache.PIECE_BYTES
    retrieval.MAPPED_BYTES, document_cache.PIECE_BYTES = 1, pieces
    options = EvaluationSet(path=folder, subset_documents=100)
    try:
        [loaded] = load_sets([options], world, cache=Cache(directory=cache))
    except EmbedtrainError as error:
        return str(error)
    finally:  # the rank continues with other tests
        retrieval.MAPPED_BYTES, document_cache.PIECE_BYTES = before
    documents = loaded.data.documents
    return type(documents.texts).__name__, list(documents.ids), list(documents.texts)


def test_ranks_build_a_corpus_together(ranks, tmp_path):
    texts = {row["_id"]: row["text"].strip() for row in ROWS}
    folder = beir(tmp_path / "set", texts, {"q": "?"}, "q\td0010\t1\n")
    one, other = ranks(2, load, str(folder), tmp_path / "cache", 40_000)
    assert one == other
    name, ids, actual = one
    assert name == "MappedTexts" and len(ids) == 101 and "d0010" in ids
    assert actual == [texts[key] for key in ids]
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d0000", "text": "other"}\n')
    path = f"{folder}/corpus.jsonl"
    message = f"{path}:3001: the id 'd0000' has another text already in {path}:1"
    answers = ranks(2, load, str(folder), tmp_path / "cache", 40_000)
    assert answers == [message, f"rank 0 failed while reading evaluation sets: DataError: {message}"]


def measured(world, folder, cache, mapped_from):
    before = retrieval.MAPPED_BYTES
    retrieval.MAPPED_BYTES = mapped_from
    try:
        sets = load_sets([EvaluationSet(path=folder)], world, cache=Cache(directory=cache))
    finally:
        retrieval.MAPPED_BYTES = before
    measured = Evaluator(sets, sentence_encoder(world), world).evaluate()
    return type(sets[0].data.documents.texts).__name__, measured["set"]


def test_metrics_of_mapped_and_held_corpora_are_equal(ranks, tmp_path):
    texts = {f"d{number}": " ".join(f"t{(number * step) % 40}" for step in (1, 3, 7)) for number in range(40)}
    queries = {f"q{number}": f"t{number}" for number in range(8)}
    folder = beir(tmp_path / "set", texts, queries, "".join(f"q{n}\td{n}\t1\nq{n}\td{n + 9}\t2\n" for n in range(8)))
    held, mapped = (ranks(2, measured, str(folder), tmp_path / "cache", size)[0] for size in (1 << 30, 1))
    assert (held[0], mapped[0]) == ("list", "MappedTexts")
    assert held[1] == mapped[1]
    assert held[1]["ndcg@10"] > 0


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("faq.csv", "id,answer,question\n7,a,q\n8,b,r\n9,a,s\n", {"2": "a", "3": "b"}),
        ("docs.csv", "title,body\nt,a\n,b\n", {"2": "t a", "3": "b"}),
        ("docs.tsv", "doc_key_id\tTitle\tBody\nx\tt\ta\ny\tu\tb\n", {"x": "t a", "y": "u b"}),
        ("lines.csv", "sentence\na\nb\n", {"2": "a", "3": "b"}),
        (
            "rows.jsonl",
            '{"query": "q", "pos": ["a"], "neg": ["b", "c"]}\n{"query": "r", "pos": ["c"], "neg": ["d"]}\n',
            {"1": "a", "1-2": "b", "1-3": "c", "2-2": "d"},
        ),
        (
            "ids.jsonl",
            '{"query": "q", "pos": ["a"], "pos_id": ["x"], "neg": ["b"], "neg_id": ["y"]}\n',
            {"x": "a", "y": "b"},
        ),
    ],
)
def test_any_file_is_a_corpus_to_search(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    corpus = read_any_corpus(tmp_path / name)
    assert dict(zip(corpus.ids, corpus.texts, strict=True)) == expected


def test_a_beir_folder_and_unclear_columns_as_a_corpus(tmp_path):
    jsonl(tmp_path / "beir" / "corpus.jsonl", [{"_id": "d", "title": "t", "text": "a"}])
    assert list(read_any_corpus(tmp_path / "beir").texts) == ["t a"]
    (tmp_path / "sts.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    with pytest.raises(DataError, match=r"sts\.tsv: .*scored pairs; a corpus is ") as raised:
        read_any_corpus(tmp_path / "sts.tsv")
    assert "loss" not in str(raised.value), "nothing is trained"
    jsonl(tmp_path / "x.jsonl", [{"question": "q", "answer": "a", "context": "c"}])
    with pytest.raises(DataError, match=r"answer and context .*columns: \[question,answer\]"):
        read_any_corpus(tmp_path / "x.jsonl")
