"""Mined rows are those of the plain definition: several positives, duplicates, ties, equal queries, ids, teachers."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.mine.models import save_cross_encoder
from tests.mine.reference import documents_of, mine_reference
from tests.mine.runs import (
    arguments,
    mine,
    more_documents,
    positive,
    query,
    read_jsonl,
    save_model,
    words,
    write_jsonl,
)

SAME = "alpha beta gamma"
FIRST = [
    *({"query": query(i), "pos": [positive(i), positive(i + 40)][: 1 + i % 2]} for i in range(24)),
    # The same question again, with another positive; and as the document that answers another.
    {"query": query(3), "pos": [positive(60)], "neg": [positive(3), positive(61)]},
    {"query": words(1, 2, 3, 4), "pos": [query(3)], "neg": [words(5, 6), words(5, 6, 7), positive(9)]},
    {"query": SAME, "pos": [positive(5)], "pos_id": ["d1"], "neg": [positive(7), words(3, 3)], "neg_id": ["d1", "d2"]},
    {"query": SAME, "prompt": "Find the opposite", "pos": [words(9, 9, 1)]},
    # Nothing but blanks makes it another: what answers one is no negative of the other.
    {"query": f"{query(4)} ", "pos": [positive(70)], "neg": [f"{positive(4)} ", positive(62), f"{positive(62)} "]},
]  # fmt: skip
SECOND = [
    *({"query": query(i), "pos": [positive(i + 100)]} for i in range(18, 30)),
    {"query": SAME, "pos": [words(2, 2, 2)], "pos_id": ["d1"], "neg": [words(4, 1, 4)], "neg_id": ["d2"]},
]
CORPUS = [*more_documents(50), SAME, positive(5), positive(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("definition")
    save_model(folder / "model")
    save_model(folder / "other", seed=5)
    save_cross_encoder(folder / "cross")
    write_jsonl(folder / "first.jsonl", FIRST)
    write_jsonl(folder / "second.jsonl", SECOND)
    write_jsonl(folder / "corpus.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(CORPUS)])
    return folder


def cosines_of(directory):
    model = SentenceTransformer(str(directory), device="cpu")
    cached = {}

    def vectors(texts):
        new = [text for text in dict.fromkeys(texts) if text not in cached]
        if new:
            cached.update(zip(new, model.encode(new, batch_size=1).astype(np.float64), strict=True))
        return np.stack([cached[text] for text in texts])

    return lambda query, documents: vectors(documents) @ vectors([query])[0]


def pairs_of(directory):
    model = CrossEncoder(str(directory), device="cpu", activation_fn=torch.nn.Identity())
    return lambda query, documents: model.predict([(query, document) for document in documents]).astype(np.float64)


def mined(ranks, folder, to, size, **options):
    data = [folder / "first.jsonl", folder / "second.jsonl"]
    command = arguments(folder / "model" / "guide", data, folder / to, corpus=folder / "corpus.jsonl", **options)
    ranks(size, mine, command)
    return [read_jsonl(folder / to / f"{name}.jsonl") for name in ("first", "second")]


@pytest.mark.quick("cross-options5-same5", "margins-options1-same1", "plain-options0-same0")
@pytest.mark.parametrize(
    ("to", "options", "same"),
    [
        ("plain", {"negatives": 6, "rank_max": 9}, {}),
        ("margins", {"rank_min": 2, "relative_margin": 0.005, "absolute_margin": 0.003, "negatives": 6,
                     "margin_reference": "lowest"},
         {"rank_min": 2, "relative": 0.005, "absolute": 0.003}),
        ("highest", {"relative_margin": 0.002, "negatives": 4},
         {"relative": 0.002, "highest": True}),
        ("own", {"keep_existing_negatives": "true", "negatives": 3, "rank_max": 20}, {"keep_own": True}),
        ("bi", {"teacher": "other/guide", "relative_margin": 0.01, "negatives": 5, "rank_max": 30},
         {"relative": 0.01, "highest": True, "judge": cosines_of}),
        ("cross", {"teacher": "cross", "relative_margin": 0.0005, "negatives": 5, "rank_max": 30,
                   "keep_existing_negatives": "true"},
         {"relative": 0.0005, "highest": True, "judge": pairs_of, "keep_own": True, "logits": True}),
    ],
)  # fmt: skip
def test_rows_equal_those_of_the_definition(ranks, folder, to, options, same):
    options = {"rank_max": 40, "instruction_format": "'{instruction} {text}'", **options}
    judge = same.pop("judge", None) if "judge" in same else None
    same = dict(same)
    judged_by = None
    if judge is not None:
        options["teacher"] = folder / options["teacher"]
        judged_by = judge(options["teacher"])
    results = mined(ranks, folder, to, 2, **options, query_batch_size=11)
    found_by = cosines_of(folder / "model" / "guide")
    expected = mine_reference(
        [FIRST, SECOND], CORPUS, found_by, negatives=options["negatives"], rank_max=options["rank_max"],
        judged_by=judged_by, **same,
    )  # fmt: skip
    num_found = 0
    for rows, input_rows, expected_rows in zip(results, (FIRST, SECOND), expected, strict=True):
        assert [row["query"] for row in rows] == [row["query"] for row in input_rows]
        for row, before, (negatives, scores, of_positives) in zip(rows, input_rows, expected_rows, strict=True):
            assert row["pos"] == before["pos"]
            assert row.get("prompt") == before.get("prompt")
            assert row.get("pos_id") == before.get("pos_id")
            if before["query"] == SAME:  # answers under another instruction
                assert not {words(9, 9, 1), positive(5)} & set(row["neg"])
            if before.get("prompt"):
                assert SAME not in row["neg"]
                continue  # encoded with its instruction, which the definition leaves out
            assert row["neg_scores"] == pytest.approx(scores, abs=2e-6)
            assert row["pos_scores"] == pytest.approx(of_positives, abs=2e-6)
            assert sorted(row["neg"]) == sorted(negatives)
            num_found += len(negatives)
    assert num_found > 40
    assert not (folder / to / ".mining").exists()


def test_negatives_of_the_rows_are_scored_by_a_teacher(ranks, folder):
    """As a loop over the teacher scores them; none is added."""
    options = {"negatives": 0, "keep_existing_negatives": "true", "rank_max": 3, "query_batch_size": 11}
    results = mined(ranks, folder, "scored", 2, teacher=folder / "cross", **options)
    score, num_scored = pairs_of(folder / "cross"), 0
    for rows, input_rows in zip(results, (FIRST, SECOND), strict=True):
        for row, before in zip(rows, input_rows, strict=True):
            assert (row["query"], row["pos"]) == (before["query"], before["pos"])
            assert [text for text in before.get("neg", []) if text in row["neg"]] == row["neg"]
            assert row["pos_scores"] == pytest.approx(score(row["query"], row["pos"]).tolist(), abs=2e-6)
            if row["neg"]:
                assert row["neg_scores"] == pytest.approx(score(row["query"], row["neg"]).tolist(), abs=2e-6)
            num_scored += len(row["neg"])
    assert num_scored >= 6
    summary = json.loads((folder / "scored" / "summary.json").read_text())
    assert summary["sources"]["first"]["candidates"] == 0, "the teacher scores nothing that is not written"


def test_the_same_bytes_on_any_number_of_ranks(ranks, folder):
    written = []
    for size, how in (1, {}), (2, {"unshard": "model", "index.place": "host"}), (3, {}):
        options = {
            **how,
            "negatives": 4,
            "rank_max": 25,
            "relative_margin": 0.001,
            "query_batch_size": 7,
            "index.dtype": "bf16",
        }
        mined(ranks, folder, f"on-{size}", size, teacher=folder / "other" / "guide", sampling="random", **options)
        written.append({path.name: path.read_bytes() for path in sorted((folder / f"on-{size}").iterdir())})
    assert list(written[0]) == ["first.jsonl", "second.jsonl", "summary.json"]
    assert written[0] == written[1] == written[2]


def test_what_is_drawn_is_a_function_of_the_seed(ranks, folder):
    def drawn(to, **options):
        return mined(ranks, folder, to, 1, negatives=3, rank_max=30, sampling="random", **options)

    def texts(drawn):
        return [[row["neg"] for row in rows] for rows in drawn]

    once, other = drawn("seed-1", seed=1), drawn("seed-2", seed=2)
    again = drawn("seed-1b", seed=1, query_batch_size=5)
    assert texts(once) == texts(again) != texts(other)
    best = mined(ranks, folder, "best", 1, negatives=30, rank_max=30)
    for rows, candidates in zip(once, best, strict=True):
        for row, all_of_them in zip(rows, candidates, strict=True):
            positions = [all_of_them["neg"].index(text) for text in row["neg"]]
            assert positions == sorted(positions)
            assert len(positions) == 3
    nearest, drawn_first = ([row["neg"][0] for rows in sources for row in rows] for sources in (best, once))
    assert sum(one == other for one, other in zip(nearest, drawn_first, strict=True)) < len(nearest) / 2


def test_ties_come_in_the_order_of_the_documents(ranks, folder, tmp_path):
    """Texts that are the same to the tokenizer have one vector."""
    unknown = [f"alpha {letter * 3}" for letter in "zyxwv"]
    write_jsonl(tmp_path / "ties.jsonl", [{"query": "alpha", "pos": ["alpha beta"]}])
    write_jsonl(tmp_path / "pool.jsonl", [{"text": text} for text in unknown])
    for size in (1, 3):
        command = arguments(
            folder / "model" / "guide", [tmp_path / "ties.jsonl"], tmp_path / f"to{size}",
            corpus=tmp_path / "pool.jsonl", negatives=3, rank_max=3,
        )  # fmt: skip
        ranks(size, mine, command)
        (row,) = read_jsonl(tmp_path / f"to{size}" / "ties.jsonl")
        assert row["neg"] == unknown[:3]
        assert len(set(row["neg_scores"])) == 1


def test_the_rows_cover_the_cases_of_the_definition():
    documents = documents_of([FIRST, SECOND], CORPUS)
    assert SAME in documents
    assert query(3) in documents
    assert len({row["query"] for row in FIRST} & {row["query"] for row in SECOND}) > 3
