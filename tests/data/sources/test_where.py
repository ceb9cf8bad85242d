"""`where` of a source: which rows and positives are read, from all kinds of files."""

import re
from pathlib import Path

import pytest

from embedtrain.commands.mine import compose as compose_mine
from embedtrain.config.columns import Comparison, parse_condition
from embedtrain.config.recipe import OnError
from embedtrain.data.cache.cache import Cache
from embedtrain.errors import ConfigError
from tests.data.cache.test_read_sources import store_of
from tests.data.files import assert_error, read, write, write_table

ROWS = [
    {"query": "a", "pos": ["a1", "a2", "a3"], "pos_id": ["1", "2", "3"], "rank": [1, 9, 2], "score": [0.9, 0.8, 0.1]},
    {"query": "b", "pos": ["b1"], "rank": [3], "score": [0.5]},
    {"query": "c", "pos": ["c1"], "rank": 2, "score": 0.4},
    {"query": "d", "pos": ["d1", "d2"], "rank": 1, "score": [0.7, 0.2]},
]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("rank <= 2", {"a": ("a1", "a3"), "c": ("c1",), "d": ("d1", "d2")}),
        ("rank<3 and score>=0.4", {"a": ("a1",), "c": ("c1",), "d": ("d1",)}),
        ("score > 2e-1 and rank != 1", {"a": ("a2",), "b": ("b1",), "c": ("c1",)}),
        ("rank == 3", {"b": ("b1",)}),
    ],
)
def test_rows_and_positives_for_which_it_holds(
    tmp_path: Path, where: str, expected: dict[str, tuple[str, ...]]
) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    examples, report = read(path, where=where)
    assert {row.query: row.positives.texts for row in examples} == expected
    assert report.rows.num_left_out == len(ROWS) - len(expected)
    assert f"{report.rows.num_left_out} other rows left out by `where`" in str(report)
    unused = {"rank", "score"} - {comparison.column for comparison in parse_condition(where)}
    assert set(report.rows.ignored) == unused
    if "a" in expected:
        assert examples[0].positives.ids == tuple(name[1:] for name in expected["a"])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_tables(tmp_path: Path, suffix: str) -> None:
    """Also one that is not among those named as texts."""
    table = {"question": ["a b", "c d", "e f"], "answer": ["b c", "d e", "f g"], "rank": [1, 5, 2]}
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        rows = zip(*table.values(), strict=True)
        path.write_text("\n".join([",".join(table), *(",".join(map(str, row)) for row in rows)]))
    else:
        write_table(path, table)
    examples, _ = read(path, columns=["question", "answer"], where="rank < 5")
    assert [(row.query, row.positives.texts) for row in examples] == [("a b", ("b c",)), ("e f", ("f g",))]


@pytest.mark.parametrize(
    ("row", "where", "problem"),
    [
        ({"score": 1}, "rank < 2", 'no "rank" in this row'),
        (
            {"rank": "1"},
            "rank < 2",
            r'column "rank" must be a number, not a text \("1"\)|column "rank" must be a number',
        ),
        ({"rank": None}, "rank < 2", 'column "rank" must be a number, not nothing'),
        ({"rank": [1, 7, 8]}, "rank < 2", "have 3 numbers, and the row has 1 positive"),
        ({"rank": [1, 7, 8], "score": [1, 2]}, "rank < 2 and score > 0", "have 3 and 2 numbers"),
    ],
)
def test_wrong_values_are_errors_with_file_and_line(
    tmp_path: Path, row: dict[str, object], where: str, problem: str
) -> None:
    good = {"query": "b", "pos": ["b1"], "rank": 1, "score": 1}
    path = write(tmp_path / "a.jsonl", good, {"query": "a", "pos": ["a1"], **row})
    assert_error(rf"^{re.escape(str(path))}:2: .*({problem})", path, where=where)
    examples, report = read(path, where=where, on_error=OnError.skip)
    assert [row.query for row in examples] == ["b"]
    assert report.rows.num_skipped == 1


def test_no_row_is_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    assert_error(r"no row that can be trained on; where=rank > 10 leaves out 4", path, where="rank > 10")


def test_it_is_a_part_of_what_names_the_rows(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.jsonl", *ROWS), Cache(directory=tmp_path / "cache")
    keys = [store_of(path, cache, where=where).key for where in (None, "rank <= 2", "rank<=2.0", "rank <= 3")]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_conditions() -> None:
    assert parse_condition("a.b >= -1e3 and and_c!=.5") == (
        Comparison("a.b", ">=", -1000.0),
        Comparison("and_c", "!=", 0.5),
    )
    for text in ("rank", "rank < two", "rank < 2 or rank > 5", "2 < rank", "", "a() < 1", "rank < 1 and", "rank < inf"):
        with pytest.raises(ConfigError, match=re.escape(f"where={text}: ")):
            parse_condition(text)
    with pytest.raises(ConfigError, match=r"data, a\.jsonl: where=rank: .*such as"):
        compose_mine(["model=here", "data=[{path: a.jsonl, where: rank}]", "output_dir=there"])
