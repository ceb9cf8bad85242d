"""Whole runs on real ranks: the number of ranks, stops and resumes never change the training result."""

import json
import shutil
import time
import unittest.mock
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from embedtrain.checkpoint import checkpointer
from embedtrain.checkpoint.step_directory import list_steps
from embedtrain.config.recipe import TrainSource
from embedtrain.data.train_data import load_train_data
from embedtrain.distributed.world import World
from tests.runs import evaluation_metrics, exported_weights, losses, options, rewind_run, run


@pytest.mark.parametrize("sizes", [(4,), pytest.param((2, 3, 4), marks=pytest.mark.slow)])
def test_the_number_of_ranks_changes_nothing(ranks, run_inputs, tmp_path, sizes):
    """6 steps over 36 rows in batches of 10: the last batch of the epoch has 6 rows, uneven on 4 ranks."""
    results = {}
    for size in (1, *sizes):
        out = tmp_path / str(size)
        ranks(size, run, *options(run_inputs, out, "train.steps=6", "evaluation.every=3"))
        results[size] = losses(out), evaluation_metrics(out)
    expected_losses, expected_metrics = results[1]
    assert list(expected_losses) == [1, 2, 3, 4, 5, 6]
    assert expected_losses[6] < expected_losses[1]
    for size in sizes:
        assert results[size][0] == pytest.approx(expected_losses, rel=1e-5)
        for step in (3, 6):
            assert results[size][1][step] == pytest.approx(expected_metrics[step], abs=1e-6)


def test_evaluation_does_not_affect_training(ranks, run_inputs, tmp_path):
    """Bit for bit, with dropout: no evaluation, or one before and after every step."""
    common = ("train.steps=4", "checkpoint.every=2")
    ranks(2, run, *options(run_inputs, tmp_path / "never", *common, model="dropout"))
    more = ("evaluation.at_start=true", "evaluation.every=1")
    ranks(2, run, *options(run_inputs, tmp_path / "always", *common, *more, model="dropout"))
    assert losses(tmp_path / "always") == losses(tmp_path / "never")
    assert list(evaluation_metrics(tmp_path / "always")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_resume_is_exact_and_elastic(ranks, run_inputs, tmp_path, layout):
    """From step 4 of 8: bit-equal on two ranks with dropout; equal on three ranks, then on one."""
    common = ("train.steps=8", "checkpoint.every=2", "checkpoint.keep=9", f"checkpoint.layout={layout}")
    for model in ("model", "dropout"):
        whole = tmp_path / model
        ranks(2, run, *options(run_inputs, whole, *common, model=model))
        if model == "model" and layout == "sharded":
            continue  # the one with dropout is the stricter test
        resumed = rewind_run(whole, tmp_path / f"{model}-2", 4)
        ranks(2, run, *options(run_inputs, resumed, *common, model=model))
        assert losses(resumed) == losses(whole), "rows after step 4 are replaced, not repeated"
        assert evaluation_metrics(resumed) == evaluation_metrics(whole)
        assert exported_weights(resumed) == exported_weights(whole)
    expected_losses, expected_metrics = losses(tmp_path / "model"), evaluation_metrics(tmp_path / "model")
    for size, step, source in ((3, 4, "model"), (1, 6, "model-3")):
        resumed = rewind_run(tmp_path / source, tmp_path / f"model-{size}", step)
        ranks(size, run, *options(run_inputs, resumed, *common))
        assert list(losses(resumed)) == list(range(1, 9))
        assert losses(resumed) == pytest.approx(expected_losses, rel=1e-5)
        assert evaluation_metrics(resumed)[8] == pytest.approx(expected_metrics[8], abs=1e-6)


def test_damaged_checkpoints_are_reported_and_skipped(ranks, run_inputs, tmp_path):
    common = ("train.steps=8", "checkpoint.every=2", "checkpoint.keep=9")
    ranks(2, run, *options(run_inputs, tmp_path / "run", *common))
    expected = losses(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000009.tmp").mkdir()
    truncated = checkpoints / "step-00000008" / "weights-00000-of-00002.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    flipped = checkpoints / "step-00000006" / "optimizer-00001-of-00002.safetensors"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    output, other_output = ranks(2, run, *options(run_inputs, tmp_path / "run", *common))
    assert other_output == ""
    assert "step-00000009.tmp" in output
    assert "weights-00000-of-00002.safetensors is damaged" in output
    assert "optimizer-00001-of-00002.safetensors is damaged" in output
    assert f"resuming from {checkpoints / 'step-00000004'}" in output
    assert losses(tmp_path / "run") == expected


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 99])
def test_a_checkpoint_of_another_format_is_not_skipped(ranks, run_inputs, tmp_path, version):
    """A run from scratch in its folder would delete it."""
    ranks(2, run, *options(run_inputs, tmp_path / "run", "train.steps=2"))
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": version}))
    with pytest.raises(AssertionError) as failure:
        ranks(2, run, *options(run_inputs, tmp_path / "run", "train.steps=4"))
    assert str(failure.value).count(f"(format {version}") == 2
    assert "or choose another output_dir" in str(failure.value)
    assert list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_new_run_starts_from_weights_without_optimizer(ranks, run_inputs, tmp_path, layout):
    common = ("checkpoint.contents=model", f"checkpoint.layout={layout}")
    out = tmp_path / "run"
    ranks(2, run, *options(run_inputs, out, *common, "train.steps=3"))
    first = losses(out)
    output, _ = ranks(2, run, *options(run_inputs, out, *common, "train.steps=3"))
    assert "step-00000003 is the end of this run: increase train.steps" in output
    assert losses(out) == first
    output, _ = ranks(2, run, *options(run_inputs, out, *common, "train.steps=4", "checkpoint.every=1"))
    assert (out / "metrics.previous.jsonl").is_file(), "the rows of the first run are kept"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    assert "contains only weights" in output
    assert losses(out)[1] < first[1]


def run_by_fast_clock(world: World, fast_rank: int, *arguments: str) -> str:
    """A run in which a minute of one rank lasts less than a step."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() * (1e9 if world.rank == fast_rank else 1.0))
    with unittest.mock.patch.object(checkpointer, "time", clock):
        return run(world, *arguments)


def test_checkpoints_by_the_clock_of_rank_0(ranks, run_inputs, tmp_path):
    """Saved by all ranks after the same step, at the end only in a short run, and without effect on the result."""
    common = ("train.steps=6", "checkpoint.keep=9", "checkpoint.asynchronous=false")
    for rank in (0, 1):
        arguments = options(run_inputs, tmp_path / str(rank), *common, model="dropout")
        output, _ = ranks(2, run_by_fast_clock, rank, *arguments)
        saved = [step for step, _ in list_steps(tmp_path / str(rank) / "checkpoints")]
        assert saved == ([6, 5, 4, 3, 2, 1] if rank == 0 else [6])
        assert "checkpoints: every 30 minutes, at the end, up to 6 of " in output
    resumed = rewind_run(tmp_path / "0", tmp_path / "resumed", 3)
    ranks(2, run, *options(run_inputs, resumed, *common, model="dropout"))
    for name in ("1", "resumed"):
        assert losses(tmp_path / name) == losses(tmp_path / "0")
        assert exported_weights(tmp_path / name) == exported_weights(tmp_path / "0")


def test_the_best_checkpoint_is_kept_and_exported(ranks, run_inputs, tmp_path):
    """All 20 documents are always among the first 100, so no later evaluation is better than the first."""
    common = ("train.steps=8", "evaluation.every=2", "checkpoint.keep=1", "checkpoint.best_metric=dev/recall@100")
    output, _ = ranks(2, run, *options(run_inputs, tmp_path / "run", *common, "evaluation.at_start=true"))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000008"]
    assert "exporting step 2, the best by dev/recall@100 (1.0000)" in output
    assert "weights of step 2" in (tmp_path / "run" / "model" / "README.md").read_text()
    with pytest.raises(AssertionError, match=r"ConfigError: checkpoint\.best_metric=dev/ndcg@7"):
        ranks(1, run, *options(run_inputs, tmp_path / "other", "train.steps=2", "checkpoint.best_metric=dev/ndcg@7"))


def test_a_run_with_another_identity_is_not_resumed(ranks, run_inputs, tmp_path):
    arguments = options(run_inputs, tmp_path / "run")
    ranks(1, run, *arguments, "train.steps=2")
    for change, message in (
        ("seed=7", r"seed=42, .* seed=7"),
        ("model.query_prompt='beta '", r"prompts\.query=.* prompts\.query=.*beta"),
        ("loss.temperature=0.2", r"loss\.temperature=0\.1, .* loss\.temperature=0\.2"),
    ):
        with pytest.raises(AssertionError, match=f"CheckpointError.*{message}"):
            ranks(1, run, *arguments, "train.steps=4", change)
    ranks(1, run, *arguments, "train.steps=4")
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_an_embedding_that_is_not_finite_stops_all_ranks(ranks, run_inputs, tmp_path):
    """The embedding of one token overflows; only rank 1's part of the batch of step 2 contains the token."""
    shutil.copytree(run_inputs / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    token = weights["embeddings.word_embeddings.weight"][25]  # no text contains the letter i so far
    token[::2], token[1::2] = 3e38, -3e38  # finite, but their difference is not
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    row_index = ranks(1, rows_of_batch, str(run_inputs / "train.jsonl"), 1)[0][1]  # rank 1 owns the second row
    lines = (run_inputs / "train.jsonl").read_text().splitlines()
    row = json.loads(lines[row_index])
    lines[row_index] = json.dumps(row | {"query": "i " + row["query"]})
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    arguments = (f"model.path={tmp_path / 'model'}", f"data.train=[{tmp_path / 'train.jsonl'}]", "train.steps=4")
    with pytest.raises(AssertionError) as failure:
        ranks(2, run, *arguments, f"output_dir={tmp_path / 'run'}")
    assert str(failure.value).count("TrainingError: step 2, rank 1: its embeddings are not finite") == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert list(losses(tmp_path / "run")) == [1]


def rows_of_batch(_world: World, path: str, number: int) -> list[int]:
    data = load_train_data([TrainSource(path=path)], seed=42, global_batch_size=10)
    return [int(row) for row in data.plan.batch(number).rows]


def test_a_vocabulary_belongs_to_its_run(ranks, run_inputs, tmp_path):
    """A resumed run reads its vocabulary; a run from scratch trains a new one, even if the folder contains one."""
    config = "{model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    arguments = (
        *options(run_inputs, tmp_path / "run"),
        "model.path=null",
        f"model.config={config}",
        "model.max_length=32",
    )
    vocabulary = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    ranks(1, run, *arguments, "train.steps=1")
    first = vocabulary.read_bytes()
    ranks(1, run, *arguments, "train.steps=2")
    assert vocabulary.read_bytes() == first
    with pytest.raises(AssertionError, match=r"model\.vocab_lowercase=True, .* model\.vocab_lowercase=False"):
        ranks(2, run, *arguments, "train.steps=3", "model.vocab_lowercase=false")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    ranks(1, run, *arguments, "train.steps=1", "model.vocab_lowercase=false")
    assert vocabulary.read_bytes() != first
