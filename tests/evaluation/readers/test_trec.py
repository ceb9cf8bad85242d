"""TREC's files read: judgements of four columns, and runs whose documents are ranked again."""

import pytest

from embedtrain.config.evaluation import SetKind
from embedtrain.evaluation.tasks import run_path, write_run
from tests.evaluation.files import beir, error_of, jsonl, read

CORPUS = {"d1": "one", "d2": "two", "d 3": "three", "d4": "four"}
QUERIES = {"q1": "first", "q 2": "second", "q3": "third"}


@pytest.mark.parametrize("name", ["test.qrels", "test.txt", "test.trec", "test.tsv"])
@pytest.mark.parametrize("separator", [" ", "\t", "  \t"])
def test_judgements_of_four_columns(tmp_path, name, separator):
    lines = [("q1", "0", "d1", "2"), ("q1", "0", "d2", "-1"), ("q3", "Q0", "d4", "1")]
    beir(tmp_path / "s", CORPUS, QUERIES, "".join(separator.join(line) + "\n" for line in lines), name)
    loaded = read(tmp_path / "s")
    assert loaded.data.judgements == {"q1": {"d1": 2, "d2": -1}, "q3": {"d4": 1}}
    assert loaded.notes == ()


@pytest.mark.parametrize("gain", ["1", "1.0", "+1", " 1"])
def test_a_file_without_a_header(tmp_path, gain):
    loaded = read(beir(tmp_path / "s", CORPUS, QUERIES, f"q1\td1\t{gain}\nq3\td4\t1.0\n"))
    assert loaded.data.judgements == {"q1": {"d1": 1}, "q3": {"d4": 1}}


def test_judgements_as_a_table(tmp_path):
    folder = beir(tmp_path / "s", CORPUS, QUERIES, "q1\td1\t1\n")
    expected = read(folder).data
    (folder / "qrels" / "test.tsv").unlink()
    jsonl(folder / "qrels" / "test.jsonl", [{"query-id": "q1", "corpus-id": "d1", "score": 1}])
    assert read(folder).data == expected


def test_a_subset_on_which_every_model_scores_0(tmp_path):
    folder = beir(tmp_path / "s", CORPUS, QUERIES, "q1\td1\t1\nq3\td2\t1\n")
    (tmp_path / "of-q1.run").write_text("q1 Q0 d1 1 0.5 x\nq1 Q0 d2 2 0.4 x\n")
    (tmp_path / "of-q3.run").write_text("q3 Q0 d1 1 0.5 x\n")
    (remaining,) = read(folder, subset=1).data.judged_queries
    other = tmp_path / f"of-{'q1' if remaining == 'q3' else 'q3'}.run"
    error = error_of(folder, kind=SetKind.reranking, candidates=str(other), subset=1)
    assert "subset=1: no query has a relevant document and candidates" in error


def test_wrong_judgements(tmp_path):
    folder = beir(tmp_path / "s", CORPUS, QUERIES, "q1 0 d1 1\nq1 0 d2\n", "test.qrels")
    assert error_of(folder).startswith(f"{folder}/qrels/test.qrels:2: 1 field")
    (folder / "qrels" / "test.qrels").write_text("q1 0 d1 1\nq1 0 d2 0.5\n")
    assert error_of(folder) == f"{folder}/qrels/test.qrels:2: score must be a whole number, not 0.5"
    for score in ("10000000", "-1e30", "9223372036854775808"):
        (folder / "qrels" / "test.qrels").write_text(f"q1 0 d1 1\nq1 0 d2 {score}\n")
        assert error_of(folder).startswith(f"{folder}/qrels/test.qrels:2: score must be between -10000 and 10000, not")


def test_ids_that_c_would_cut_off(tmp_path):
    corpus = {"d\0x": "one", "d": "two"}
    folder = beir(tmp_path / "s", corpus, QUERIES, "q1 0 d 1\n", "test.qrels")
    assert error_of(folder).startswith(f"{folder}/corpus.jsonl:1: ") and "NUL" in error_of(folder)
    index = tmp_path / "i.json"
    index.write_text('{"queries": {"q\\ud800": "x"}, "corpus": {"d": "y"}, "relevant_docs": {"q\\ud800": ["d"]}}')
    assert error_of(index).startswith(f"{index}: queries: an id holds half a character")


def test_a_query_without_a_relevant_document_is_noted(tmp_path):
    loaded = read(beir(tmp_path / "s", CORPUS, QUERIES, "q1\td1\t1\nq3\td2\t0\n"))
    assert loaded.data.judged_queries == ["q1", "q3"]
    assert loaded.notes == (
        "s: 1 judged queries have no relevant document and count as 0, as in trec_eval; mteb leaves them out "
        "(the first: q3)",
    )


@pytest.fixture
def folder(tmp_path):
    return beir(tmp_path / "s", CORPUS, QUERIES, "q1\td1\t1\nq 2\td 3\t1\nq3\td4\t1\n")


def test_sides_are_exchanged(tmp_path):
    """Relevant documents that are there are the queries, in the order of the corpus; all queries are documents."""
    texts = {"q1": "one", "q2": "two", "q3": "three"}
    qrels = "query-id\tcorpus-id\tscore\nq1\td2\t2\nq2\td2\t1\nq2\td1\t1\nq1\td3\t0\nq2\tgone\t1\n"
    folder = beir(tmp_path / "s", {"d1": "a", "d2": "b", "d3": "c"}, texts, qrels)
    loaded = read(folder, exchange_sides=True)
    assert dict(loaded.data.queries) == {"d1": "a", "d2": "b"}
    assert (loaded.data.documents.ids, loaded.data.documents.texts) == (list(texts), list(texts.values()))
    assert loaded.data.judgements == {"d2": {"q1": 2, "q2": 1}, "d1": {"q2": 1}}
    assert loaded.notes[-1].startswith("s: 1 relevant documents that are not there")
    rows = jsonl(tmp_path / "r.jsonl", [{"query": "q", "positive": "p", "negative": "n"}])
    assert f"exchange_sides=true has no use with {rows}" in error_of(rows, exchange_sides=True)


def test_candidates_of_a_run(tmp_path, folder):
    run = tmp_path / "first.run"
    run.write_text("q1 Q0 d4 1 9.0 x\nq1\tQ0\td1\t2\t8.0\tx\nq3 Q0 d4 1 3 x\nq3 Q0 gone 2 2 x\nnobody Q0 d2 1 1 x\n")
    loaded = read(folder, candidates=str(run))
    data = loaded.data
    assert data.documents.ids == ["d1", "d4"]  # what nobody ranks is not encoded
    assert data.documents.texts == ["one", "four"]
    assert data.candidates == {"q1": [1, 0], "q 2": [], "q3": [1]}
    assert data.judgements == read(folder).data.judgements
    no_candidates, no_documents = loaded.notes
    assert no_candidates.startswith(f"s: 1 judged queries have no candidates in {run}") and "q 2" in no_candidates
    assert no_documents.startswith(f"s: 1 candidates of {run} are not documents") and "gone" in no_documents


def test_a_run_written_by_write_run(tmp_path, folder):
    run = {"q 2": {"d 3": 0.5, "d1": 0.25}, "q1": {"d1": 1.0}, "q3": {"d4": 1.0}}
    write_run(run_path(tmp_path, "s"), run.items(), 10)
    loaded = read(folder, kind=SetKind.reranking, candidates=str(run_path(tmp_path, "s")))
    assert loaded.data.documents.ids == ["d1", "d 3", "d4"]
    assert loaded.data.candidates == {"q1": [0], "q 2": [1, 0], "q3": [2]}
    assert loaded.notes == ()


WRONG_RUNS = [
    ("q1 Q0 d1 1 0.5\n", "{run}:1: 5 fields, but a line of a run is query, Q0, document, rank, score, tag: 'q1 Q0 d1"),
    ("q1 Q0 d1 1 2 x\nq1 Q0 d1 2 1 x\n", "{run}:2: document d1 is repeated for query q1, first at {run}:1"),
    ("", "{run} is empty"),
    ("q1 Q0 x 1 2 x\n", "{run}: none of its 1 documents is one of s; it has 'x' where documents are called 'd1'"),
    ("x Q0 d1 1 2 x\n", "{run}: none of its 1 queries is one of s; it has 'x' where judged queries are called 'q1'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_RUNS, ids=[message for _, message in WRONG_RUNS])
def test_wrong_runs(tmp_path, folder, text, message):
    run = tmp_path / "a.run"
    run.write_text(text)
    assert error_of(folder, candidates=str(run)).startswith(message.format(run=run))


def test_missing_candidates(tmp_path, folder):
    assert error_of(folder, candidates=str(tmp_path / "gone")) == f"{tmp_path}/gone: no such run file"
    assert error_of(folder, kind=SetKind.reranking).endswith(
        f"so kind=reranking needs a run file: write {{path: {folder}, kind: reranking, candidates: FILE}}"
    )
    rows = jsonl(tmp_path / "r.jsonl", [{"query": "q", "positive": "a", "negative": "b"}])
    assert "whose rows hold their own" in error_of(rows, candidates="x")


def test_ids_that_are_identical(folder):
    assert read(folder).data.ignore_identical_ids is False
    assert read(folder, ignore_identical_ids=True).data.ignore_identical_ids is True
