"""Columns by their names: their roles, what is ignored and what is not clear; files that are not what they say."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import assert_error, error_of, read, write

# Rows of one query "q", one positive "p" and perhaps the negatives "n" and "m".
CLEAR = [
    {"answer": "p", "question": "q"},
    {"id": 0, "question": "q", "answer": "p"},
    {"Answer": "p", "Question_Id": "17", "Question": "q"},
    {"Answer Text": "p", "question_text": "q"},
    {"text": "p", "title": "q", "_id": "d1"},
    {"abstract": "p", "title": "q"},
    {"hypothesis": "p", "premise": "q"},
    {"sentence_B": "p", "sentence_A": "q"},
    {"sentence2": "p", "sentence1": "q", "idx": 3},
    {"target": "p", "source": "q"},
    {"response": "p", "query": "q", "guid": "3f2a"},
    {"output": "p", "instruction": "q"},
    {"completion": "p", "prompt": "q"},
    {"document": "p", "query": "q", "queryId": "x"},
    {"context": "p", "question": "q", "views": 17, "tags": {"a": 1}},
    {"query": "q", "title": "t", "text": "p"},
    {"query": 17, "question": "q", "answer": "p"},
    {"answer": "p", "frage": "q"},
    {"deu": "q", "eng": "p"},
    {"negative_2": "m", "positive": "p", "negative_1": "n", "anchor": "q"},
    {"rejected": "n", "chosen": "p", "prompt": "q"},
]


@pytest.mark.parametrize("row", CLEAR, ids="-".join)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_roles_by_name(tmp_path: Path, row: dict[str, object], suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    if suffix == ".jsonl":
        write(path, row)
    else:
        path.write_text(",".join(row) + "\n" + ",".join("" if value is None else str(value) for value in row.values()))
    if isinstance(row.get("tags"), dict) and suffix == ".csv":  # an object is a text there
        path.write_text("context,question,views\np,q,17\n")
    (example,), report = read(path)
    assert (example.query, example.positives) == ("q", ("p",))
    assert sorted(example.negatives) == sorted(str(value) for value in row.values() if value in ("n", "m"))
    how = "order" if "deu" in row else "name"
    assert f"(by {how}; override: columns=[QUERY,POSITIVE,...])" in str(report)
    unused = [name for name, value in row.items() if value not in ("q", "p", "n", "m") and name != "tags"]
    assert all(name in str(report).partition("not used: ")[2] for name in unused)


UNCLEAR = [
    ({"question": "q", "answer": "a", "context": "c"}, "answer and context .* positive", "[question,answer]"),
    ({"query": "q", "question": "r", "answer": "a"}, "query and question .* query", "[query,answer]"),
    ({"instruction": "i", "input": "j", "output": "o"}, "instruction and input .* query", "[instruction,output]"),
    ({"anchor": "q", "good": "p", "bad one": "n"}, "good, bad one is the positive", "[anchor,good]"),
    ({"erste Spalte": "a", "zweite": "b", "dritte": "c"}, "erste Spalte, zweite, dritte", "['erste Spalte',zweite]"),
]


@pytest.mark.parametrize(("row", "problem", "columns"), UNCLEAR, ids=lambda value: str(value)[:20])
def test_unclear_columns_end_with_the_option_to_write(
    tmp_path: Path, row: dict[str, str], problem: str, columns: str
) -> None:
    path = write(tmp_path / "t.jsonl", row)
    message = error_of(path)
    assert f"{{path: {path}, columns: {columns}}}" in message
    assert ", ".join(row) in message
    assert_error(problem, path)
    first, second = list(row)[:2]
    assert read(path, columns=[second, first])[0][0].query == row[second]


def test_a_column_is_judged_by_several_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("rank,frage,antwort\n1,42,\n2,b,p\n")
    assert_error(f"^{path}:2: .*antwort", path)
    path.write_text("rank,frage,antwort\n1,42,p\n2,b,p\n")
    assert [e.query for e in read(path)[0]] == ["42", "b"]
    answers = write(tmp_path / "a.jsonl", {"question": "6 * 7", "answer": 42})
    assert_error(f'^{answers}:1: column "answer" .*number .42.*quotation marks', answers)


# Files


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_delimiters(tmp_path: Path, delimiter: str, name: str) -> None:
    with (tmp_path / name).open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "answer", "question"], [1, 'a, b; "c" | d', "q, r;\t|"], [2, "two\nlines", "s"]])
    examples, _ = read(tmp_path / name)
    assert [(e.query, e.positives) for e in examples] == [
        ("q, r;\t|", ('a, b; "c" | d',)),
        ("s", ("two\nlines",)),
    ]


def test_quotation_marks_of_a_plain_tsv_stay(tmp_path: Path) -> None:
    rows = [["question", "answer"], ['"Hello," he said.', '"All of it"'], ['5" pipe', 'say ""so""']]
    (tmp_path / "t.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    assert [[e.query, *e.positives] for e in read(tmp_path / "t.tsv")[0]] == rows[1:]


@pytest.mark.parametrize(
    "text",
    [
        "how do I compress a file?,zstd is a fast lossless compressor.\nwhat,ever\n",
        '17,"What is Rust?","A systems programming language."\n',
        "rust,A language that prevents errors of memory without a collector of garbage, they say\n".replace(", ", " "),
    ],
    ids=["sentences", "numbered", "long"],
)
def test_files_without_a_header(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert_error(f"^{tmp_path}/t.csv:1: .*no header.*'query,positive", tmp_path / "t.csv")


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    table = pa.table({"answer": ["p"], "question": ["q"]})
    for name in ("t.csv", "t.jsonl"):
        pq.write_table(table, tmp_path / name)
        assert read(tmp_path / name)[0][0].query == "q"
    (tmp_path / "u.csv").write_bytes(gzip.compress(b"answer,question\np,q\n"))
    assert read(tmp_path / "u.csv")[0][0].query == "q"
    for content, problem in ((b"PK\x03\x04...", "Excel"), ("a,b\n".encode("utf-16"), "UTF-16.*iconv")):
        (tmp_path / "v.csv").write_bytes(content)
        assert_error(f"^{tmp_path}/v.csv: .*{problem}", tmp_path / "v.csv")
    (tmp_path / "w.csv").write_text(json.dumps({"query": "q", "pos": ["p"]}) + "\n")
    assert_error(f"^{tmp_path}/w.csv:1: .*JSON.*.jsonl", tmp_path / "w.csv")
