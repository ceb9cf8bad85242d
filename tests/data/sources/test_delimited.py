"""CSV files with unmatched quotation marks: no row after one is silently lost, with any on_error."""

from pathlib import Path

import pytest

from embedtrain.config.recipe import OnError
from tests.data.files import error_of, read

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
    assert [e.line for e in examples] == [2, 3, 4, 6, 7, 8]
    assert report.num_skipped == 1
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
    assert (examples[3].query, examples[3].positives, examples[4].positives) == ('a "b"\n\nc', ('5" pipe',), ("y\n",))
    assert [e.line for e in examples] == [2, 3, 4, 5, 8, 10, 11, 12]
