"""Whole runs of dual encoders: exported, resumed, evaluated, opened by sentence-transformers and trained again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer

from embedtrain.commands import export
from embedtrain.config.evaluation import Unshard
from embedtrain.config.kinds import kind_of_files
from embedtrain.config.recipe import ModelConfig
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import load_model
from tests.commands import call
from tests.dual_encoder.towers import save_towers
from tests.runs import evaluation_metrics, losses, rewind_run, run_without_base
from tests.small import (
    model_options,
    parallel,
    save_small,
    small_model,
    small_tokenizer,
    text,
    write_beir,
    write_rows,
)

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
    "evaluation.at_start=false", "evaluation.every=2", "tracking.report=false",
]  # fmt: skip


def encoded(world: World, model: ModelConfig, texts: list[str]) -> list[torch.Tensor]:
    """The vectors of texts as queries, and as documents."""
    loaded = load_model(model, parallel(), world, seed=0, work=None)
    layer, whole = (SentenceEncoder.from_model(loaded, world, chunk_tokens=40, unshard=way) for way in Unshard)
    vectors = [layer.encode_all(texts, role=role).cpu() for role in TextRole]
    for role, expected in zip(TextRole, vectors, strict=True):  # only the weights of one tower are gathered
        assert torch.equal(whole.encode_all(texts, role=role).cpu(), expected)
    return vectors


def test_trained_exported_resumed_and_opened_again(ranks, inputs, tmp_path):
    runs = {size: tmp_path / str(size) for size in (1, 3)}
    for size, output_dir in runs.items():
        ranks(size, run_without_base, *options(inputs, output_dir), timeout=280)
        assert losses(output_dir) == pytest.approx(losses(runs[1]), rel=1e-4)
        assert evaluation_metrics(output_dir) == evaluation_metrics(runs[1])
    resumed = rewind_run(runs[3], tmp_path / "resumed", 2)
    ranks(2, run_without_base, *options(inputs, resumed))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)

    directory = runs[3] / "model"
    assert kind_of_files(directory)[0].name == "dual_encoder"
    model = SentenceTransformer(str(directory), device="cpu")
    theirs = [torch.tensor(model.encode_query(TEXTS)), torch.tensor(model.encode_document(TEXTS))]
    options_of_export = model_options("dual_encoder", path=str(directory))
    for own, other in zip(ranks(3, encoded, options_of_export, TEXTS)[0], theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*theirs, atol=1e-2)
    for role, expected in zip(("query", "document"), theirs, strict=True):  # each tower is a model of its own
        alone = SentenceTransformer(str(directory / role), device="cpu")
        torch.testing.assert_close(torch.tensor(alone.encode(TEXTS)), expected, rtol=1e-5, atol=1e-5)

    again = ["name=t", "model.kind=dual_encoder", f"model.path={directory}", f"data.train=[{inputs / 'train.jsonl'}]"]
    ranks(2, run_without_base, *again, f"output_dir={tmp_path / 'again'}", *SETTINGS, "train.steps=1")
    assert losses(tmp_path / "again")[1] < losses(runs[1])[1]


@pytest.mark.slow  # adapters of towers: tests/image_text/test_run.py
def test_adapters_on_both_towers(ranks, inputs, tmp_path):
    """Losses on 1 and 3 ranks are equal, and exports reproduce the unmerged adapters."""
    lora = ["model.lora.rank=2", "optim.lr=1e-2"]
    runs = {size: tmp_path / str(size) for size in (1, 3)}
    for size, output_dir in runs.items():
        ranks(size, run_without_base, *options(inputs, output_dir, *lora), timeout=280)
    assert losses(runs[3]) == pytest.approx(losses(runs[1]), rel=1e-4)
    call("export", f"run={runs[3]}", "step=4", f"output_dir={tmp_path / 'again'}")
    other = f"output_dir={tmp_path / 'other'}"
    with pytest.raises(ConfigError, match=r"^adapters\.task=.*: must be of model\.kind=dense, not dual_encoder"):
        export.run(export.compose([f"adapters={{task: {runs[3]}}}", other]))
    with pytest.raises(ConfigError, match=r"^formats=.*adapter has one tower"):
        export.run(export.compose([f"run={runs[3]}", "formats=[sentence_transformers,adapter]", other]))
    for role in ("query", "document"):
        first, again = (
            load_file(path / role / "model.safetensors") for path in (runs[3] / "model", tmp_path / "again")
        )
        before = load_file(inputs / role / "model.safetensors")
        assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], before[name]) for name in before)
        assert any(torch.equal(first[name], before[name]) for name in before), "embeddings are frozen"


def test_a_router_of_sentence_transformers(ranks, tmp_path):
    """One that the library wrote: a table of static embeddings for queries, and one Normalize after both routes."""
    static = StaticEmbedding(small_tokenizer().backend_tokenizer, embedding_dim=32)
    backbone = Transformer(str(save_small(small_model("bert"), tmp_path / "bert")), max_seq_length=12)
    router = Router.for_query_document([static], [backbone, Pooling(32, pooling_mode="mean")])
    model = SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts={"query": "alpha "})
    model.save(str(tmp_path / "router"))
    theirs = [torch.tensor(model.encode(TEXTS, task=role, prompt="")) for role in ("query", "document")]
    directory = model_options("dual_encoder", path=str(tmp_path / "router"))
    for own, other in zip(ranks(2, encoded, directory, TEXTS)[0], theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert kind_of_files(tmp_path / "router")[0].name == "dual_encoder"
    write_rows(tmp_path / "train.jsonl", 26)
    again = ["name=t", "model.kind=dual_encoder", f"model.path={directory.path}"]
    again.append(f"data.train=[{tmp_path / 'train.jsonl'}]")
    for size in (1, 2):
        ranks(size, run_without_base, *again, f"output_dir={tmp_path / str(size)}", *SETTINGS)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    trained = SentenceTransformer(str(tmp_path / "2" / "model"), device="cpu")
    assert trained.prompts["query"] == "alpha "
    assert not torch.allclose(torch.tensor(trained.encode(TEXTS, task="query", prompt="")), theirs[0])
