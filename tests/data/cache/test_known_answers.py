"""A document that the data has as a positive of a query is no negative of it, whichever row of a batch brings it."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embedtrain.config.losses import InfoNCEConfig, LossDirection
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache import known_answers
from embedtrain.data.cache.cache import Cache
from embedtrain.data.rows import text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.losses.excluded import ExcludedCandidates
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.data.files import write
from tests.small import WORDS, small_tokenizer

Rows = list[dict[str, object]]


def load(folder: Path, *sources: Rows, size: int = 4, **options: object) -> TrainData:
    paths = [write(folder / f"{number}.jsonl", *rows) for number, rows in enumerate(sources)]
    cache = Cache(directory=folder / "cache")
    data = load_train_data(
        [TrainSource(path=str(path), **options) for path in paths], seed=3, global_batch_size=size, cache=cache
    )
    data.prepare(TextTokenizer(small_tokenizer(), 48), cache)
    return data


def random_rows(generator: random.Random, count: int) -> Rows:
    """Few queries, so that most stand in several rows; one has most of the documents."""
    rows: Rows = []
    for _ in range(count):
        query = generator.choice(["q0", *(f"q{i}" for i in range(count))])
        documents = generator.sample(range(200 if query == "q0" else 30), generator.choice([1, 1, 2, 9]))
        rows.append({"query": query, "pos": [f"d{i}" for i in documents], "neg": [f"n{generator.randrange(9)}"]})
    return rows


@pytest.mark.parametrize("block", [1, 50, known_answers.ANSWERS_PER_BLOCK])
@pytest.mark.parametrize("seed", range(3))
def test_the_answers_of_all_rows_and_sources(tmp_path, monkeypatch, seed, block):
    monkeypatch.setattr(known_answers, "ANSWERS_PER_BLOCK", block)
    generator = random.Random(seed)
    sources = [random_rows(generator, count) for count in (60, 1, 25)]
    answers: dict[str, set[str]] = {}
    for row in (row for rows in sources for row in rows):
        answers.setdefault(row["query"], set()).update(row["pos"])
    stored = load(tmp_path, *sources).answers
    assert stored is not None
    several = {query: documents for query, documents in answers.items() if len(documents) > 1}
    assert stored.queries.tolist() == sorted(text_keys(list(several)).tolist())
    assert len(stored.documents) == stored.starts[-1] == sum(map(len, several.values()))
    for count in (0, 1, 5, 60):
        queries = [generator.choice([*answers, "unknown"]) for _ in range(count)]
        documents = [f"d{generator.randrange(220)}" for _ in range(count)]
        pairs = stored.among(text_keys(queries), text_keys(documents))
        names = {int(key): text for text in {*queries, *documents} for key in text_keys([text])}
        found = [(names[query], names[document]) for query, document in pairs.tolist()]
        expected = {(q, d) for q in {*queries} for d in {*documents} if d in several.get(q, ())}
        assert len(found) == len(expected) and set(found) == expected


def test_a_batch_of_any_rows(tmp_path):
    """A step draws one positive of a row; another row brings one that was not drawn, or that a third row has."""
    a, b, c, d, e, f, g = WORDS[:7]
    rows = [
        {"query": a, "pos": [b, c]},
        {"query": d, "pos": [c]},  # the first row's, if that draws the other
        {"query": e, "pos": [f]},
        {"query": g, "pos": [b]},
    ]
    others = [{"query": e, "pos": [b]}]  # of another source: no row of it may be in the batch
    data = load(tmp_path, rows, others, size=3)
    answers: dict[str, set[str]] = {}
    for row in [*rows, *others]:
        answers.setdefault(row["query"], set()).update(row["pos"])
    shares: set[str] = set()
    for step in range(30):
        batch = data.batch(step)
        info = make_rank_batch(batch, 0, 1, TextTokenizer(small_tokenizer(), 48), ChunkOptions(64)).batch_info
        texts = [row.query for row in batch.rows]
        documents = [row.documents.texts[0] for row in batch.rows]
        for direction in LossDirection:
            exclusion = InfoNCE(InfoNCEConfig(directions=[direction])).exclusion(info.rows, 8, torch.float32)
            exclusion = replace(exclusion, score_positive_twice=False)
            scores = ExcludedCandidates.of(exclusion, info).mask_scores(
                torch.zeros(len(texts), len(texts)), direction, 0, 0
            )
            expected = [
                [
                    i == j
                    or {
                        LossDirection.query_document: documents[j] in answers[texts[i]],
                        LossDirection.document_document: documents[j] in answers[texts[i]],
                        LossDirection.document_query: documents[i] in answers[texts[j]],
                        # Of answers that are in the batch.
                        LossDirection.query_query: bool(answers[texts[i]] & answers[texts[j]] & {*documents}),
                    }[direction]
                    for j in range(len(texts))
                ]
                for i in range(len(texts))
            ]
            assert (scores == -torch.inf).tolist() == expected, (texts, documents, direction)
        shares |= {text for text, document in zip(texts, documents, strict=True) for other in documents
                   if other != document and other in answers[text]}  # fmt: skip
    assert shares == {a, e}, "both cases occur"


def test_a_second_run_reads_the_same_folder(tmp_path):
    rows = random_rows(random.Random(5), 40)
    first, second = (load(tmp_path, rows).answers for _ in range(2))
    assert first is not None and second is not None
    assert np.array_equal(first.documents, second.documents)
    assert len(list((tmp_path / "cache").glob("answers-*"))) == 1
    load(tmp_path, rows[1:])
    assert len(list((tmp_path / "cache").glob("answers-*"))) == 2
