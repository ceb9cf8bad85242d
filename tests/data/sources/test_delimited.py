"""CSV files of spreadsheets and databases; no row after an unmatched quotation mark is silently lost."""

from pathlib import Path

import pytest

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import OnError
from embedtrain.data.sources.column_roles import Content, content_of
from embedtrain.data.sources.text_rows import json_rows
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import ScoredPairs
from tests.data.files import error_of, read
from tests.data.sources.test_rows import texts
from tests.data.sources.test_scores import PAIRS, scores

HEAD = "a,b\n" + "".join(f"q{i},p{i}\n" for i in range(3))  # 4 lines
TAIL = "".join(f"r{i},s{i}\n" for i in range(3))


def broken(path: Path, text: str) -> str:
    """The sentence, the same with skip as without."""
    path.write_text(text)
    messages = {error_of(path, on_error=on_error) for on_error in OnError}
    assert len(messages) == 1
    return messages.pop()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f'{HEAD}x,"open\n{TAIL}',
            "5: broken CSV: a quotation mark that opens on line 5 never closes (it swallows lines 5 to 8)",
        ),
        (
            f'{HEAD}"two\nlines","open\n{TAIL}',
            "5: broken CSV: a quotation mark that opens on line 6 never closes (it swallows lines 6 to 9)",
        ),
        (
            f'{HEAD}x,"he said ""so""\nand ""that""\n{TAIL}',
            "5: broken CSV: a quotation mark that opens on line 5 never closes (it swallows lines 5 to 9)",
        ),
        (
            f'{HEAD}x,"open\n{TAIL}q,"quoted"\n{TAIL}',
            "5: broken CSV: a quotation mark that opens on line 5 closes in the middle of a cell on line 9 "
            "(it swallows lines 5 to 9)",
        ),
        (
            f'{HEAD}x,"open\n{TAIL}end",one,more\n{TAIL}',
            "5: lines 5 to 9 make one row, since the text between quotation marks is one cell, and it has 4 cells "
            "where the header has 2: correct the quotation marks",
        ),
        (
            f'a,"b\n{TAIL}',
            "1: broken CSV: a quotation mark that opens on line 1 never closes (it swallows lines 1 to 4)",
        ),
        ('"a"x,b\nq,p\n', "1: broken CSV: ',' expected after '\"'"),
    ],
    ids=["open", "second cell", "escaped", "closed", "cells", "header", "broken header"],
)
def test_quotation_marks_over_several_lines_stop_the_run(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "t.csv"
    assert broken(path, text).startswith(f"{path}:{problem}")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('x,"bad" y\n', "broken CSV: ',' expected after"),
        ('"two words",p,more\n', "3 cells where the header has 2"),
        ("alone\n", "1 cell where the header has 2"),
    ],
)
def test_a_bad_row_within_one_line_is_skipped(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + line + TAIL)
    examples, report = read(path, OnError.skip)
    assert [e.location.line for e in examples] == [2, 3, 4, 6, 7, 8]
    assert report.rows.num_skipped == 1
    assert report.problems[0].startswith(f"{path}:5: {problem}")


def test_an_open_cell_in_the_last_line_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + 'x,"cut off')
    examples, report = read(path, OnError.skip)
    assert len(examples) == 3
    (problem,) = report.problems
    assert problem.startswith(f"{path}:5: ") and "opens on line 5 never closes" in problem


def test_multiline_cells_and_marks_within_words_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + '"a ""b""\n\nc",5" pipe\nx,"y\n"\n' + TAIL)
    examples, _ = read(path)
    assert (examples[3].query, examples[3].positives.texts, examples[4].positives.texts) == (
        'a "b"\n\nc',
        ('5" pipe',),
        ("y\n",),
    )
    assert [e.location.line for e in examples] == [2, 3, 4, 5, 8, 10, 11, 12]


# Spreadsheets


@pytest.mark.parametrize(
    "text",
    [
        "a;b;\nq;p;\nr;s;\n",  # a delimiter at the end of every line
        "a;b\nq;p;\nr;s;;\n",  # of rows alone
        "a;b;;\nq;p\nr;s\n",  # of the header alone
        "a;b\nq;p\nr;s\n;\n;\n\n",  # empty rows at the end
        "a;b\n;\nq;p\n;;;\nr;s\n",  # and between
        "sep=;\na;b\nq;p\nr;s\n",
        'sep=;\r\n"a";"b"\r\nq;p\r\nr;s\r\n',
        "sep=:\na:b\nq:p\nr:s\n",
        "a;b\rq;p\rr;s",  # Macintosh
        "sep=;\ra;b\rq;p\rr;s\r",
        "a;b\r\rq;p\r\rr;s\r\n",
    ],
)
def test_what_spreadsheets_write_around_the_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    examples, report = read(path)
    assert texts(examples) == [("q", ("p",), ()), ("r", ("s",), ())]
    assert report.rows.num_skipped == 0


def test_lines_of_a_macintosh_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'a,b\r"x\ny",p\rq\r')
    assert error_of(path).startswith(f"{path}:4: 1 cell where the header has 2")


def test_a_carriage_return_within_a_text(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"a\tb\nq\rx\tp\r\n")
    assert texts(read(tmp_path / "t.tsv")[0]) == [("q\rx", ("p",), ())]
    path = tmp_path / "t.csv"
    path.write_bytes(b'a,b\n"q\rx",p\nq,s\rx\n')
    examples, report = read(path, OnError.skip)
    assert texts(examples) == [("q\rx", ("p",), ())]
    assert report.problems == [
        f"{path}:3: broken CSV: a carriage return within a cell without quotation marks: put the cell in quotation "
        "marks, or remove the carriage return"
    ]


def test_decimal_commas(tmp_path: Path) -> None:
    rows = [("a", "b", "0,80"), ("c", "d", "-0,815"), ("e", "f", "4,1"), ("g", "h", "1.5")]
    path = tmp_path / "t.csv"
    path.write_text("sentence1;sentence2;score\n" + "".join(";".join(row) + "\n" for row in rows))
    assert [score for ((score,), _) in scores(read(path, needs=PAIRS)[0])] == pytest.approx([0.8, -0.815, 4.1, 1.5])
    data = read_set(EvaluationSet(path=str(path))).data
    assert isinstance(data, ScoredPairs) and list(data.scores) == [0.8, -0.815, 4.1, 1.5]
    path.write_text("sentence1;sentence2;score\na;b;1,234\n")
    assert "must be a number, not a text ('1,234'): write a decimal point" in error_of(path, needs=PAIRS)


def test_a_windows_file_names_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("Frage;Antwort\nKäse – wie?;Öl\n".encode("cp1252"))
    message = error_of(path)
    assert message.startswith(f"{path}:2: not UTF-8 (byte 0xe4 in ")
    assert "; if 'Käse – wi' is meant: iconv -f CP1252 -t UTF-8 FILE > OTHER" in message


# Backslashes

# What Spark writes in quotation marks, a row with its backslashes as they are, and what MySQL writes without marks.
ESCAPED = r"""a,b
"What is \"al dente\"?","the \"cook book\""
C:\new and \alpha,"a ""\\"" b"
x\,y,"two
lines\""
z,\N
"""


def test_backslashes_escape_where_the_source_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ESCAPED)
    assert "write {path: " + f"{path}, backslash_escapes: true}}" in error_of(path)
    examples, report = read(path, OnError.skip, backslash_escapes=True)
    assert texts(examples) == [
        ('What is "al dente"?', ('the "cook book"',), ()),
        ("C:\\new and \\alpha", ('a "\\" b',), ()),
        ("x,y", ('two\nlines"',), ()),
    ]
    assert report.problems == [f'{path}:6: column "b" must be a text, not nothing (null)']
    plain = tmp_path / "plain.tsv"
    plain.write_text("a\tb\nq \\\tx\tp\\\nr\n")
    assert texts(read(plain, backslash_escapes=True)[0]) == [("q \tx", ("p\nr",), ())]


def test_backslashes_of_an_evaluation_set_and_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('sentence1,sentence2,score\n"a \\"b\\"",c,1\nd,e,0\n')
    data = read_set(EvaluationSet(path=str(path), backslash_escapes=True)).data
    assert isinstance(data, ScoredPairs) and data.first == ['a "b"', "d"]
    (tmp_path / "t.jsonl").write_text('{"a": "q", "b": "p"}\n')
    assert "backslash_escapes is an option of CSV" in error_of(
        tmp_path / "t.jsonl", ConfigError, backslash_escapes=True
    )


def test_lists_and_decimal_commas_of_cells_are_numbers():
    rows = [{"share": "0,80", "weights": "[1, 2]", "answer": "True", "year": "1,234 or so"}, {"share": "12,5"}]
    found = {name: content_of(name, rows, is_cells=True) for name in rows[0]}
    assert found == {
        "share": Content.number,
        "weights": Content.number,
        "answer": Content.text,
        "year": Content.text,
    }


def test_lines_of_json_that_end_with_a_carriage_return_alone_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"query": "a"}\r{"query": "b"}\r')
    ((_, row),) = json_rows(path)
    assert "carriage return" in str(row) and r"tr '\r' '\n' <" in str(row)
    path.write_bytes(b'{"query": "a"}\r\n{"query": "b"}\r\n')
    assert [row for _, row in json_rows(path)] == [{"query": "a"}, {"query": "b"}]


def test_a_pool_of_one_document_is_named(tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text('{"query": "a", "documents": ["x"], "labels": [1]}\n' * 2)
    with pytest.raises(DataError, match=r"pool.jsonl: .*ranked: add negatives, or write queries, corpus"):
        read_set(EvaluationSet(path=str(path)))
