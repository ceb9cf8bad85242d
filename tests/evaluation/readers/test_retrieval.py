"""Retrieval sets from BEIR folders, tables of pairs, and errors of both."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.sources.parts import part_of_file
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.rows import read_rows
from embedtrain.evaluation.sets import load_sets, read_set, set_name
from embedtrain.evaluation.types import Corpus

CORPUS = [
    {"_id": "d1", "title": "Title", "text": "text"},
    {"_id": 2, "title": "", "text": "  no title "},
    {"_id": "d3", "text": "no title either"},
    {"_id": "d4", "title": None, "text": ""},
]
QUERIES = [{"_id": "q2", "text": "two"}, {"_id": "q1", "text": "one"}, {"_id": "q3", "text": "not judged"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\t2\t0\nq2\td3\t2\n"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def beir(tmp_path):
    folder = tmp_path / "my-set"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(lines(CORPUS))
    (folder / "queries.jsonl").write_text(lines(QUERIES))
    (folder / "qrels" / "test.tsv").write_text(QRELS)
    return folder


def read(path, **options):
    return read_set(EvaluationSet(path=str(path), **options))


def error_of(path, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


def test_beir_folder(beir):
    loaded = read(f"{beir}/", query_prompt="q: ", document_prompt="")
    data = loaded.data
    assert data.name == "my-set"
    assert data.documents == Corpus(["d1", "2", "d3", "d4"], ["Title text", "no title", "no title either", ""])
    assert list(data.queries.items()) == [("q2", "two"), ("q1", "one"), ("q3", "not judged")]
    assert data.judgements == {"q1": {"d1": 1, "2": 0}, "q2": {"d3": 2}}
    assert data.judged_queries == ["q2", "q1"]
    assert (loaded.query_prompt, loaded.document_prompt, loaded.notes) == ("q: ", "", ())


def test_beir_folder_in_gzip_and_parquet(beir):
    expected = read(beir).data
    (beir / "corpus.jsonl").unlink()
    with gzip.open(beir / "corpus.jsonl.gz", "wt") as file:
        file.write(lines(CORPUS))
    (beir / "queries.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(QUERIES), beir / "queries.parquet")
    assert read(beir).data == expected
    assert read(beir, kind=SetKind.retrieval, name="other").data.name == "other"


def test_beir_folder_with_a_corpus_in_csv(beir):
    expected = read(beir).data
    (beir / "corpus.jsonl").unlink()
    (beir / "corpus.csv").write_text("docid,title,contents\nd1,Title,text\n2,,no title\nd3,,no title either\nd4,,\n")
    assert read(beir).data == expected


def test_files_without_a_header_and_with_windows_line_breaks(beir):
    expected = read(beir).data
    (beir / "qrels" / "test.tsv").write_text(QRELS.split("\n", 1)[1])
    assert read(beir).data == expected
    (beir / "qrels" / "test.tsv").write_bytes(b"\xef\xbb\xbf" + QRELS.replace("\n", "\r\n").encode())
    assert read(beir).data == expected


# A header, and the columns of a judgement in its order.
HEADERS = [
    ("corpus-id query-id score", "{document} {query} {score}"),
    ("query-id score corpus-id", "{query} {score} {document}"),
    ("relevance qid docno", "{score} {query} {document}"),
    ("topic iteration doc_id rel", "{query} 0 {document} {score}"),
    ("split passage_id question_id grade", "test {document} {query} {score}"),
]


@pytest.mark.parametrize(("header", "columns"), HEADERS)
@pytest.mark.parametrize("name", ["test.tsv", "test.qrels", "test.csv", "test.jsonl"])
def test_columns_of_judgements_by_their_header(beir, name, header, columns):
    """Not by their order."""
    expected, file = read(beir).data, beir / "qrels" / name
    judgements = [
        dict(zip(("query", "document", "score"), line.split("\t"), strict=True)) for line in QRELS.splitlines()
    ]
    rows = [columns.format(**judgement).split() for judgement in judgements[1:]]
    (beir / "qrels" / "test.tsv").unlink()
    if name == "test.jsonl":
        file.write_text(lines([dict(zip(header.split(), row, strict=True)) for row in rows]))
    else:
        separator = {".tsv": "\t", ".csv": ",", ".qrels": "\t" if len(rows[0]) == 3 else " "}[file.suffix]
        file.write_text("".join(separator.join(row) + "\n" for row in (header.split(), *rows)))
    assert read(beir).data == expected


def test_splits(beir):
    qrels = beir / "qrels"
    (qrels / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq3\td1\t1\n")
    assert read(beir).data.judged_queries == ["q2", "q1"]
    assert read(beir, split="dev").data.judged_queries == ["q3"]
    assert error_of(beir, split="train") == f"{qrels} holds no split 'train', only dev, test"
    (qrels / "test.tsv").rename(qrels / "zzz.tsv")
    assert read(beir).data.judged_queries == ["q3"]
    (qrels / "dev.tsv").rename(qrels / "aaa.tsv")
    assert error_of(beir) == f"{qrels} holds the splits aaa, zzz: choose one with split="
    (qrels / "aaa.tsv").unlink()
    assert read(beir).data.judged_queries == ["q2", "q1"]
    (qrels / "zzz.tsv").unlink()
    assert error_of(beir) == f"{qrels} holds no split: expected one such as test"


# File, its content, the location that the error names, and a value that it names.
BROKEN = [
    ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n{"_id": "d2"', "corpus.jsonl:2", "broken JSON"),
    ("corpus.jsonl", '["d1", "a"]\n', "corpus.jsonl:1", "a list"),
    ("corpus.jsonl", '\n{"_id": "d1", "words": "a"}\n', "corpus.jsonl:2", "_id, words"),
    ("corpus.jsonl", '{"id": "d1", "text": 7}\n', "corpus.jsonl:1", '"text" must be a text, not a number (7)'),
    ("corpus.jsonl", '{"_id": 1.5, "text": "a"}\n', "corpus.jsonl:1", '"_id" must be an id'),
    ("corpus.jsonl", '{"text": "a"}\n', "corpus.jsonl:1", "needs an id"),
    ("corpus.jsonl", '{"_id": "d1", "text": "\\ud800"}\n', "corpus.jsonl:1", "surrogate"),
    ("corpus.jsonl", '{"_id": 1, "text": "a"}\n{"_id": "1", "text": "b"}\n', "corpus.jsonl:2", "the id '1'"),
    ("corpus.jsonl", "", "corpus.jsonl", "is empty"),
    ("queries.jsonl", "\n", "queries.jsonl", "is empty"),
    ("corpus.jsonl", b'{"_id": "d1", "text": "\xff"}\n', "corpus.jsonl:1", "byte 0xff"),
    ("qrels/test.tsv", b"q1\td1\t1\nq1\t\xff\t1\n", "qrels/test.tsv:2", "byte 0xff"),
    ("qrels/test.tsv", QRELS.encode("utf-16"), "qrels/test.tsv", "UTF-16"),
    ("queries.jsonl", lines(QUERIES).encode("utf-16"), "queries.jsonl", "UTF-16"),
    ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", "qrels/test.tsv:2", "1 field"),
    ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\thigh\n", "qrels/test.tsv:2", "'high'"),
    ("qrels/test.tsv", "q1\td1\thigh\nq1\td3\t1\n", "qrels/test.tsv:1", "and these are q1, d1"),
    ("qrels/test.tsv", "query-id\tscore\tcorpus-id\tsplit\nq1\t1\td1\n", "qrels/test.tsv:2", "4 columns"),
    ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t0.5\n", "qrels/test.tsv:2", "0.5"),
    ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t2\n", "qrels/test.tsv:2", "judged 2 for query q1, before 1"),
    ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "qrels/test.tsv", "no judgement"),
    ("qrels/test.tsv", "x\td1\t1\n", "qrels/test.tsv", "queries.jsonl; it has 'x'"),
    ("qrels/test.tsv", "q1\tx\t1\n", "qrels/test.tsv", "corpus.jsonl; it has 'x'"),
    ("qrels/test.tsv", "q1\td1\t0\n", "qrels/test.tsv", "above 0"),
]


@pytest.mark.parametrize(("name", "content", "location", "value"), BROKEN)
def test_broken_beir_folders(beir, name, content, location, value):
    (beir / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    error = error_of(beir)
    assert error.startswith(f"{beir}/{location}")
    assert value in error


def test_compression_is_detected_by_content(beir):
    expected = read(beir).data
    for path in (beir / "corpus.jsonl", beir / "qrels" / "test.tsv"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read(beir).data == expected
    (beir / "corpus.jsonl").rename(beir / "corpus.jsonl.gz")
    assert read(beir).data == expected
    (beir / "corpus.jsonl.gz").write_text(lines(CORPUS))
    assert error_of(beir).startswith(f"{beir}/corpus.jsonl.gz: is named .gz but is not a gzip file")


def test_a_truncated_gzip_file(beir):
    (beir / "corpus.jsonl").unlink()
    packed = gzip.compress(lines(CORPUS * 100).encode())
    (beir / "corpus.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    assert re.search(r"corpus.jsonl.gz:\d+: the gzip file is damaged or truncated", error_of(beir))


@pytest.mark.parametrize("name", ["corpus", "queries"])
def test_a_missing_file(beir, name):
    (beir / f"{name}.jsonl").unlink()
    assert error_of(beir) == f"{beir} holds no {name}.jsonl or {name}.jsonl.gz or {name}.parquet"


def test_judgements_of_unknown_documents_count_as_in_trec_eval(beir):
    with (beir / "qrels" / "test.tsv").open("a") as file:
        file.write("gone\td1\t1\ngone\td3\t1\nq1\tgone\t1\nq2\tlost\t1\n")
    loaded = read(beir)
    assert loaded.data.judgements == {"q1": {"d1": 1, "2": 0, "gone": 1}, "q2": {"d3": 2, "lost": 1}}
    assert len(loaded.notes) == 2
    assert loaded.notes[0].startswith("my-set: 1 judged queries are not in ")
    assert loaded.notes[1].startswith("my-set: 2 judgements are of documents that are not in ")


PAIRS = [("a", 'b "quoted', 2.5), ("c", "d", 0.0), ('"e"', "", 5.0)]


def test_tables_of_pairs(tmp_path):
    rows = [dict(zip(("sentence1", "sentence2", "score"), pair, strict=True)) for pair in PAIRS]
    head = "score,sentence1,sentence2"
    plain = ("t.tsv", "t.csv", "t.jsonl", "t.parquet", "t.json", "T.CSV")
    packed = ("t.jsonl.gz", "t.json.gz", "t.tsv.gz", "t.csv.gz")
    paths = {name: tmp_path / name for name in plain + packed}
    paths["t.tsv"].write_text("\t".join(rows[0]) + "\n" + "".join(f"{a}\t{b}\t{s}\n" for a, b, s in PAIRS))
    paths["t.csv"].write_text(f'\ufeff{head}\n2.5,a,"b ""quoted"\n0,c,d\n5,"""e""",\n')
    paths["t.jsonl"].write_text(lines(rows))
    paths["t.json"].write_text(lines(rows))
    paths["T.CSV"].write_bytes(gzip.compress(paths["t.csv"].read_bytes()))  # what a file is counts, not its name
    for name in packed:
        paths[name].write_bytes(gzip.compress(paths[name.removesuffix(".gz")].read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), paths["t.parquet"])
    for path in paths.values():
        data = read(path).data
        assert data.name.lower() == "t"
        assert list(zip(data.first, data.second, data.scores, strict=True)) == PAIRS


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ","), ("t.tsv", "\t")])
def test_a_long_cell(tmp_path, name, separator):
    long = "x" * 300_000
    rows = [("sentence1", "sentence2", "score"), (long, "b", "1"), ("c", long, "2")]
    (tmp_path / name).write_text("".join(separator.join(row) + "\n" for row in rows))
    data = read(tmp_path / name).data
    assert (data.first, data.second, data.scores) == ([long, "c"], ["b", long], [1.0, 2.0])


def test_a_row_is_named_by_its_first_line(tmp_path):
    (tmp_path / "t.csv").write_text('sentence1,sentence2,score\n"two\nlines",b,1\n"two\nmore",b,high\n')
    assert error_of(tmp_path / "t.csv") == f"{tmp_path}/t.csv:4: score must be a number, not a text ('high')"


def test_a_parquet_text_that_is_not_utf8(tmp_path):
    latin = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"sentence1": latin, "sentence2": ["a", "b"], "score": [1, 2]}), tmp_path / "t.parquet")
    assert error_of(tmp_path / "t.parquet").startswith(f"{tmp_path}/t.parquet:2: not UTF-8 (byte 0xe9 in ")


# File, its content, the location that the error names, and a value that it names.
BROKEN_TABLES = [
    ("t.tsv", "sentence1\tsentence2\tscore\nA\tB\n", "t.tsv:2", "2 cells where the header has 3"),
    ("t.tsv", "sentence1\tsentence2\tscore\nA\tB\t\n", "t.tsv:2", "''"),
    ("t.jsonl", '{"sentence1": "A", "sentence2": "B", "score": NaN}\n', "t.jsonl:1", "nan"),
    ("t.tsv", "sentence1\tsentence2\tscore\nA\tB\t1\nC\tD\t1\n", "t.tsv", "1 different scores"),
    ("t.tsv", "", "t.tsv", "is empty"),
    ("t.csv", 'sentence1,sentence2,score\n"A,B,1\n', "t.csv:2", "broken CSV: unexpected end of data"),
    ("t.parquet", "PAR", "t.parquet", "Parquet"),
    ("t.txt", "a", "t.txt", ".jsonl, .json, .csv and .tsv"),
    ("t.jsonl", '{"sentence1": "A", "sentence2": "B", "score": 1' + "0" * 400 + "}\n", "t.jsonl:1", "10000"),
    ("t.tsv", "sentence1\tsentence2\tscore\nA\tB\t" + "x" * 9999, "t.tsv:2", f"'{'x' * 59}..."),
    ("t.csv.gz", "score\n1\n", "t.csv.gz", "gzip"),
    ("t.csv", "score,score\n1,1\n", "t.csv:1", "twice"),
]


@pytest.mark.parametrize(("name", "content", "location", "value"), BROKEN_TABLES)
def test_broken_tables(tmp_path, name, content, location, value):
    (tmp_path / name).write_text(content)
    error = error_of(tmp_path / name)
    assert error.startswith(f"{tmp_path}/{location}")
    assert value in error


@pytest.mark.parametrize("name", ["gone.tsv", "gone.jsonl", "gone.parquet"])
def test_a_deleted_file(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name}: cannot be read"):
        list(read_rows(part_of_file(str(tmp_path / name))))


def test_errors_of_paths_and_options(beir, tmp_path):
    assert error_of(tmp_path / "nothing") == f"{tmp_path}/nothing: no such file or folder"
    assert error_of("nothing.tsv") == "nothing.tsv: no such file or folder"
    assert error_of(beir, kind=SetKind.sts) == f"{beir} is a retrieval set (BEIR folder), but kind=sts"
    with pytest.raises(ConfigError, match=r"^config=en .*my-set is a BEIR folder"):
        read(beir, config="en")
    with pytest.raises(ConfigError, match=r"^experiments=3 .*my-set, .* retrieval set"):
        read(beir, experiments=3)
    with pytest.raises(ConfigError, match=r"^metrics of my-set: 'spearman' .* rankings: "):
        read(beir, metrics=["spearman"])
    assert "is one file" in error_of(beir / "corpus.jsonl", kind=SetKind.retrieval)
    (tmp_path / "empty").mkdir()
    assert "is not an evaluation set: expected corpus.jsonl" in error_of(tmp_path / "empty")
    (tmp_path / "empty" / "zzz.json").write_text("{}")  # in a folder more often a configuration
    assert "is not an evaluation set: expected corpus.jsonl" in error_of(tmp_path / "empty")
    (tmp_path / "empty" / "test.tsv.gz").write_bytes(gzip.compress(b""))
    assert error_of(tmp_path / "empty") == f"{tmp_path}/empty/test.tsv.gz is empty"
    assert error_of(tmp_path / "empty", kind=SetKind.retrieval) == f"{tmp_path}/empty/test.tsv.gz is empty"
    for name in ("one.csv", "two.csv"):
        (tmp_path / "empty" / name).write_text("a,b\n1,2\n")
    (tmp_path / "empty" / "test.tsv.gz").unlink()
    assert error_of(tmp_path / "empty").endswith(f"give one of them, such as {tmp_path}/empty/two.csv")
    assert error_of(tmp_path / "empty", split="x") == f"{tmp_path}/empty holds no split 'x', only one, two"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/pairs/dev", "dev"),
        ("x/dev/", "dev"),
        ("a/stsb.tsv", "stsb"),
        ("a/b.jsonl.gz", "b"),
        ("a/b.v2.csv.gz", "b.v2"),
        ("a/b.json", "b"),
        ("own/set.v2", "set.v2"),
    ],
)
def test_a_name_is_the_end_of_the_path(path, name):
    assert set_name(EvaluationSet(path=path)) == name
    assert set_name(EvaluationSet(path=path, name="given")) == "given"


def test_the_name_of_the_current_folder(monkeypatch, beir):
    monkeypatch.chdir(beir)
    assert read(".").data.name == "my-set"


def load(world, configs, broken_on=None):
    if world.rank == broken_on:
        configs = [EvaluationSet(path="/nothing here")]
    try:
        return [loaded.data.name for loaded in load_sets(configs, world)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_loading_on_all_ranks(ranks, beir):
    one, other = EvaluationSet(path=str(beir)), EvaluationSet(path=str(beir), name="again")
    assert ranks(2, load, [one, other]) == [["my-set", "again"]] * 2
    for answer in ranks(2, load, [one, one]):
        assert "ConfigError: evaluation.sets: " in answer
        assert "are both called 'my-set'; write {path: " in answer
    answers = ranks(2, load, [one], 1)
    assert answers[1] == "DataError: /nothing here: no such file or folder"
    assert answers[0] == "FailedElsewhere: rank 1 failed while reading evaluation sets: " + answers[1]


def load_offline(world, configs, optional):
    constants.HF_HUB_OFFLINE = True
    warnings: list[str] = []
    try:
        sets = load_sets(configs, world, optional=lambda name: name in optional, warn=warnings.append)
    except Exception as error:
        return type(error).__name__, str(error)
    return [loaded.data.name for loaded in sets], warnings


def test_sets_of_a_hub_that_cannot_be_reached(ranks, beir):
    configs = [EvaluationSet(path=str(beir)), EvaluationSet(path="owner/on-the-hub")]
    for names, warnings in ranks(2, load_offline, configs, ["on-the-hub"]):
        assert names == ["my-set"]
        assert len(warnings) == 1
        assert "owner/on-the-hub" in warnings[0]
        assert "evaluation.sets=[]" in warnings[0]
    kinds, messages = zip(*ranks(2, load_offline, configs, []), strict=True)  # it decides which checkpoint is best
    assert "HubUnavailable" in kinds
    assert all("evaluation.sets: owner/on-the-hub" in message for message in messages)
