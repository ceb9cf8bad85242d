"""Columns by their names: their roles, what is ignored and what is not clear; files that are not what they say."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from embedtrain.config.columns import parse_columns
from embedtrain.config.losses import BatchTripletConfig, ContrastiveConfig, CoSENTConfig
from embedtrain.config.recipe import OnError
from embedtrain.errors import ConfigError
from tests.data.files import assert_error, error_of, read, write, write_table

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
    {"query": "q", "response": "p", "rejected_response": "n"},
    {"question": "q", "answers": "a", "positive_ctxs": "p", "hard_negative_ctxs": "n", "negative_ctxs": "m"},
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
    assert (example.query, example.positives.texts) == ("q", ("p",))
    assert sorted(example.negatives.texts) == sorted(str(value) for value in row.values() if value in ("n", "m"))
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


# Values of other forms

# Rows of the query "q", the positives "p" and "r" and the negatives "n" and "m".
READ = [
    {"question": "q", "positive_ctxs": [{"text": "p"}, {"text": "r"}], "negative_ctxs": [{"text": "n"}, {"text": "m"}]},
    {"query": "q", "positive": {"text": ["p", "r"], "docid": ["1", "2"]}, "negatives": [{"contents": "n"}, "m"]},
    {"query": {"text": "q", "id": 7}, "positives": ["p", "r"], "hard_negatives": {"passage": ["n", "m"]}},
    {
        "query": "q",
        "passages": {"is_selected": [0, 1, 0, 1], "passage_text": ["n", "p", "m", "r"], "url": list("abcd")},
    },
    {
        "query": "q",
        "docs": [{"label": 1, "text": "p"}, {"label": 1, "text": "r"}, {"label": 0, "text": "n"}],
        "neg": "m",
    },
    {
        "query": "q",
        "positive_passages": [{"contents": "p"}, {"body": "r"}],
        "negative_passages": [{"doc": "n"}, {"title": "m"}],
    },
    # Known names of one role in any mixture.
    {"query": "q", "positive": ["p", "r"], "neg": ["n", "m"]},
    {"query": "q", "pos": ["p", "r"], "negative": ["n", "m"]},
    {"question": "q", "pos": ["p", "r"], "neg": ["n"], "hard_negative": "m"},
    {"query": "q", "positives": ["p", "r"], "negative_1": "n", "negative_2": "m", "pos_id": [1, 2]},
    {"anchor": "q", "positive": ["p", "r"], "neg_1": "n", "hard_negatives": ["m"], "neg_scores": [0, 1]},
    {"query": "q", "pos": [{"text": "p"}, {"title": "", "text": "r"}], "neg": [{"text": "n", "score": 0.4}, "m"]},
]


@pytest.mark.parametrize("row", READ, ids="-".join)
def test_objects_and_mixed_names(tmp_path: Path, row: dict[str, object]) -> None:
    (example,), report = read(write(tmp_path / "t.jsonl", row))
    assert (example.query, example.positives.texts, sorted(example.negatives.texts)) == ("q", ("p", "r"), ["m", "n"])
    unused = str(report).partition("not used: ")[2]
    assert not any(name in unused for name in row if name.startswith(("pos", "neg")) and name != "neg_scores")


def test_titles_of_objects(tmp_path: Path) -> None:
    row = {"question": "q", "positive_ctxs": [{"title": "T", "text": "p", "score": 9.5}], "hard_negative_ctxs": []}
    (example,), report = read(write(tmp_path / "t.jsonl", {**row, "answers": ["a"]}))
    assert (example.positives.texts, example.negatives.texts) == (("T p",), ())
    assert "not used: answers" in str(report)


REFUSED = [
    (
        {"query": "q", "positives": {"doc_id": ["1"], "score": [0.5]}, "text": "t"},
        "'positives' .*without a text.*doc_id",
    ),
    ({"query": "q", "positive": "p", "negatives": [{"doc_id": "1"}]}, "'negatives' .*without a text.*doc_id"),
    ({"query": "q", "positive": {"title": "T", "text": 5}}, '"text" of column "positive" must be a text, not a number'),
    ({"query": "q", "positive_passages": [{"docid": "1"}]}, 'element 1 of "positive_passages" .*without a text.*docid'),
    ({"prompt": "q", "chosen": [{"role": "user", "content": "q"}], "rejected": "n"}, "'chosen' .*conversation"),
    ({"query": "q", "text": "p", "positive": True}, "'positive' holds a truth value"),
    ({"query": "q", "text": "p", "positive": 0}, '"positive" must be a text, not a number'),
    ({"query": "q", "pos": ["p"], "positive": "r"}, '"pos" and "positive" may each be the positives'),
    ({"query": "q", "positive_passages": [{"text": "p"}], "negatives": ["n"]}, '"negatives" would not be used'),
    ({"query": "q", "pos": ["p", "r"], "labels": [1, 0]}, '"labels" makes these scored pairs'),
    ({"question1": "q", "question2": "p", "is_duplicate": 0}, "'is_duplicate' makes these .*is_duplicate == 1"),
    ({"premise": "q", "hypothesis": "p", "gold_label": "contradiction"}, "'gold_label' makes these"),
    ({"sentence1": "q", "sentence2": "p", "similarity_score": 0.1}, "'similarity_score' makes these"),
]


@pytest.mark.parametrize(("row", "problem"), REFUSED)
def test_what_a_name_says_is_never_left_out(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    assert_error(problem, write(tmp_path / "t.jsonl", row))


def test_columns_that_later_rows_have(tmp_path: Path) -> None:
    first = {"question": "q", "answer": "p"}
    path = write(tmp_path / "t.jsonl", first, {**first, "negative": "n"})
    assert [e.negatives.texts for e in read(path)[0]] == [(), ("n",)]
    late = write(tmp_path / "u.jsonl", *[first] * 30, {**first, "negative": "n"})
    assert_error(f'^{late}:31: "negative" would not be used', late)
    assert len(read(late, columns=["question", "answer"])[0]) == 31
    assert_error("'label' makes these scored pairs", write(tmp_path / "v.jsonl", first, {**first, "label": 0}))


def test_a_column_that_may_hold_labels(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("query,passage,good\nq,p,1\nr,n,0\n")
    message = error_of(path, ConfigError)
    assert f"{{path: {path}, columns: {{query: query, positive: passage, label: good}}}}" in message
    assert "columns: [query,passage] to leave it out" in message
    assert [e.query for e in read(path, where="good == 1")[0]] == ["q"]
    roles = {"query": "query", "positive": "passage", "label": "good"}
    scored, _ = read(path, columns=roles, needs=ContrastiveConfig().row_requirements)
    assert [e.positives.scores for e in scored] == [(1.0,), (0.0,)]
    assert_error("'good' makes these scored pairs", path, columns=roles)
    with pytest.raises(ConfigError, match="'good' holds numbers"):  # not a row that may be left out
        read(path, on_error=OnError.skip)
    path.write_text("query,passage,level\nq,p,1\nr,n,2\n")
    assert len(read(path)[0]) == 2


def test_a_column_that_may_hold_instructions(tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "positive": "p", "negative": "n", "prompt": f"find {n}"} for n in range(2)]
    path = write(tmp_path / "t.jsonl", *rows)
    roles = "{query: query, positive: positive, prompt: prompt}"
    examples, report = read(path)
    assert [example.instruction for example in examples] == [None, None]
    assert f"if prompt is an instruction for the query: columns={roles})" in str(report)
    examples, report = read(path, columns=yaml.safe_load(roles))
    assert [example.instruction for example in examples] == ["find 0", "find 1"]
    assert "positive = positive, prompt = instruction" in str(report)
    examples, report = read(path, columns=["query", "positive", "negative"])
    assert [example.instruction for example in examples] == [None, None]
    assert "not used: prompt" in str(report)
    assert_error(
        'column "prompt" must be a text',
        write(tmp_path / "u.jsonl", {**rows[0], "prompt": 3}),
        columns=yaml.safe_load(roles),
    )


def test_columns_by_role(tmp_path: Path) -> None:
    row = {"a": "p", "b": "q", "c": "n", "d": ["m"], "e": 0.5, "f": 3}
    path = write(tmp_path / "t.jsonl", row)
    (example,), report = read(path, columns={"query": "b", "positive": "a", "negative": ["c", "d"]})
    assert (example.query, example.positives.texts, example.negatives.texts) == ("q", ("p",), ("n", "m"))
    assert "columns b = query, a = positive, c + d = negatives" in str(report)
    pairs = {"sentence1": "b", "sentence2": "a", "score": "e"}
    assert read(path, columns=pairs, needs=CoSENTConfig().row_requirements)[0][0].positives.scores == (0.5,)
    text = {"text": "b", "label": "f"}
    assert read(path, columns=text, needs=BatchTripletConfig().row_requirements)[0][0].label == 3
    assert_error("no column 'x'; there are: a, b", path, columns={"query": "b", "positive": "x"})


WRONG_COLUMNS: list[tuple[object, str]] = [
    ("question", "columns='question': write columns in the order"),
    ({"query": "a", "document": "b"}, "columns.document=b: roles are query, text, "),
    ({"query": "a", "text": "b"}, "columns.text=.* query is the same role"),
    ({"query": ["a", "b"], "positive": "c"}, "columns.query=.* is one column"),
    ({"positive": "c"}, "has no query"),
    ({"query": "a", "negative": "c"}, "has no positive"),
    ([["a"], "b"], "columns=.*in the order"),
]


@pytest.mark.parametrize(("columns", "message"), WRONG_COLUMNS)
def test_wrong_columns(columns: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_columns(columns)


# Lists in cells

LISTS = {
    "['n1', 'n2']": ["n1", "n2"],
    '["n1", "n2"]': ["n1", "n2"],
    "['it\\'s', \"5' long\"]": ["it's", "5' long"],
    '["a\\u00e9", "b"]': ["aé", "b"],
    "[]": [],
    "['one']": ["one"],
    "[1] Smith et al.": ["[1] Smith et al."],
    "[sic]": ["[sic]"],
    "[1, 2]": ["[1, 2]"],
    "plain": ["plain"],
}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("cell", LISTS)
def test_a_cell_that_holds_a_list(tmp_path: Path, suffix: str, cell: str) -> None:
    path = write_table(tmp_path / f"t{suffix}", {"query": ["q"], "pos": ["['p']"], "neg": [cell]})
    (example,), _ = read(path)
    assert (example.positives.texts, list(example.negatives.texts)) == (("p",), LISTS[cell])


@pytest.mark.parametrize("cell", ["['n1' 'n2']", "['n1'\n 'n2']", "['n1', nan, 'n2']", "['n1, 'n2']"])
def test_a_cell_that_looks_like_a_list(tmp_path: Path, cell: str) -> None:
    path = write_table(tmp_path / "t.csv", {"query": ["q"], "pos": ["p"], "neg": [cell]})
    assert_error(f"^{path}:2: .*looks like a list of texts", path)


# Files


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_delimiters(tmp_path: Path, delimiter: str, name: str) -> None:
    with (tmp_path / name).open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "answer", "question"], [1, 'a, b; "c" | d', "q, r;\t|"], [2, "two\nlines", "s"]])
    examples, _ = read(tmp_path / name)
    assert [(e.query, e.positives.texts) for e in examples] == [
        ("q, r;\t|", ('a, b; "c" | d',)),
        ("s", ("two\nlines",)),
    ]


def test_quotation_marks_of_a_plain_tsv_stay(tmp_path: Path) -> None:
    rows = [["question", "answer"], ['"Hello," he said.', '"All of it"'], ['5" pipe', 'say ""so""']]
    (tmp_path / "t.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    assert [[e.query, *e.positives.texts] for e in read(tmp_path / "t.tsv")[0]] == rows[1:]


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
