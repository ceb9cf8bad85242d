"""Global batches: the rows of each rank, the drawing of positives and negatives, prompts, notes."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.config.losses import RankNetConfig
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.rows import Example, Prompt, TextFormat, text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import Mixing, TrainData, load_recipe_data, load_train_data
from embedtrain.errors import DataError
from tests.small import small_tokenizer


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
    return load_train_data(
        sources, text_format=TextFormat(query_prompt="Q ", document_prompt="D "), seed=9, global_batch_size=16
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_all_ranks_make_up_the_batch(data: TrainData, size: int) -> None:
    for k in range(2 * data.plan.steps_per_epoch):
        batch = data.batch(k)
        rank_rows = [data.batch(k).rows_of_rank(rank, size) for rank in range(size)]
        merged: list[Example | None] = [None] * len(batch.rows)
        for rank, rows in enumerate(rank_rows):
            merged[rank::size] = rows
        assert merged == list(batch.rows)
        assert max(map(len, rank_rows)) - min(map(len, rank_rows)) <= 1
        assert len(batch.rows) == 13  # 65 rows in 5 steps


def test_batches_do_not_depend_on_what_came_before(data: TrainData, tmp_path: Path) -> None:
    forward = [tuple(data.batch(k).rows) for k in range(12)]
    for k in (11, 3, 7, 0):
        assert tuple(data.batch(k).rows) == forward[k]
        assert data.batch(k).rows[-1] == forward[k][-1]
        assert data.batch(k).step == k


def test_prompts_and_negatives_of_each_source(data: TrainData) -> None:
    formats = [settings.text_format for settings in data.settings]
    assert [(form.query_prompt, form.document_prompt) for form in formats] == [
        ("query: ", "D "),
        ("Q ", ""),
        ("Q ", "D "),
    ]
    counts = Counter()
    for k in range(data.plan.steps_per_epoch):
        for row in data.batch(k).rows:
            positive, *negatives = row.documents.texts
            if row.query == "z":
                assert row.documents.texts == ("y",)
                counts["three"] += 1
                continue
            first = row.source == 0
            number = int(row.query.removeprefix("q"))
            assert positive in {f"p{number}.{j}" for j in range(3)}
            assert len(negatives) == len(set(negatives)) == min(number % 12, 7 if first else 12)
            assert set(negatives) <= {f"n{number}.{j}" for j in range(12)}
            counts["one" if first else "two"] += 1
    assert counts == {"one": 50, "two": 14, "three": 1}


def test_draws_change_with_the_epoch_and_are_uniform(tmp_path: Path) -> None:
    row = {"query": "q", "pos": [f"p{i}" for i in range(4)], "neg": [f"n{i}" for i in range(10)]}
    data = load_train_data([source(tmp_path, "a", [row], negatives=3)], seed=1, global_batch_size=1)
    positives, negatives = Counter(), Counter()
    for k in range(600):
        first, *others = data.batch(k).rows[0].documents.texts
        assert len(set(others)) == 3
        positives[first] += 1
        negatives.update(others)
    assert all(abs(positives[f"p{i}"] - 150) < 50 for i in range(4))
    assert all(abs(negatives[f"n{i}"] - 180) < 55 for i in range(10))


def test_a_row_that_occurs_twice_in_an_epoch_is_drawn_twice(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "pos": [f"p{j}" for j in range(50)]} for i in range(20)]
    data = load_train_data([source(tmp_path, "a", rows, weight=2)], seed=1, global_batch_size=40)
    drawn: dict[str, list[str]] = {}
    for row in data.batch(0).rows:
        drawn.setdefault(row.query, []).append(row.documents.texts[0])
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
        "an epoch: 2 rows in 1 batch of 2 rows",
    ]
    assert len(data) == 2
    assert Counter(data.texts()) == Counter(["a", "b", "c", "d", "e", *map(str, range(14))])


@pytest.mark.parametrize(
    ("batch_size", "batches"),
    [
        (5, "2 batches of 5 rows"),
        (4, "3 batches of 3 or 4 rows (train.global_batch_size=4 does not divide "),
        (16, "1 batch of 10 rows (fewer than train.global_batch_size=16)"),
    ],
)
def test_the_size_of_batches_is_explained(tmp_path: Path, batch_size: int, batches: str) -> None:
    rows = [{"query": f"q{i}", "pos": [f"p{i}"]} for i in range(10)]
    data = load_train_data([source(tmp_path, "a", rows)], seed=1, global_batch_size=batch_size)
    assert data.notes[-1].startswith(f"an epoch: 10 rows in {batches}")


def test_instructions_of_rows(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "pos": ["b"], "prompt": "find"},
        {"query": "c", "pos": ["d"], "prompt": "same", "type": "symmetric_sts"},
        {"query": "e", "pos": ["f"], "neg": list("ghi"), "type": "only_1neg"},
        {"query": "j", "pos": ["k"], "neg": list("lmn"), "prompt": ""},
    ]
    with_instructions = source(
        tmp_path, "s", rows, query_prompt="Q ", document_prompt="D ", instruction_format="{instruction}> {text}."
    )
    data = load_train_data([with_instructions], seed=1, global_batch_size=4)
    assert "instructions of its rows go before texts as '{instruction}> {text}.'" in data.notes[1]
    rows_by_query = {row.query: row for row in data.batch(0).rows}
    prompts = [data.settings[0].text_format.prompts(example) for example in data.stores[0]]
    assert [query_prompt for query_prompt, _ in prompts] == [
        Prompt("find> ", "."),
        Prompt("same> ", "."),
        Prompt("Q "),
        Prompt(),
    ]
    assert [document_prompt for _, document_prompt in prompts] == [
        Prompt("D "),
        Prompt("same> ", "."),
        Prompt("D "),
        Prompt("D "),
    ]
    assert [len(rows_by_query[query].documents) for query in "acej"] == [1, 1, 2, 4]
    without = load_train_data([replace(with_instructions, instruction_format="{text}")], seed=1, global_batch_size=4)
    assert "instructions of its rows are not used" in without.notes[1]
    prompts = [without.settings[0].text_format.prompts(example) for example in without.stores[0]]
    assert prompts == [(Prompt("Q "), Prompt("D "))] * 4


@pytest.mark.parametrize("by_source", [False, True])
def test_tokens_of_batches_are_those_of_their_rows(tmp_path: Path, by_source: bool) -> None:
    sources = [
        source(tmp_path, "one", rows_with_negatives(40), query_prompt="alpha "),
        source(tmp_path, "two", rows_with_negatives(9), weight=2, query_max_length=4, document_max_length=5),
        source(tmp_path, "three", [{"query": "z", "pos": ["y"], "neg": ["x"]}] * 3, negatives=0),
    ]
    mixing = Mixing(by_source=by_source)
    data = load_train_data(
        sources, text_format=TextFormat(document_prompt="beta "), seed=9, global_batch_size=16, mixing=mixing
    )
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    data.prepare(tokenizer, Cache(directory=tmp_path / "cache"))
    for k in range(2 * data.plan.steps_per_epoch):
        batch = data.batch(k)
        rows, tokens = list(batch.rows), batch.tokens
        assert tokens is not None
        assert (batch.source is not None) == by_source
        assert tokens.num_documents.tolist() == [len(row.documents.texts) for row in rows]
        formats = [data.settings[row.source].text_format for row in rows]
        expected = [
            tokenizer.ids([form.query(None)(row.query)], form.query_max_length)[0]
            for row, form in zip(rows, formats, strict=True)
        ]
        for row, form in zip(rows, formats, strict=True):
            documents = [form.document(None)(text) for text in row.documents.texts]
            expected += tokenizer.ids(documents, form.document_max_length)
        assert tokens.lengths.tolist() == [len(ids) for ids in expected]
        selected = np.random.default_rng(k).permutation(len(expected))[: len(expected) // 2]
        assert tokens.tokens(selected).ids.tolist() == [token for text in selected for token in expected[text]]
        plain = [row.query for row in rows] + [text for row in rows for text in row.documents.texts]
        assert tokens.keys.tolist() == text_keys(plain).tolist()


def test_documents_of_other_rows(tmp_path: Path) -> None:
    """Never a document that answers the query, used or not, nor an id of it; none with in_batch_negatives=false."""
    rows = [{"query": f"q{i}", "pos": [f"p{i}", f"p{(i + 1) % 6}"]} for i in range(6)]
    named = [{"query": f"r{i}", "pos": [f"s{i}"], "pos_id": ["same" if i < 3 else f"{i}"]} for i in range(4)]
    sources = [
        source(tmp_path, "one", rows),
        source(tmp_path, "named", named),
        source(tmp_path, "two", [{"query": "z", "pos": ["y"]}], in_batch_negatives=False),
    ]
    (recipe,) = compose_recipes(
        ["name=t", "model.path=m", "model.kind=cross_encoder", "loss=softmax", "train.steps=4", "data.train=[x]",
         "train.global_batch_size=11", "data.batch_negatives=5"]
    )  # fmt: skip
    recipe.data.train = sources[1:]
    cache = Cache(directory=tmp_path / "cache")
    without = replace(recipe, data=replace(recipe.data, batch_negatives=0))
    with pytest.raises(DataError, match=r"named\.jsonl:1: loss=softmax .*data\.batch_negatives=4"):
        load_recipe_data(without, {}, cache)
    recipe.data.train = sources
    with pytest.raises(DataError, match=r"two\.jsonl:1: loss=softmax"):
        load_recipe_data(recipe, {}, cache)
    sources[2] = source(tmp_path, "two", [{"query": "z", "pos": ["y"], "neg": ["x"]}], in_batch_negatives=False)
    data, _ = load_recipe_data(recipe, {}, cache)
    assert any("data.batch_negatives=5" in note and "rows of two get none" in note for note in data.notes)
    assert data.batch(0).num_batch_negatives is None  # before the data is tokenised
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    data.prepare(tokenizer, cache)
    texts = [f"{letter}{i}" for letter in "ps" for i in range(6)] + ["x", "y"]
    by_key = dict(zip(text_keys(texts).tolist(), texts, strict=True))
    for k in range(4):
        batch = data.batch(k)
        tokens, counts = batch.tokens, batch.num_batch_negatives
        assert tokens is not None
        assert counts is not None
        documents = [by_key[key] for key in tokens.keys[len(batch.rows) :].tolist()]
        ids = np.split(tokens.tokens(np.arange(len(tokens.lengths))).ids, np.cumsum(tokens.lengths)[:-1])
        assert [part.tolist() for part in ids[len(batch.rows) :]] == tokenizer.ids(documents)
        for row, number, count in zip(batch.rows, tokens.num_documents, counts, strict=True):
            own, documents = documents[:number], documents[number:]
            assert own[: number - count] == list(row.documents.texts)
            drawn = set(own[number - count :])
            assert len(drawn) == count == (0 if row.query == "z" else 5)
            held = {document for example in rows for document in example["pos"] if example["query"] == row.query}
            assert not drawn & held
            same = {"s0", "s1", "s2"}  # equal by id
            assert len(drawn & same) <= (row.documents.texts[0] not in same)


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    """The whole of it, in a process of its own: another order would give a resumed run other batches."""
    path = source(tmp_path, "one", rows_with_negatives(30)).path
    program = (
        "import sys; from embedtrain.config.recipe import TrainSource\n"
        "from embedtrain.data.train_data import load_train_data\n"
        "data = load_train_data([TrainSource(path=sys.argv[1])], seed=4, global_batch_size=7)\n"
        "print([(row.query, row.documents.texts) for k in (8, 2, 5) for row in data.batch(k).rows])"
    )
    command = [sys.executable, "-c", program, path]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    data = load_train_data([TrainSource(path=path)], seed=4, global_batch_size=7)
    here = str([(row.query, row.documents.texts) for k in (8, 2, 5) for row in data.batch(k).rows])
    assert answer == here + "\n"


def test_a_list_has_all_documents_of_its_row(tmp_path: Path) -> None:
    """Graded lists, and positives and negatives; tokens and scores are those of the same documents."""
    graded = [{"query": f"q{i}", "docs": [f"d{i}a", f"d{i}b", f"d{i}c"], "labels": [2, 0, 1]} for i in range(4)]
    keyed = [{"query": f"k{i}", "pos": [f"p{i}", f"r{i}"], "neg": [f"n{i}"]} for i in range(4)]
    sources = [source(tmp_path, "graded", graded), source(tmp_path, "keyed", keyed, negatives=1)]
    needs = RankNetConfig().row_requirements
    data = load_train_data(sources, seed=3, global_batch_size=8, needs=needs)
    tokenizer = TextTokenizer(small_tokenizer(), 32)
    data.prepare(tokenizer, Cache(directory=tmp_path / "cache"))
    batch = data.batch(0)
    label = {"a": 2.0, "b": 0.0, "c": 1.0, "p": 1.0, "r": 1.0, "n": 0.0}
    for row in batch.rows:
        number = row.query[1:]
        if row.query.startswith("q"):
            assert sorted(row.documents.texts) == [f"d{number}{letter}" for letter in "abc"]
            assert row.documents.scores == tuple(label[document[-1]] for document in row.documents.texts)
        else:
            assert len(set(row.documents.texts)) == 2
            assert row.documents.texts[0] in (f"p{number}", f"r{number}")
            assert row.documents.scores == tuple(label[document[0]] for document in row.documents.texts)
    assert batch.tokens is not None
    texts = [row.query for row in batch.rows] + [document for row in batch.rows for document in row.documents.texts]
    assert batch.tokens.keys.tolist() == text_keys(texts).tolist()
    assert {row.documents.texts for step in range(6) for row in data.batch(step).rows if row.query == "k0"} >= {
        ("p0", "r0"),
        ("r0", "p0"),
    }
