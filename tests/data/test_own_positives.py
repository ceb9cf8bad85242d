"""Texts that are their own positives, and queries of which words are deleted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedtrain.config.compose import compose_recipes
from embedtrain.config.losses import InfoNCEConfig, LossDirection
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.rows import TextFormat
from embedtrain.data.sampling.plan import without_words
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.losses.excluded import ExcludedCandidates
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import WORDS, small_tokenizer, text


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(tmp_path: Path, *sources: TrainSource, size: int = 8, prompt: str = "") -> TrainData:
    cache, prompts = Cache(directory=tmp_path / "cache"), TextFormat(query_prompt=prompt)
    data = load_train_data(sources, text_format=prompts, seed=3, global_batch_size=size, cache=cache)
    data.prepare(TextTokenizer(small_tokenizer(), 48), cache)
    return data


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"sentence": "alpha beta"}, {}),
        ({"id": 7, "text": "alpha beta"}, {}),
        ({"title": "gamma", "text": "alpha beta"}, {"columns": {"text": "text"}}),
        ({"query": "alpha beta", "pos": ["gamma"]}, {"columns": ["query"]}),
        ({"a": "alpha beta", "score": 0.5}, {"columns": {"text": "a"}, "where": "score > 0.2"}),
    ],
)
def test_a_text_is_query_and_positive(tmp_path, row, options):
    source = TrainSource(path=write(tmp_path / "t.jsonl", [row]), text_as_positive=True, **options)
    data = load_train_data([source], seed=1, global_batch_size=2)
    (example,) = data.batch(0).rows
    assert (example.query, example.documents.texts) == ("alpha beta", ("alpha beta",))
    assert "= query and positive" in data.notes[0]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"title": "a", "text": "b"}, {}, r"takes one column of texts.*title.*text"),
        ({"query": "a", "pos": ["b"]}, {}, r"takes one column of texts"),
        ({"text": ""}, {}, r"t\.jsonl:1: "),
    ],
)
def test_rows_that_are_no_single_texts(tmp_path, row, options, message):
    source = TrainSource(path=write(tmp_path / "t.jsonl", [row]), text_as_positive=True, **options)
    with pytest.raises(EmbedtrainError, match=message):
        load_train_data([source], seed=1, global_batch_size=2)


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("columns: [a, b]", [], r"text_as_positive=true: .*columns=\['a', 'b'\]"),
        ("columns: {text: a, label: b}", [], "text_as_positive=true: .*columns="),
        ("format: tevatron", [], "text_as_positive=true: .*format=tevatron"),
        ("negatives: 1", ["loss=batch_triplet"], "text_as_positive=true: loss=.* takes texts without positives"),
        ("delete_words: 1.0", [], r"delete_words=1\.0: must be below 1"),
    ],
)
def test_options_that_cannot_work(source, more, message):
    with pytest.raises(ConfigError, match=message):
        compose_recipes(["model.path=m", f"data.train=[{{path: t, text_as_positive: true, {source}}}]", *more])


def test_equal_texts_of_two_rows_are_no_negatives_of_each_other(tmp_path):
    """A text is the positive of its own row, never masked there, and a duplicate in a row that repeats it."""
    rows = [{"text": "alpha"}, {"text": "beta gamma"}, {"text": "alpha"}, {"text": "delta"}]
    data = load(tmp_path, TrainSource(path=write(tmp_path / "t.jsonl", rows), text_as_positive=True))
    batch = data.batch(0)
    texts = [row.query for row in batch.rows]
    rank_batch = make_rank_batch(batch, 0, 1, TextTokenizer(small_tokenizer(), 48), ChunkOptions(64))
    loss = InfoNCE(InfoNCEConfig())
    info = rank_batch.batch_info
    exclusion = loss.exclusion(info.rows, 8, torch.float32)
    excluded = ExcludedCandidates.of(exclusion, info)
    scores = excluded.mask_scores(torch.zeros(4, 4), LossDirection.query_document, 0, 0)
    assert (scores == -torch.inf).tolist() == [[a == b for b in texts] for a in texts]
    assert excluded.positives.tolist() == [0, 1, 2, 3]


def test_deleted_words():
    words = [*WORDS[:10]]
    whole, drawn = " ".join(words), []
    for position in range(2000):
        kept = without_words(whole, 0.6, position, 9)
        assert kept == without_words(whole, 0.6, position, 9)
        assert kept
        chosen = iter(words)
        assert all(word in chosen for word in kept.split()), "a subsequence"
        drawn.append(len(kept.split()))
    assert np.mean(drawn) == pytest.approx(4, abs=0.15)
    assert without_words("alpha", 0.9, 0, 0) == "alpha"
    assert {without_words("alpha beta", 0.99, position, 0) for position in range(200)} == {"alpha", "beta"}
    assert without_words(whole, 0.0, 0, 0) == whole
    assert without_words("  ", 0.5, 0, 0) == "  "
    chinese = {without_words("搜索软件包", 0.6, position, 0) for position in range(100)}
    assert len(chinese) > 10, "every ideograph is a word"
    assert without_words("a  b\nc", 0.0, 0, 0) == "a  b\nc"


def test_queries_lack_words_in_every_epoch_anew(tmp_path):
    rows = [{"text": text(i, 12)} for i in range(6)]
    noisy = TrainSource(
        path=write(tmp_path / "a.jsonl", rows), text_as_positive=True, delete_words=0.5, query_prompt="alpha "
    )
    plain = TrainSource(path=write(tmp_path / "b.jsonl", [{"query": "beta", "pos": ["gamma"]} for _ in range(3)]))
    data = load(tmp_path, noisy, plain, size=9)
    tokenizer = small_tokenizer()
    queries = {}
    for k in range(4):
        batch = data.batch(k)
        assert batch.tokens is not None
        tokens = batch.tokens.tokens(np.arange(18))
        lists = tokens.lists()
        assert tokens.lengths.tolist() == batch.tokens.lengths.tolist() == list(map(len, lists))
        for number, row in enumerate(batch.rows):
            prompt = "alpha " if row.source == 0 else ""
            assert lists[number] == tokenizer(prompt + row.query)["input_ids"]
            assert lists[9 + number] == tokenizer(row.documents.texts[0])["input_ids"]
            if row.source == 0:
                assert len(row.query.split()) <= len(row.documents.texts[0].split()) == 12
                queries.setdefault(row.documents.texts[0], set()).add(row.query)
        some = np.array([17, 2, 9, 0])
        assert batch.tokens.tokens(some).lists() == [lists[i] for i in some]
        assert data.batch(k).rows[3] == batch.rows[3], "a function of k"
    assert all(len(of_text) == 4 for of_text in queries.values())
    keys = [data.batch(k).tokens.keys[:9] for k in range(2)]
    assert set(keys[0].tolist()) == set(keys[1].tolist()), "of the whole texts"
