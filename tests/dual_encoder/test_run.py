"""Whole runs of dual encoders: exported, resumed, evaluated, opened by sentence-transformers and trained again."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from embedtrain.config.kinds import kind_of_files
from embedtrain.config.recipe import ModelConfig
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import load_model
from tests.dual_encoder.towers import save_towers
from tests.runs import evaluation_metrics, losses, rewind_run, run_without_base
from tests.small import model_options, parallel, text, write_beir, write_rows

TEXTS = [text(1, 2), text(2, 5), text(3, 20)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dual")
    write_rows(folder / "train.jsonl", 26)
    write_beir(folder / "dev", 12)
    save_towers(folder)
    return folder


def options(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        "name=t", "model.kind=dual_encoder", f"model.query={{path: {inputs / 'query'}, pooling: mean, max_length: 6}}",
        f"model.document={{path: {inputs / 'document'}, pooling: cls, max_length: 9, heads: [{{out: 32}}]}}",
        f"data.train=[{inputs / 'train.jsonl'}]", f"output_dir={output_dir}", f"evaluation.sets=[{inputs / 'dev'}]",
        *SETTINGS, *more,
    ]  # fmt: skip


SETTINGS = [
    "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=40", "train.steps=4", "optim.lr=1e-3",
    "parallel.strategy=fsdp", "parallel.precision=fp32", "loss.temperature=0.1", "checkpoint.every=2",
    "evaluation.at_start=false", "evaluation.every=2",
]  # fmt: skip


def encoded(world: World, model: ModelConfig, texts: list[str]) -> list[torch.Tensor]:
    """The vectors of texts as queries, and as documents."""
    loaded = load_model(model, parallel(), world, seed=0, work=None)
    encoder = SentenceEncoder.from_model(loaded, world, chunk_tokens=40)
    return [encoder.encode_all(texts, role=role).cpu() for role in TextRole]


def test_trained_exported_resumed_and_opened_again(ranks, inputs, tmp_path):
    runs = {size: tmp_path / str(size) for size in (1, 2, 3)}
    for size, output_dir in runs.items():
        ranks(size, run_without_base, *options(inputs, output_dir), timeout=280)
        assert losses(output_dir) == pytest.approx(losses(runs[1]), rel=1e-4)
        assert evaluation_metrics(output_dir) == evaluation_metrics(runs[1])
    resumed = rewind_run(runs[3], tmp_path / "resumed", 2)
    ranks(2, run_without_base, *options(inputs, resumed))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)

    directory = runs[2] / "model"
    assert kind_of_files(directory)[0].name == "dual_encoder"
    model = SentenceTransformer(str(directory), device="cpu")
    theirs = [torch.tensor(model.encode_query(TEXTS)), torch.tensor(model.encode_document(TEXTS))]
    options_of_export = model_options("dual_encoder", path=str(directory))
    for size in (1, 3):
        for own, other in zip(ranks(size, encoded, options_of_export, TEXTS)[0], theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*theirs, atol=1e-2)
    for role, expected in zip(("query", "document"), theirs, strict=True):  # each tower is a model of its own
        alone = SentenceTransformer(str(directory / role), device="cpu")
        torch.testing.assert_close(torch.tensor(alone.encode(TEXTS)), expected, rtol=1e-5, atol=1e-5)

    again = ["model.kind=dual_encoder", f"model.path={directory}", f"data.train=[{inputs / 'train.jsonl'}]"]
    ranks(2, run_without_base, *again, f"output_dir={tmp_path / 'again'}", *SETTINGS)
    assert losses(tmp_path / "again")[1] < losses(runs[1])[1]
