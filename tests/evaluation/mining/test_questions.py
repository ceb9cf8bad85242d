"""Rows that ask the same are one question; what answers a query is no negative of it under any instruction."""

from pathlib import Path

import numpy as np
import pytest

from embedtrain.data.cache.cache import Cache
from embedtrain.distributed.world import World
from embedtrain.mine.options import compose_mine
from embedtrain.mine.prepared import prepare
from embedtrain.mine.questions import UniqueQueries
from embedtrain.mine.relation import joined
from embedtrain.mine.sources import read_mining_sources
from tests.evaluation.mining.mined import positive, write_jsonl

LABELS = ["alpha", "beta", " alpha"]
NUM_ROWS = 300


def questions_of(world: World, folder: Path) -> dict[str, object]:
    options = compose_mine(["model=m", f"data=[{folder / 'rows.jsonl'}]", f"output_dir={folder / 'to'}"])
    (source,) = read_mining_sources(options, {"query": "q: "}, Cache(directory=folder / f"cache-{world.size}"))
    prepared = prepare(folder / f"prepared-{world.size}", [source], [], world, lambda *_: None)
    rows = list(source.store)
    questions = UniqueQueries.of(rows, source, prepared, keep_own=True)
    return {
        "seen": list(questions.seen),
        "texts": list(questions.texts),
        "of_row": questions.of_row.tolist(),
        "answers": [
            sorted(prepared.pool[n] for n in questions.answers.documents[questions.answers.of(number)].tolist())
            for number in range(len(questions.texts))
        ],
        "excluded": [
            {prepared.pool[n] for n in questions.excluded.documents[questions.excluded.of(number)].tolist()}
            for number in range(len(questions.texts))
        ],
        "own": [
            [prepared.pool[n] for n in questions.own.documents[questions.own.of(row)].tolist()]
            for row in range(len(rows))
        ],
        "own_pairs": len(questions.own_pairs.owners),
    }


@pytest.fixture
def rows():
    rows = [
        {"query": LABELS[i % 3], "pos": [f"{positive(i)} {i}"], "neg": ["w", "w ", "beta"]} for i in range(NUM_ROWS)
    ]
    rows[0]["prompt"] = "Find its opposite"
    return rows


def test_each_question_is_asked_once(ranks, rows, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (found,) = ranks(1, questions_of, tmp_path)
    assert found["texts"] == ["alpha", "beta", " alpha", "alpha"]
    assert found["seen"][1:] == ["q: beta", "q:  alpha", "q: alpha"]
    assert found["of_row"] == [0, *([1, 2, 3] * NUM_ROWS)[: NUM_ROWS - 1]]
    by_label = [{row["pos"][0] for row in rows if row["query"].strip() == label} for label in ("alpha", "beta")]
    # Margins know instructions and blanks; what may be no negative does not.
    assert [len(answers) for answers in found["answers"]] == [1, 100, 100, 99]
    assert found["excluded"] == [by_label[0], by_label[1] | {"beta"}, by_label[0], by_label[0]]
    assert found["own"][:3] == [["w", "beta"], ["w"], ["w", "beta"]]
    assert found["own_pairs"] == 7


def test_pairs_that_repeat_are_joined_once():
    """One document that a hundred thousand rows name a positive by its id would else be as many pairs squared."""
    many = np.zeros(100_000, dtype=np.int64)
    keys, items = joined(many, many + 1, many + 1, many + 2)
    assert (keys.tolist(), items.tolist()) == ([0], [2])
