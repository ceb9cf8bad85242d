"""Whole runs of sparse models whose queries need no inference: weights from the data, export, resume, commands."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder

from tests.runs import losses, metric_rows, rewind_run
from tests.small import batch, save_language_model, small_model, small_tokenizer, text, write_beir, write_rows
from tests.test_run_sparse import run

QUERY_WEIGHTS = "model/query_0_SparseStaticEmbedding/model.safetensors"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    write_rows(folder / "train.jsonl", 26)
    write_beir(folder / "dev", 6)
    small = small_model("bert", kind="sparse", pooling=None)
    small.config["vocab_size"] = len(small_tokenizer())
    save_language_model(small, folder / "bert")
    return folder


def options(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        "model.kind=sparse", f"model.path={inputs / 'bert'}", f"data.train=[{inputs / 'train.jsonl'}]",
        f"output_dir={output_dir}", "sparsity.document_weight=0.01", "model.queries=static",
        f"evaluation.sets=[{inputs / 'dev'}]", *more,
    ]  # fmt: skip


def idf() -> torch.Tensor:
    """Of each token in the distinct documents of the training rows."""
    tokenizer = small_tokenizer()
    documents = {text for row in batch(26).rows for text in row.documents.texts}
    tokens = [set(tokenizer(text)["input_ids"]) for text in documents]
    counts = [sum(token in ids for ids in tokens) for token in range(len(tokenizer))]
    return torch.tensor([math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for n in counts])


@pytest.mark.parametrize("trained", [pytest.param(False, marks=pytest.mark.slow), True], ids=["frozen", "trained"])
def test_trained_evaluated_exported_and_resumed(ranks, inputs, tmp_path, trained):
    common = ["checkpoint.every=2", f"model.train_query_weights={trained}", "export.check=true"]
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, output_dir in runs.items():
        ranks(size, run, *options(inputs, output_dir, *common), timeout=280)
    assert losses(runs[2]) == pytest.approx(losses(runs[1]), rel=1e-4)
    stored = [load_file(output_dir / QUERY_WEIGHTS)["weight"] for output_dir in runs.values()]
    torch.testing.assert_close(*stored, rtol=1e-4, atol=1e-5)
    change = float((stored[0] - idf()).abs().max())
    # Three steps with a learning rate of 1e-3.
    assert 5e-4 < change < 4e-3 if trained else change < 1e-5
    resumed = rewind_run(runs[2], tmp_path / "resumed", 2)
    ranks(1, run, *options(inputs, resumed, *common))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)
    model = SparseEncoder(str(runs[1] / "model"), device="cpu")
    query = text(1, 5)
    weights = model.encode_query([query], convert_to_sparse_tensor=False)[0]
    words = sorted(set(small_tokenizer()(query, add_special_tokens=False)["input_ids"]))
    assert weights.nonzero()[:, 0].tolist() == words
    torch.testing.assert_close(weights[words], stored[0][words])
    settings = json.loads((runs[1] / QUERY_WEIGHTS).with_name("config.json").read_text())
    assert settings == {"frozen": not trained}
    first, second = ([row for row in metric_rows(path) if "ndcg@10" in row] for path in runs.values())
    assert [row["ndcg@10"] for row in first] == pytest.approx([row["ndcg@10"] for row in second], rel=1e-3)
