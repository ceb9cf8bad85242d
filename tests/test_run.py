"""Whole runs on real ranks: the number of ranks, stopping and resuming never change what is learnt."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.training.train import train
from tests.small import save_small, small_model, write_beir, write_rows

BASE = [
    "name=t", "model.pooling=mean", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=120",
    "parallel.strategy=fsdp", "parallel.precision=fp32", "optim.lr=1e-3", "loss.temperature=0.1",
    "export.check=false",  # what is exported is the affair of the tests of exports
]  # fmt: skip


def run(world: World, *arguments: str) -> str:
    """Train as the door would; what this rank said on its standard output."""
    (recipe,) = compose_recipes([*BASE, *arguments])
    with contextlib.redirect_stdout(io.StringIO()) as told:
        train(recipe, world)
    return told.getvalue()


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(directory) if "loss" in row}


def figures(directory: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: {k: v for k, v in row.items() if "@" in k} for row in rows(directory) if "set" in row}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Rows, an evaluation set, and models without and with dropout."""
    folder = tmp_path_factory.mktemp("workshop")
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta"), folder / "model")
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "dropout")
    return folder


def options(workshop: Path, out: Path, *more: str, model: str = "model") -> tuple[str, ...]:
    return (
        f"model.path={workshop / model}", f"data.train=[{workshop / 'train.jsonl'}]",
        f"evaluation.sets=[{workshop / 'dev'}]", f"output_dir={out}", *more,
    )  # fmt: skip


def test_the_number_of_ranks_changes_nothing(ranks, workshop, tmp_path):
    """6 steps over 36 rows in batches of 10: the last batch of the epoch has 6 rows, uneven on 4 ranks."""
    found = {}
    for size in (1, 2, 3, 4):
        ranks(size, run, *options(workshop, tmp_path / str(size), "train.steps=6", "evaluation.every=3"))
        found[size] = losses(tmp_path / str(size)), figures(tmp_path / str(size))
    assert list(found[1][0]) == [1, 2, 3, 4, 5, 6]
    assert found[1][0][6] < found[1][0][1]
    for size in (2, 3, 4):
        assert found[size][0] == pytest.approx(found[1][0], rel=1e-5)
        for step in (3, 6):
            assert found[size][1][step] == pytest.approx(found[1][1][step], abs=1e-6)


def test_evaluating_changes_nothing(ranks, workshop, tmp_path):
    """Bit for bit: dropout on, evaluated before and after every step or not at all."""
    common = ("train.steps=4", "checkpoint.every=2")
    ranks(2, run, *options(workshop, tmp_path / "never", *common, model="dropout"))
    more = ("evaluation.at_start=true", "evaluation.every=1")
    ranks(2, run, *options(workshop, tmp_path / "always", *common, *more, model="dropout"))
    assert losses(tmp_path / "always") == losses(tmp_path / "never")
    assert list(figures(tmp_path / "always")) == [0, 1, 2, 3, 4]


def rewind_run(directory: Path, to: Path, step: int) -> Path:
    """A copy of a run as it was after `step`: later checkpoints and the export are not there."""
    shutil.copytree(directory, to)
    for path in (to / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(to / "model")
    return to


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_resume_is_exact_and_elastic(ranks, workshop, tmp_path, layout):
    """Taken back to step 4 of 8: on two ranks bit-equal with dropout; without it on three ranks, then on one, equal."""
    common = ("train.steps=8", "checkpoint.every=2", "checkpoint.keep=9", f"checkpoint.layout={layout}")
    for model in ("model", "dropout"):
        whole = tmp_path / model
        ranks(2, run, *options(workshop, whole, *common, model=model))
        expected = losses(whole)
        again = rewind_run(whole, tmp_path / f"{model}-2", 4)
        ranks(2, run, *options(workshop, again, *common, model=model))
        assert losses(again) == expected, "rows after step 4 are replaced, not repeated"
        assert figures(again) == figures(whole)
        assert (again / "model" / "model.safetensors").read_bytes() == (
            whole / "model" / "model.safetensors"
        ).read_bytes()
    expected, measured = losses(tmp_path / "model"), figures(tmp_path / "model")
    for size, step, before in ((3, 4, "model"), (1, 6, "model-3")):
        again = rewind_run(tmp_path / before, tmp_path / f"model-{size}", step)
        ranks(size, run, *options(workshop, again, *common))
        assert list(losses(again)) == list(range(1, 9))
        assert losses(again) == pytest.approx(expected, rel=1e-5)
        assert figures(again)[8] == pytest.approx(measured[8], abs=1e-6)


def test_damaged_checkpoints_are_named_and_passed_over(ranks, workshop, tmp_path):
    common = ("train.steps=8", "checkpoint.every=2", "checkpoint.keep=9")
    ranks(2, run, *options(workshop, tmp_path / "run", *common))
    expected = losses(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000009.tmp").mkdir()
    part = checkpoints / "step-00000008" / "weights-00000-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    flipped = checkpoints / "step-00000006" / "optimizer-00001-of-00002.safetensors"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    told, silent = ranks(2, run, *options(workshop, tmp_path / "run", *common))
    assert silent == ""
    assert "step-00000009.tmp is an interrupted save: skipped" in told
    assert "weights-00000-of-00002.safetensors is damaged" in told
    assert "optimizer-00001-of-00002.safetensors is damaged: the checksum of state.encoder." in told
    assert f"resuming from {checkpoints / 'step-00000004'}" in told
    assert losses(tmp_path / "run") == expected


def test_a_checkpoint_of_another_format_is_not_passed_over(ranks, workshop, tmp_path):
    """Training anew in its folder would end in deleting it."""
    ranks(2, run, *options(workshop, tmp_path / "run", "train.steps=2"))
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "checkpoint.json"
    for written_as, by in ((1, "an earlier"), (99, "a newer")):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": written_as}))
        with pytest.raises(AssertionError) as failure:
            ranks(2, run, *options(workshop, tmp_path / "run", "train.steps=4"))
        assert str(failure.value).count(f"written by {by} embedtrain (format {written_as}") == 2
        assert "go on with that version, or choose another output_dir" in str(failure.value)
        assert list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_weights_alone_start_a_new_run(ranks, workshop, tmp_path, layout):
    common = ("checkpoint.contents=model", f"checkpoint.layout={layout}")
    ranks(2, run, *options(workshop, tmp_path / "run", *common, "train.steps=3"))
    first = losses(tmp_path / "run")
    told, _ = ranks(2, run, *options(workshop, tmp_path / "run", *common, "train.steps=3"))
    assert "step-00000003 is the end of this run: raise train.steps to go on" in told
    assert losses(tmp_path / "run") == first
    told, _ = ranks(2, run, *options(workshop, tmp_path / "run", *common, "train.steps=4", "checkpoint.every=1"))
    assert (tmp_path / "run" / "metrics.previous.jsonl").is_file(), "the first run's rows are put aside, not dropped"
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000004"]
    assert "holds weights alone: a new run starts from them at step 0" in told
    assert losses(tmp_path / "run")[1] < first[1]


def test_the_best_checkpoint_is_kept_and_exported(ranks, workshop, tmp_path):
    """All 20 documents are always among the first 100, so no later evaluation is better than the first."""
    common = ("train.steps=8", "evaluation.every=2", "checkpoint.keep=1", "checkpoint.best_metric=dev/recall@100")
    told, _ = ranks(2, run, *options(workshop, tmp_path / "run", *common, "evaluation.at_start=true"))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000008"]
    assert "exporting step 2, the best by dev/recall@100 (1.0000)" in told
    assert "weights of step 2" in (tmp_path / "run" / "model" / "README.md").read_text()
    with pytest.raises(AssertionError, match=r"ConfigError: checkpoint.best_metric=dev/ndcg@7: dev has the metrics"):
        ranks(1, run, *options(workshop, tmp_path / "other", "train.steps=2", "checkpoint.best_metric=dev/ndcg@7"))


def test_a_recipe_that_would_learn_something_else_does_not_resume(ranks, workshop, tmp_path):
    ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=2"))
    with pytest.raises(AssertionError, match=r"CheckpointError.*written with seed=42, this run has seed=7"):
        ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=4", "seed=7"))
    with pytest.raises(
        AssertionError, match=r"CheckpointError.*written with prompts.query=.*this run has prompts.query=.*beta"
    ):
        ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=4", "model.query_prompt='beta '"))
    with pytest.raises(AssertionError, match=r"written with loss.temperature=0.1, this run has loss.temperature=0.2: "):
        ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=4", "loss.temperature=0.2"))
    ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=4"))
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_a_vector_that_is_not_finite_stops_all_ranks_and_names_one(ranks, workshop, tmp_path):
    """One word's embedding is NaN; only rank 1's share of the batch of step 2 holds it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(workshop / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][25] = float("nan")  # the letter i stands in no text so far
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    order = ranks(1, positions_of_step, str(workshop / "train.jsonl"), 1)[0]
    lines = (workshop / "train.jsonl").read_text().splitlines()
    row = json.loads(lines[order[1]])  # the second row of the batch is rank 1's
    lines[order[1]] = json.dumps(row | {"query": "i " + row["query"]})
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    arguments = (f"model.path={tmp_path / 'model'}", f"data.train=[{tmp_path / 'train.jsonl'}]", "train.steps=4")
    with pytest.raises(AssertionError) as failure:
        ranks(2, run, *arguments, f"output_dir={tmp_path / 'run'}")
    told = str(failure.value)
    assert told.count("TrainingError: step 2, rank 1: its texts' vectors are not finite") == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert list(losses(tmp_path / "run")) == [1]


def positions_of_step(_world: World, path: str, step: int) -> list[int]:
    from embedtrain.config.recipe import TrainSource
    from embedtrain.data.train_data import load_train_data

    data = load_train_data([TrainSource(path=path)], seed=42, global_batch_size=10)
    return [int(i) for i in data.plan.batch(step).rows]


def test_a_vocabulary_is_that_of_the_run(ranks, workshop, tmp_path):
    """Resumed it is read again; a run that begins makes its own, whatever an earlier attempt left behind."""
    config = "{model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    arguments = (
        *options(workshop, tmp_path / "run"),
        "model.path=null",
        f"model.config={config}",
        "model.max_length=32",
    )
    vocabulary = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    ranks(2, run, *arguments, "train.steps=1")
    made = vocabulary.read_bytes()
    ranks(2, run, *arguments, "train.steps=2")
    assert vocabulary.read_bytes() == made
    with pytest.raises(AssertionError, match=r"with model.vocab_lowercase=True, this run has model.*=False"):
        ranks(2, run, *arguments, "train.steps=3", "model.vocab_lowercase=false")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    ranks(2, run, *arguments, "train.steps=1", "model.vocab_lowercase=false")
    assert vocabulary.read_bytes() != made
