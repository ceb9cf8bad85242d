"""Whole runs of learned sparse models: from rows to an exported model, on any number of ranks, stopped and resumed."""

import json
from pathlib import Path

import pytest
import sentence_transformers
from packaging.version import Version
from sentence_transformers import SparseEncoder

from embedtrain.config.compose import compose_recipes
from embedtrain.errors import ConfigError
from embedtrain.kinds.sparse import files
from tests.ranks import RankFailed
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import save_language_model, small_model, text, write_beir, write_rows
from tests.test_run_losses import BASE as OPTIONS

BASE = [option for option in OPTIONS if not option.startswith(("model.pooling", "export.check"))]


def run(world, *arguments):
    return run_without_base(world, *BASE, *arguments)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    write_rows(folder / "train.jsonl", 26)
    write_beir(folder / "dev", 6)
    for architecture in ("bert", "qwen3"):
        small = small_model(architecture, kind="sparse", pooling=None)
        save_language_model(small, folder / architecture)
    return folder


def options(inputs: Path, output_dir: Path, *more: str, model: str = "bert") -> list[str]:
    return [
        "model.kind=sparse", f"model.path={inputs / model}", f"data.train=[{inputs / 'train.jsonl'}]",
        f"output_dir={output_dir}", "sparsity.query_weight=0.01", "sparsity.document_weight=0.01", *more,
    ]  # fmt: skip


def test_trained_evaluated_exported_and_resumed(ranks, inputs, tmp_path):
    common = [f"evaluation.sets=[{inputs / 'dev'}]", "checkpoint.every=2"]
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, output_dir in runs.items():
        ranks(size, run, *options(inputs, output_dir, *common), timeout=280)
    assert losses(runs[2]) == pytest.approx(losses(runs[1]), rel=1e-4)
    for name in ("queries/flops", "documents/active_words", "documents/active_words_p99", "queries/empty_texts"):
        first, other = ([row[name] for row in metric_rows(output_dir) if name in row] for output_dir in runs.values())
        assert first
        assert first == pytest.approx(other, rel=1e-3)
    model = SparseEncoder(str(runs[1] / "model"), device="cpu")
    weights = model.encode([text(1, 5)], convert_to_sparse_tensor=False)
    assert weights.shape == (1, 64)
    assert 0 < int((weights > 0).sum()) < 64
    # Stopped after step 2, the run resumes on another number of ranks: the ramp is a function of the step.
    resumed = rewind_run(runs[2], tmp_path / "resumed", 2)
    ranks(1, run, *options(inputs, resumed, *common))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)
    first, second = ([row for row in metric_rows(path) if "ndcg@10" in row] for path in runs.values())
    assert [row["ndcg@10"] for row in first] == pytest.approx([row["ndcg@10"] for row in second], rel=1e-3)


@pytest.mark.skipif(
    Version(sentence_transformers.__version__) < Version("6.2"),
    reason="sentence-transformers computes the logits of all tokens of a decoder from 6.2 on",
)
def test_decoders_are_exported(ranks, inputs, tmp_path):
    """Sentence-transformers opens the causal language model with the same weights of words, which the run compares.

    It is trained in bf16, and with adapters, which are merged.
    """
    more = ("model.lora.rank=4", "parallel.precision=bf16", "optim.lr=1e-2")
    output = ranks(2, run, *options(inputs, tmp_path / "run", *more, model="qwen3"))[0]
    assert "reopening it with sentence-transformers" in output
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def run_with_sentence_transformers(world, version, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "version", lambda _: version)
        return run(world, *arguments)


def test_decoders_are_not_checked_by_versions_that_read_the_last_token(ranks, inputs, tmp_path):
    """The run ends before its first step; masked language models, and runs without the check, need no new version."""
    arguments = options(inputs, tmp_path / "run", "train.steps=1", model="qwen3")
    with pytest.raises(RankFailed, match=r"sentence-transformers 6\.1\.0 .*: install 6\.2 .*export\.check=false"):
        ranks(1, run_with_sentence_transformers, "6.1.0", *arguments)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    ranks(1, run_with_sentence_transformers, "6.1.0", *arguments, "export.check=false")
    masked = options(inputs, tmp_path / "masked", "train.steps=1")
    ranks(1, run_with_sentence_transformers, "6.1.0", *masked)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("sparsity.query_weight=-1", r"sparsity\.query_weight=-1"),
        ("sparsity.document_threshold=-1", r"sparsity\.document_threshold=-1"),
        ("sparsity.ramp=-1", r"sparsity\.ramp=-1"),
        ("loss=cosent", "loss=cosent: "),
        ("loss.similarity=dot", r"loss\.similarity=dot"),
        ("export.formats=[logit_score]", "logit_score is not for model.kind=sparse"),
        ("model.pooling=cls", r"model\.pooling=cls"),
        ("model.kind=dense model.pooling=cls", "sparsity.query_weight=0.01: is for model.kind=sparse"),
    ],
)
def test_options_without_effect_are_rejected(option, pattern):
    more = ["name=x", "data.train=[x.jsonl]", "train.steps=1", "train.epochs=null", *option.split()]
    with pytest.raises(ConfigError, match=pattern):
        compose_recipes([*options(Path("x"), Path("y")), *more])
