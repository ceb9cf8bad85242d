"""Mined rows are those of sentence-transformers' mine_hard_negatives, on the same model and documents."""

import math

import pytest
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from tests.mine.models import save_cross_encoder
from tests.mine.runs import (
    arguments,
    mine,
    more_documents,
    read_jsonl,
    rows_alone,
    save_model,
    write_jsonl,
)

ROWS = rows_alone(70)
DOCUMENTS = [text for text in more_documents(90) if text not in {row["query"] for row in ROWS}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    save_model(folder / "model")
    save_cross_encoder(folder / "cross")
    write_jsonl(folder / "rows.jsonl", ROWS)
    write_jsonl(folder / "pool.jsonl", [{"text": text} for text in DOCUMENTS])
    return folder


def reference_results(folder, cross_encoder=None, **options):
    """By query: scores and texts of the negatives, and the positive's score."""
    data = Dataset.from_dict({"query": [row["query"] for row in ROWS], "pos": [row["pos"][0] for row in ROWS]})
    model = SentenceTransformer(str(folder / "model" / "guide"), device="cpu")
    mined = mine_hard_negatives(
        data, model, corpus=DOCUMENTS, cross_encoder=cross_encoder, output_format="labeled-list", output_scores=True,
        verbose=False, **options,
    )  # fmt: skip
    return {
        row["query"]: (list(zip(row["scores"][1:], row["pos"][1:], strict=True)), row["scores"][0]) for row in mined
    }


def ours(ranks, folder, to, **options):
    command = arguments(
        folder / "model" / "guide", [folder / "rows.jsonl"], folder / to, corpus=folder / "pool.jsonl", **options
    )
    ranks(2, mine, command)
    return {
        row["query"]: (list(zip(row["neg_scores"], row["neg"], strict=True)), row["pos_scores"][0])
        for row in read_jsonl(folder / to / "rows.jsonl")
    }


def assert_same(actual, reference):
    assert sum(len(negatives) for negatives, _ in reference.values()) > 60, "nothing was mined"
    assert set(actual) == {row["query"] for row in ROWS}
    for query, (negatives, score) in actual.items():
        expected, positive = reference.get(query, ([], None))
        assert [score for score, _ in negatives] == pytest.approx([score for score, _ in expected], abs=2e-6)
        # Not by their order alone: their scores of a text and ours differ in the last bit.
        assert {text: score for score, text in negatives} == pytest.approx({t: s for s, t in expected}, abs=2e-6)
        assert positive is None or score == pytest.approx(positive, abs=2e-6)


@pytest.mark.quick("plain-options0-same0", "limits-options3-same3")
@pytest.mark.parametrize(
    ("to", "options", "same"),
    [
        ("plain", {"negatives": 4, "rank_max": 20}, {"num_negatives": 4, "range_max": 20}),
        (
            "relative",
            {"negatives": 5, "rank_max": 30, "relative_margin": 0.01},
            {"num_negatives": 5, "range_max": 30, "relative_margin": 0.01},
        ),
        (
            "absolute",
            {"negatives": 3, "rank_min": 2, "rank_max": 40, "absolute_margin": 0.02},
            {"num_negatives": 3, "range_min": 2, "range_max": 40, "absolute_margin": 0.02},
        ),
        (
            "limits",
            {"negatives": 6, "rank_min": 1, "rank_max": 60, "max_score": 0.965, "min_score": 0.9, "absolute_margin": 0},
            {
                "num_negatives": 6, "range_min": 1, "range_max": 60, "max_score": 0.965, "min_score": 0.9,
                "absolute_margin": 0,
            },
        ),
        ("all", {"negatives": 300, "rank_max": 300}, {"num_negatives": 300, "range_max": 300}),
    ],
)  # fmt: skip
def test_rows_equal_those_of_sentence_transformers(ranks, folder, to, options, same):
    assert_same(ours(ranks, folder, to, **options), reference_results(folder, **same))


@pytest.mark.slow
def test_a_cross_encoder_scores_as_in_sentence_transformers(ranks, folder):
    options = {"negatives": 5, "rank_max": 300, "relative_margin": 0.001}
    mined = ours(ranks, folder, "cross-mined", teacher=folder / "cross", **options)
    assert any(score < 0 for _, score in mined.values()), "a fraction of a raw score means something else"
    # Its scores, and what it takes a fraction of, are probabilities.
    cross = CrossEncoder(str(folder / "cross"), device="cpu")
    expected = reference_results(folder, cross, num_negatives=5, range_max=300, relative_margin=0.001)
    assert_same(
        {
            query: ([(sigmoid(score), text) for score, text in negatives], sigmoid(score))
            for query, (negatives, score) in mined.items()
        },
        expected,
    )


def sigmoid(score):
    return 1 / (1 + math.exp(-score))
