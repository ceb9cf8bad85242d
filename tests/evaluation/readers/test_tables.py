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
from tests.data.files import write_table
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


# Names of two sentences and of what is known of them, two values, and the kind of set that they make.
JUDGED_PAIRS = [
    ("sentence1", "sentence2", "similarity_score", (0.1, 4.9), SetKind.sts),
    ("sentence_A", "sentence_B", "relatedness_score", (4.2, 0.2), SetKind.sts),
    ("sentence1", "sentence2", "label", (4.2, 0.2), SetKind.sts),
    ("text_a", "text_b", "label", (5, 0), SetKind.sts),
    ("premise", "hypothesis", "score", (1, 0), SetKind.sts),
    ("question1", "question2", "is_duplicate", (1, 0), SetKind.pair_classification),
    ("sentence1", "sentence2", "label", (True, False), SetKind.pair_classification),
    ("premise", "hypothesis", "gold_label", (1, 0), SetKind.pair_classification),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv", ".parquet"])
@pytest.mark.parametrize(("first", "second", "score", "found", "kind"), JUDGED_PAIRS)
def test_pairs_with_scores_and_labels(tmp_path, first, second, score, found, kind, suffix):
    """The values decide between degrees of similarity and labels, and any name can be given."""
    pairs = {first: ["a", "c"], second: ["b", "d"], score: list(found)}
    expected = ScoredPairs if kind is SetKind.sts else LabelledPairs
    for names, options in (
        ((first, second, score), {}),
        ((first, second, score), {"kind": kind}),
        (("x", "y", "z"), {"kind": kind, "columns": {"query": "x", "positive": "y", "label": "z"}}),
        (("x", "y", "z"), {"columns": {"sentence1": "x", "sentence2": "y", "label": "z"}}),
    ):
        table = dict(zip(names, pairs.values(), strict=True))
        path = write_table(tmp_path / f"t{suffix}", {"other": ["e", "f"], **table})
        if names[0] == "x" and "kind" not in options and score == "score":  # by its values, these are labels
            continue
        assert read(path, **options).data == expected("t", ["a", "c"], ["b", "d"], list(map(float, found)))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("label", ["is_selected", "gold", "relevance"])
def test_judged_documents_of_queries(tmp_path, suffix, label):
    """A document with the label 0 is not relevant."""
    table = {
        "query": ["a", "a", "b", "b", "c"],
        "passage": ["w", "x", "x", "y", "z"],
        label: [0, 2 if label == "relevance" else 1, 0, 1, 0],
    }
    path = write_table(tmp_path / f"t{suffix}", table)
    loaded = read(path)
    gain = table[label][1]
    expected = {"q0": {"d0": 0, "d1": gain}, "q1": {"d1": 0, "d2": 1}}
    documents = Corpus([f"d{i}" for i in range(4)], list("wxyz"))
    assert loaded.data == RetrievalSet("t", {"q0": "a", "q1": "b"}, documents, expected)
    assert f"{label} = relevance" in loaded.notes[0]
    assert "1 rows without query or passage are left out" in loaded.notes[1]
    ranked = read(path, kind=SetKind.reranking).data
    assert list(ranked.queries.values()) == ["a", "b"] and [len(c) for c in ranked.candidates.values()] == [2, 2]
    other = write_table(tmp_path / f"u{suffix}", {"q": table["query"], "d": table["passage"], "how": table[label]})
    roles = {"query": "q", "positive": "d", "label": "how"}
    assert read(other, name="t", columns=roles).data == loaded.data
    assert read(other, name="t", columns=["q", "d"]).data.judgements["q0"] == {"d0": 1, "d1": 1}


def test_graded_lists_are_reranking_sets(tmp_path):
    rows = [
        {"query": "a", "documents": ["x", "y", "z"], "labels": [0, 3, 1]},
        {"query": "b", "documents": ["x", "w"], "labels": [1, 0]},
    ]
    loaded = read(jsonl(tmp_path / "t.jsonl", rows))
    ids = loaded.data.documents.ids
    judged = [
        {loaded.data.documents.texts[ids.index(document)]: gain for document, gain in gains.items()}
        for gains in loaded.data.judgements.values()
    ]
    assert judged == [{"x": 0, "y": 3, "z": 1}, {"x": 1, "w": 0}]
    assert [len(candidates) for candidates in loaded.data.candidates.values()] == [3, 2]
    assert "labels = relevance" in loaded.notes[0] and "kind: retrieval" in loaded.notes[0]
    searched = read(tmp_path / "t.jsonl", kind=SetKind.retrieval).data
    assert searched.candidates is None and list(searched.documents.texts) == ["x", "y", "z", "w"]
    cells = {name: [json.dumps(row[name]) if name != "query" else row[name] for row in rows] for name in rows[0]}
    assert read(write_table(tmp_path / "t.csv", cells)).data == loaded.data
    passages = [{"query": "a", "passages": {"is_selected": [0, 1], "passage_text": ["x", "y"], "url": ["u", "v"]}}]
    assert read(jsonl(tmp_path / "m.jsonl", passages)).data.judgements == {"q0": {"d1": 1}}


def test_texts_inside_of_objects(tmp_path):
    rows = [
        {
            "question": "a",
            "answers": ["short"],
            "positive_ctxs": [{"title": "T", "text": "x", "score": 3}],
            "hard_negative_ctxs": [{"text": "y"}],
        }
    ]
    data = read(jsonl(tmp_path / "t.jsonl", rows)).data
    assert list(data.documents.texts) == ["T x", "y"] and data.judgements == {"q0": {"d0": 1}}


def test_named_texts_and_classes(tmp_path):
    for name, texts in (("train", ["a", "b"]), ("test", ["c", "d"])):
        write_table(tmp_path / "t" / f"{name}.csv", {"body": texts, "topic": [0, 1]})
    columns = {"text": "body", "label": "topic"}
    data = read(tmp_path / "t", kind=SetKind.classification, columns=columns).data
    assert (data.train_texts, data.texts, data.labels) == (["a", "b"], ["c", "d"], [0, 1])
    clusters = read(tmp_path / "t" / "test.csv", kind=SetKind.clustering, columns=columns).data
    assert clusters.labels == [(0,), (1,)]
    assert "kind=classification" in error_of(tmp_path / "t", columns=columns)


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
    assert "no column 'odd'; there are: question, answer, context" in error_of(more, columns=["odd", "answer"])


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
    assert "samples_per_label=3 has" in error_of(tmp_path / "set", classifier=Classifier.centroid, samples_per_label=3)
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


NLI = [{"sentence1": "a", "sentence2": "b", "gold_label": name} for name in ("neutral", "entailment")]
FILE = "{}/t.jsonl"
LISTS = [{"sentences": ["a"], "labels": [1]}, {"sentences": "b", "labels": 2}]
# Rows, options, and a pattern of the error with its location and values; {} stands for the folder.
BROKEN = [
    (labelled(label="score")[:1], {}, "^{}/t.jsonl: .*1 different scores"),
    ([{"sentence1": "a", "sentence2": "b", "label": 2}], {}, "^{}/t.jsonl: label holds 2, .*kind: sts"),
    (NLI, {}, "^{}/t.jsonl:1: gold_label is a text .'neutral'.*0 or 1"),
    (labelled()[:1] + NLI, {"kind": SetKind.pair_classification}, "^{}/t.jsonl:2: no column .label.; there are: "),
    ([{"query": "q", "passage": "p", "score": 0.5}], {}, "^{}/t.jsonl:1: score is 0.5, .*[[]query,passage[]]"),
    ([{"query": "q", "passage": ["p"], "label": [1, 0]}], {}, "^{}/t.jsonl:1: label has 2 .*passage has 1"),
    ([{"query": "q", "text": "p", "good": i % 2} for i in range(2)], {}, "^{}/t.jsonl: .*positive: text, label: good"),
    ([{"s1": "q", "s2": "p", "how": i / 7} for i in range(2)], {}, "^{}/t.jsonl: .*positive: s2, label: how"),
    ([{"query": "q", "positive": {"doc_id": ["1"]}}], {}, "^{}/t.jsonl: column 'positive' .*doc_id"),
    (labelled()[:1], {}, "^{}/t.jsonl: 1 pairs .*label 1"),
    ([{"s1": "a", "s2": "b"}], {"kind": SetKind.sts}, "^{}/t.jsonl:1: .*no score or label, only s1, s2"),
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
