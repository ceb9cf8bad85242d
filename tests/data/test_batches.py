"""Global batches: shares over ranks, the drawing of positives and negatives, prompts, notes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.schema import OnError, TrainSource
from embedtrain.data.batches import Drawing, TrainData, load_train_data
from embedtrain.data.types import Example, Row


def source(tmp_path: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> TrainSource:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return TrainSource(path=str(path), **options)


def rows_with_negatives(count: int) -> list[dict[str, Any]]:
    return [
        {"query": f"q{i}", "pos": [f"p{i}.{j}" for j in range(3)], "neg": [f"n{i}.{j}" for j in range(i % 12)]}
        for i in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path) -> TrainData:
    sources = [
        source(tmp_path, "one", rows_with_negatives(50), query_prompt="query: "),
        source(tmp_path, "two", rows_with_negatives(7), weight=2, negatives=None, document_prompt=""),
        source(tmp_path, "three", [{"query": "z", "pos": ["y"], "neg": ["x"]}], negatives=0),
    ]
    return load_train_data(sources, query_prompt="Q ", document_prompt="D ", seed=9, global_batch_size=16)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_of_all_ranks_make_up_the_batch(data: TrainData, size: int) -> None:
    for k in range(2 * data.plan.steps_per_epoch):
        batch = data.batch(k)
        shares = [data.batch(k).share(rank, size) for rank in range(size)]
        merged: list[Row | None] = [None] * len(batch.rows)
        for rank, share in enumerate(shares):
            merged[rank::size] = share
        assert merged == list(batch.rows)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(data.batch(data.plan.steps_per_epoch - 1).rows) == 65 % 16


def test_batches_do_not_depend_on_what_came_before(data: TrainData, tmp_path: Path) -> None:
    forward = [tuple(data.batch(k).rows) for k in range(12)]
    for k in (11, 3, 7, 0):
        assert tuple(data.batch(k).rows) == forward[k]
        assert data.batch(k).rows[-1] == forward[k][-1]
        assert data.batch(k).step == k


def test_prompts_and_negatives_of_each_source(data: TrainData) -> None:
    seen = Counter()
    for k in range(data.plan.steps_per_epoch):
        for row in data.batch(k).rows:
            positive, *negatives = row.documents
            if row.query == "Q z":
                assert row.documents == ("D y",)
                seen["three"] += 1
                continue
            first = row.query.startswith("query: q")
            number = int(row.query.removeprefix("query: q" if first else "Q q"))
            prompt, most = ("D ", 7) if first else ("", 12)
            assert positive in {f"{prompt}p{number}.{j}" for j in range(3)}
            assert len(negatives) == len(set(negatives)) == min(number % 12, most)
            assert set(negatives) <= {f"{prompt}n{number}.{j}" for j in range(12)}
            seen["one" if first else "two"] += 1
    assert seen == {"one": 50, "two": 14, "three": 1}


def test_draws_change_with_the_epoch_and_are_even(tmp_path: Path) -> None:
    row = {"query": "q", "pos": [f"p{i}" for i in range(4)], "neg": [f"n{i}" for i in range(10)]}
    data = load_train_data([source(tmp_path, "a", [row], negatives=3)], seed=1, global_batch_size=1)
    positives, negatives = Counter(), Counter()
    for k in range(2000):
        first, *others = data.batch(k).rows[0].documents
        assert len(set(others)) == 3
        positives[first] += 1
        negatives.update(others)
    assert all(abs(positives[f"p{i}"] - 500) < 100 for i in range(4))
    assert all(abs(negatives[f"n{i}"] - 600) < 120 for i in range(10))


def test_a_row_seen_twice_in_an_epoch_draws_twice(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "pos": [f"p{j}" for j in range(50)]} for i in range(20)]
    data = load_train_data([source(tmp_path, "a", rows, weight=2)], seed=1, global_batch_size=40)
    drawn: dict[str, list[str]] = {}
    for row in data.batch(0).rows:
        drawn.setdefault(row.query, []).append(row.documents[0])
    assert all(len(positives) == 2 for positives in drawn.values())
    assert sum(a != b for a, b in drawn.values()) > 12


def test_notes_and_texts(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "pos": ["b"], "neg": ["b", "c", "c", *map(str, range(14))]},
        {"query": "", "pos": ["b"]},
        {"query": "d", "pos": ["e"], "score": 1},
    ]
    sources = [source(tmp_path, "s", rows, query_prompt="never in a vocabulary")]
    data = load_train_data(sources, on_error=OnError.skip, seed=1, global_batch_size=2)
    assert data.notes == [
        "s: FlagEmbedding rows, 2 rows from s.jsonl; rows carry up to 15 negatives, 7 drawn each epoch; "
        "2 negatives left out that equal a positive or repeat another; not used: score; "
        f'1 bad rows skipped ({tmp_path / "s.jsonl"}:2: "query" is an empty text)',
        "an epoch: 2 rows in 1 steps of 2",
    ]
    assert len(data) == 2
    assert Counter(data.texts()) == Counter(["a", "b", "c", "d", "e", *map(str, range(14))])


def test_the_drawing_is_pinned() -> None:
    """Another drawing would give a resumed run other negatives: change it only knowing that."""
    example = Example("q", ("a", "b", "c"), tuple("0123456789"), 0, "", 1)
    assert Drawing("", "", 4).row(example, "42/7") == Row("q", ("c", "5", "4", "9", "1"))
