"""What is written is read back by the project's own reader as the same row, with other negatives."""

import json

import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import Documents, format_row

ROWS = [
    {"query": "a b", "pos": ["x", "y"], "neg": ["z"]},
    {"query": "a", "pos": ["x"], "prompt": "Find it"},
    {"query": "a", "pos": ["x"], "prompt": ""},
    {"query": "a", "pos": ["x"], "prompt": "Same?", "type": "symmetric_sts"},
    {"query": "a", "pos": ["x"], "type": "only_1neg", "neg": ["u", "v"]},
    {"query": "a", "pos": ["x"], "type": "only_1neg", "prompt": "Find it"},
    {"query": ["Find", "a"], "pos": [["Stored as", "x"], ["Stored as", "y"]], "neg": [["Stored as", "z"]]},
    {"query": ["Find", "a"], "pos": [["", "x"]]},
    {"query": ["Find", "a"], "pos": [["Stored as", "x"]], "type": "only_1neg"},
    {"query": ["", "a"], "pos": ["x"]},
    {"query": "a", "pos": ["x", "y"], "pos_id": ["1", None], "neg": ["z"], "neg_id": [7]},
    {"query": "line\u2028end\nand “quotes”", "pos": ["\ud83d\ude00 x"]},
]


def read(path):
    (store,) = read_sources([TrainSource(path=str(path))], OnError.stop)
    return list(store)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row)[:60])
def test_a_row_is_read_back(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (before,) = read(tmp_path / "rows.jsonl")
    line = format_row(before, ["n1", "n2"], ["i1", ""], ([0.9] * len(before.positives.texts), [0.5, 0.25]))
    (tmp_path / "mined.jsonl").write_text(line + "\n", encoding="utf-8")
    (after,) = read(tmp_path / "mined.jsonl")
    assert after.negatives.texts == ("n1", "n2")
    assert after.negatives.ids == ("i1", "")
    for name in ("query", "positives", "instruction", "document_instruction", "max_negatives"):
        assert getattr(after, name) == getattr(before, name), name


def test_scores_are_the_shortest_that_are_the_same():
    (row,) = [_example()]
    assert json.loads(format_row(row, ["n"], [], ([0.8999999761581421], [0.1])))["pos_scores"] == [0.9]
    assert "scores" not in format_row(row, ["n"], [], None)


def _example():
    from embedtrain.data.rows import Example

    return Example("a", Documents(("x",)))
