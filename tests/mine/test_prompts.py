"""Rows are scored as in training: with the instructions, prompts and lengths of the row, the source or the model."""

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.mine.runs import (
    arguments,
    more_documents,
    positive,
    query,
    read_jsonl,
    save_model,
    try_mining,
    write_jsonl,
)

PLAIN = [{"query": query(i), "pos": [positive(i)]} for i in range(5)]
OWN = [
    {"query": query(10), "pos": [positive(10)], "prompt": "gamma theta"},
    {"query": query(11), "pos": [positive(11)], "prompt": "eta", "type": "symmetric_sts"},
    {"query": query(12), "pos": [positive(12)], "prompt": ""},
    {"query": query(13), "pos": [positive(13)]},
    {"query": query(14), "pos": [positive(14)], "prompt": "eta", "type": "symmetric_sts"},
]
CORPUS = more_documents(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    directory = save_model(folder / "model")
    settings = json.loads((directory / "config_sentence_transformers.json").read_text())
    settings["prompts"] = {"query": "nu nu ", "document": "mu "}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    write_jsonl(folder / "plain.jsonl", PLAIN)
    write_jsonl(folder / "own.jsonl", OWN)
    write_jsonl(folder / "pool.jsonl", [{"text": text} for text in CORPUS])
    return folder


@pytest.mark.quick("True")
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_equal_those_of_training(ranks, folder, include_prompt):
    pooling = folder / "model" / "guide" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": include_prompt}))
    to = folder / f"to-{include_prompt}"
    source = f"{{path: '{folder / 'own.jsonl'}', document_prompt: 'delta ', query_max_length: 6}}"
    command = arguments(
        folder / "model" / "guide", [folder / "plain.jsonl", source], to, corpus=folder / "pool.jsonl",
        negatives=4, rank_max=15, instruction_format="'{instruction} kappa {text}'",
    )  # fmt: skip
    printed, error = ranks(2, try_mining, folder, command)[0]
    assert error == ""
    assert "encoded 3 times" in printed
    model = SentenceTransformer(str(folder / "model" / "guide"), device="cpu")

    def vectors(prompt, texts, length):
        model.max_seq_length = length
        return model.encode(texts, prompt=prompt, batch_size=1)

    formats = {
        "plain": [("nu nu ", "mu ", 48)] * len(PLAIN),
        "own": [
            ("gamma theta kappa ", "delta ", 6),
            ("eta kappa ", "eta kappa ", 6),
            ("", "delta ", 6),
            ("nu nu ", "delta ", 6),
            ("eta kappa ", "eta kappa ", 6),
        ],
    }
    for name, input_rows in (("plain", PLAIN), ("own", OWN)):
        rows = read_jsonl(to / f"{name}.jsonl")
        assert [row["query"] for row in rows] == [row["query"] for row in input_rows]
        for row, before, (query_prompt, document_prompt, length) in zip(rows, input_rows, formats[name], strict=True):
            assert {key: row.get(key) for key in ("prompt", "type")} == {
                key: before.get(key) for key in ("prompt", "type")
            }
            of_query = vectors(query_prompt, [row["query"]], length)[0]
            scores = vectors(document_prompt, [*row["pos"], *row["neg"]], 48) @ of_query
            assert [*row["pos_scores"], *row["neg_scores"]] == pytest.approx(scores, abs=2e-6)
            best = np.sort(vectors(document_prompt, _pool(), 48) @ of_query)[::-1]
            assert row["neg_scores"][0] in (pytest.approx(best[0], abs=2e-6), pytest.approx(best[1], abs=2e-6))


def test_a_teacher_leaves_out_its_prompts_as_its_directory_says(ranks, folder):
    pooling = folder / "model" / "guide" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    directory = folder / "model" / "guide"
    command = arguments(
        directory, [folder / "plain.jsonl"], folder / "taught", corpus=folder / "pool.jsonl", negatives=4, rank_max=15,
        teacher=directory,
    )  # fmt: skip
    assert ranks(2, try_mining, folder, command)[0][1] == ""
    model = SentenceTransformer(str(directory), device="cpu")
    for row in read_jsonl(folder / "taught" / "plain.jsonl"):
        of_query = model.encode([row["query"]], prompt="nu nu ")[0]
        scores = model.encode([*row["pos"], *row["neg"]], prompt="mu ", batch_size=1) @ of_query
        assert [*row["pos_scores"], *row["neg_scores"]] == pytest.approx(scores, abs=2e-6)


def _pool():
    return list(dict.fromkeys([*(text for row in (*PLAIN, *OWN) for text in row["pos"]), *CORPUS]))


def test_instruction_of_documents_alone_is_rejected(ranks, folder):
    def message(role, text):
        return {"role": role, "content": text}

    row = {
        "messages": [message("user", "alpha")],
        "positive_messages": [[message("system", "Stored"), message("user", "beta")]],
    }
    write_jsonl(folder / "messages.jsonl", [row])
    command = arguments(folder / "model" / "guide", ["messages.jsonl"], folder / "never")
    ((_, error),) = ranks(1, try_mining, folder, command)
    assert "messages.jsonl:1: " in error and "instruction" in error
