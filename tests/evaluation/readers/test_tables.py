"""Tables of every kind but retrieval: which kind they are, what is read of them, and what is wrong with them."""

import gzip
import json
import re

import pytest

from embedtrain.config.evaluation import Classifier, SetKind
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    LabelledPairs,
    RetrievalSet,
    ScoredPairs,
)
from tests.evaluation.files import error_of, jsonl, parquet, read


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def labelled(first="sentence1", second="sentence2", label="label"):
    return [{first: "a", second: "b", label: 1}, {first: "c", second: "d", label: 0}]


@pytest.mark.parametrize("names", [(), ("sent1", "sent2", "labels")])
def test_labelled_pairs(tmp_path, names):
    rows = labelled(*names)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    tsv = "\t".join(rows[0]) + "\n" + "".join("\t".join(map(str, row.values())) + "\n" for row in rows)
    (tmp_path / "t.tsv").write_text(tsv)
    files = [
        tmp_path / "t.tsv",
        jsonl(tmp_path / "t.jsonl", rows),
        parquet(tmp_path / "t.parquet", rows),
        jsonl(tmp_path / "one.jsonl", [columns]),  # all pairs in one row, as in MTEB's first version
        tmp_path / "list.json",
    ]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    for path in files:
        for kind in (SetKind.auto, SetKind.pair_classification):
            assert read(path, kind=kind, name="t").data == LabelledPairs("t", ["a", "c"], ["b", "d"], [1, 0])


def test_a_score_takes_precedence_over_a_label(tmp_path):
    rows = [{**row, "score": row["label"] * 2.5} for row in labelled()]
    assert read(jsonl(tmp_path / "t.jsonl", rows)).data == ScoredPairs("t", ["a", "c"], ["b", "d"], [2.5, 0.0])
    data = read(tmp_path / "t.jsonl", kind=SetKind.pair_classification).data
    assert isinstance(data, LabelledPairs)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"question": "a", "answer": "x"}, {"question": "b", "answer": "y"}], "question = query, answer = relevant"),
        ([{"answer": "x", "id": 7, "question": "a"}, {"answer": "y", "id": 8, "question": "b"}], "question = query"),
        ([{"query": "a", "pos": ["x"], "neg": []}, {"query": "b", "pos": ["y"]}], "neg = other documents"),
        ([{"title": "a", "text": "x"}, {"title": "b", "text": "y"}], "title = query"),
    ],
)
def test_questions_and_answers_are_retrieval(tmp_path, rows, columns):
    """Whatever the order of the columns; the decision is printed with the options that override it."""
    loaded = read(jsonl(tmp_path / "qa.jsonl", rows))
    assert loaded.data == RetrievalSet(
        "qa", {"q0": "a", "q1": "b"}, Corpus(["d0", "d1"], ["x", "y"]), {"q0": {"d0": 1}, "q1": {"d1": 1}}
    )
    (note,) = loaded.notes
    assert note.startswith("qa: retrieval, ") and columns in note
    assert "columns: [QUERY,DOCUMENT]" in note and "kind: bitext" in note


def test_queries_and_documents_that_are_repeated(tmp_path):
    rows = [
        {"query": "a", "positive": ["x", "y"], "negative": ["n"]},
        {"query": "a", "positive": "z", "negative": ""},
        {"query": "b", "positive": ["x"], "negative": ["z", ""]},
        {"query": "", "positive": ["w"], "negative": []},
        {"query": "c", "positive": [], "negative": ["v"]},
    ]
    loaded = read(jsonl(tmp_path / "t.jsonl", rows), kind=SetKind.retrieval)
    assert loaded.data.queries == {"q0": "a", "q1": "b"}
    assert list(loaded.data.documents.texts) == ["x", "y", "n", "z", "w", "v"]
    assert loaded.data.judgements == {"q0": {"d0": 1, "d1": 1, "d3": 1}, "q1": {"d0": 1}}
    (note,) = loaded.notes
    assert f"2 rows without query or positive are left out (the first: {tmp_path}/t.jsonl:4)" in note


def test_columns_whose_roles_are_not_known_need_a_decision(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"left": "a", "right": "x"}])
    assert re.search(r"the columns left, right .*kind=retrieval.*kind=bitext", error_of(path))
    assert read(path, kind=SetKind.bitext).data == Bitext("t", ["a"], ["x"])
    assert dict(read(path, kind=SetKind.retrieval).data.queries) == {"q0": "a"}
    assert dict(read(path, kind=SetKind.retrieval, columns=["right", "left"]).data.queries) == {"q0": "x"}
    assert read(path, kind=SetKind.bitext, columns=["right", "left"]).data == Bitext("t", ["x"], ["a"])
    more = jsonl(tmp_path / "more.jsonl", [{"question": "a", "answer": "x", "context": "y"}])
    assert re.search(r"answer and context .*columns: \[question,answer\]", error_of(more))
    assert list(read(more, columns=["question", "context"]).data.documents.texts) == ["y"]
    assert "no odd, only question, answer, context" in error_of(more, columns=["odd", "answer"])
    assert re.search(
        r"columns=.*no use with .*labelled pairs",
        error_of(jsonl(tmp_path / "l.jsonl", labelled()), columns=["sentence1", "label", "sentence2"]),
    )


def test_translations(tmp_path, shared_data):
    (tmp_path / "t.tsv").write_text("cmn\teng\n一\tone\n二\ttwo\n")
    assert read(tmp_path / "t.tsv").data == Bitext("t", ["一", "二"], ["one", "two"])
    for names in (("source", "target"), ("zh-CN", "de"), ("text1", "text2"), ("eng_Latn", "zho_Hans")):
        loaded = read(jsonl(tmp_path / "names.jsonl", [dict(zip(names, ("eins", "one"), strict=True))]))
        assert loaded.data == Bitext("names", ["eins"], ["one"])
        assert "kind: retrieval" in loaded.notes[0]
    pairs = [{"sentence1": "eins", "sentence2": "one", "lang": "de"}]
    assert read(jsonl(tmp_path / "p.jsonl", pairs)).data == Bitext("p", ["eins"], ["one"])
    data = read(shared_data / "tatoeba" / "cmn-eng.tsv").data
    assert isinstance(data, Bitext) and len(data.first) == len(data.second) == 1000
    assert data.second[0] == "Let's have a look."


def test_classification(tmp_path):
    train = [{"text": f"t{i}", "label": i % 2, "label_text": "x"} for i in range(4)]
    test = [{"text": "u", "label": 1, "label_text": "x"}, {"text": "v", "label": 0, "label_text": "x"}]
    jsonl(tmp_path / "set" / "train.jsonl", train)
    jsonl(tmp_path / "set" / "test.jsonl", test)
    expected = ClassificationSet("set", ["t0", "t1", "t2", "t3"], [0, 1, 0, 1], ["u", "v"], [1, 0])
    assert read(tmp_path / "set").data == expected
    assert read(tmp_path / "set" / "test.jsonl", name="set").data == expected
    jsonl(tmp_path / "other.jsonl", test)
    assert read(tmp_path / "other.jsonl", name="set", train=str(tmp_path / "set" / "train.jsonl")).data == expected
    assert read(tmp_path / "set", split="train", train="test").data.texts == ["t0", "t1", "t2", "t3"]
    data = read(tmp_path / "set", classifier=Classifier.knn, samples_per_label=None, experiments=3).data
    assert (data.classifier, data.samples_per_label, data.experiments) == (Classifier.knn, None, 3)
    assert f"{{path: {tmp_path}/other.jsonl, train: FILE}}" in error_of(tmp_path / "other.jsonl")
    assert "train: FILE" in error_of(tmp_path / "set" / "train.jsonl")
    assert re.search(r"train=dev .* test, train$", error_of(tmp_path / "set", train="dev"))


def test_classes_are_the_same_in_files_of_another_kind(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,7\nb,8\n")
    parquet(tmp_path / "test.parquet", [{"text": "c", "label": 8}])
    data = read(tmp_path).data
    assert (data.train_labels, data.labels) == ([7, 8], [8])
    (tmp_path / "train.csv").write_text("text,label\na,07\nb,8\n")
    assert read(tmp_path).data.train_labels == ["07", "8"]


def test_a_class_without_training_texts_is_noted(tmp_path):
    jsonl(tmp_path / "train.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    jsonl(tmp_path / "test.jsonl", [{"text": "c", "label": "z"}, {"text": "d", "label": "x"}])
    loaded = read(tmp_path, name="n")
    assert loaded.data.labels == ["z", "x"]
    (note,) = loaded.notes
    assert re.search(rf"n: 1 classes of {tmp_path}/test.jsonl .* 1 of its 2 texts .*z", note)


def test_clustering(tmp_path):
    groups = [
        {"sentences": ["a", "b"], "labels": ["x", "y"]},
        {"sentences": ["c", "d", "e"], "labels": ["x", "x", "z"]},
    ]
    data = read(jsonl(tmp_path / "g.jsonl", groups)).data
    assert data.texts == ["a", "b", "c", "d", "e"]
    assert data.labels == [("x",), ("y",), ("x",), ("x",), ("z",)]
    assert [list(group) for group in data.groups] == [[0, 1], [2, 3, 4]]
    flat = [{"sentences": "a", "labels": 3}, {"sentences": "b", "labels": 4}]
    data = read(parquet(tmp_path / "f.parquet", flat), experiments=4).data
    assert data == ClusteringSet("f", ["a", "b"], [(3,), (4,)], None, 4)
    nested = [{"text": "a", "labels": ["p", 1]}, {"text": "b", "labels": ["q"]}, {"text": "c", "labels": ["q", 2]}]
    data = read(jsonl(tmp_path / "n.jsonl", nested), kind=SetKind.clustering).data
    assert data.labels == [("p", 1), ("q",), ("q", 2)]
    (tmp_path / "c.csv").write_text("text,label\na,1\nb,2\n")
    assert read(tmp_path / "c.csv", kind=SetKind.clustering).data.labels == [(1,), (2,)]


def test_folders_of_tables_and_of_save_to_disk(tmp_path, shared_data):
    import datasets

    data = read(shared_data / "stsb" / "en").data
    assert data.name == "en" and data == read(shared_data / "stsb" / "en" / "test.tsv", name="en").data
    assert len(read(shared_data / "stsb" / "en", split="dev").data.first) == 1500
    both = {"validation": datasets.Dataset.from_list(labelled()), "train": datasets.Dataset.from_list(labelled()[:1])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved").data == LabelledPairs("saved", ["a", "c"], ["b", "d"], [1, 0])
    both["validation"].save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one").data.labels == [1, 0]


FILE = "{}/t.jsonl"
LISTS = [{"sentences": ["a"], "labels": [1]}, {"sentences": "b", "labels": 2}]
# Rows, options, and a pattern of the error with its location and values; {} stands for the folder.
BROKEN = [
    (labelled(label="score")[:1], {}, "^{}/t.jsonl: .*1 different scores"),
    ([{"sentence1": "a", "sentence2": "b", "label": 2}], {}, "^{}/t.jsonl:1: label .*0 or 1, not 2"),
    (labelled()[:1], {}, "^{}/t.jsonl: 1 pairs .*label 1"),
    (labelled(), {"kind": SetKind.sts}, "^{}/t.jsonl:1: .*score, only sentence1, sentence2, label"),
    ([{"sentence1": ["a"], "sentence2": ["b", "c"]}], {}, "^{}/t.jsonl:1: .*sentence1 1, sentence2 2"),
    ([{"a": 1, "b": "x"}], {}, "^{}/t.jsonl: the columns a, b .*sentence1, "),
    ([{"text": "a", "labels": 1}], {}, "^{}/t.jsonl: the columns text, labels .*kind=class.*kind=cluster"),
    ([], {}, "^{}/t.jsonl is empty"),
    ([], {"kind": SetKind.bitext}, "^{}/t.jsonl is empty"),
    ([{"text": "a", "label": 1}], {"train": FILE}, "^{}/t.jsonl: all 1 texts .*label 1"),
    ([{"text": "a", "label": None}], {"train": FILE}, "^{}/t.jsonl:1: label .*None"),
    ([{"sentences": "a", "labels": []}], {}, "^{}/t.jsonl:1: labels .*empty"),
    ([{"sentences": ["a"], "labels": [1, 2]}], {}, r"^{}/t.jsonl:1: 1 texts .*\[1, 2\]"),
    (LISTS, {}, "^{}/t.jsonl:2: sentences .*single text"),
    ([{"sentences": ["a", "b"], "labels": [1, 1]}], {}, "^{}/t.jsonl: 2 texts without two clusters"),
    ([{"query": "q", "positive": ["a"], "negative": []}], {}, "^{}/t.jsonl: none of its 1 rows .*positives"),
    ([{"query": "q", "positive": 3, "negative": []}], {}, "^{}/t.jsonl:1: positive .*3"),
    (labelled(), {"split": "test"}, "^split=test .*{}/t.jsonl"),
    (labelled(), {"config": "en"}, "^config=en .*{}/t.jsonl"),
    (labelled(), {"train": "x"}, "^train=x .*{}/t.jsonl.*labelled pairs"),
    (labelled(), {"candidates": "x"}, "^candidates=x .*{}/t.jsonl.*labelled pairs"),
    (labelled(), {"metrics": ["ndcg@10"]}, "^metrics of t: 'ndcg@10'"),
    (labelled(), {"subset": 1}, "^{}/t.jsonl with subset=1: 1 pairs"),
]


@pytest.mark.parametrize(("rows", "options", "pattern"), BROKEN)
def test_broken_tables(tmp_path, rows, options, pattern):
    options = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    error = error_of(jsonl(tmp_path / "t.jsonl", rows), **options)
    assert re.search(pattern.replace("{}", str(tmp_path)), error), error


def test_a_table_that_is_not_utf8(tmp_path):
    (tmp_path / "t.tsv").write_bytes(b"a\tb\nx\t\xff\n")
    assert error_of(tmp_path / "t.tsv").startswith(f"{tmp_path}/t.tsv:2: not UTF-8 (byte 0xff in ")


def test_unused_options_are_noted(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", labelled())
    loaded = read(path, query_prompt="q: ", query_max_length=9, document_max_length=7, metrics=["f1", "ap"])
    assert loaded.notes == ("t: document_max_length has no use, since a set of labelled pairs has no documents",)
    assert (loaded.query_prompt, loaded.query_max_length, loaded.metrics) == ("q: ", 9, ("f1", "ap"))


def test_packed_tables(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", labelled())
    (tmp_path / "u.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(tmp_path / "u.jsonl.gz", name="t").data == read(path).data
