"""Evaluation within whole runs: early stopping, weights gathered whole or block by block, sets of every kind."""

import pytest

from tests.small import save_small, small_model
from tests.test_run import figures, losses, options, rows, run, workshop  # noqa: F401

# One document of each query's is found by any model, so recall@100 of twenty documents never gets better than 1.
PATIENT = (
    "train.steps=12", "evaluation.every=2", "checkpoint.every=4", "checkpoint.best=dev/recall@100",
    "evaluation.patience=2",
)  # fmt: skip


def test_training_stops_when_nothing_gets_better(ranks, workshop, tmp_path):  # noqa: F811
    told, _ = ranks(2, run, *options(workshop, tmp_path, *PATIENT))
    because = "2 evaluations without a better dev/recall@100 than 1.0000 at step 2 (evaluation.patience)"
    assert f"stopped at step 6 of 12: {because}" in told
    assert "exporting step 2, the best by dev/recall@100 (1.0000)" in told
    assert list(losses(tmp_path)) == list(range(1, 7))

    again, _ = ranks(2, run, *options(workshop, tmp_path, *PATIENT))
    assert f"stopped at step 6 of 12: {because}" in again
    assert "trained" not in again
    assert list(losses(tmp_path)) == list(range(1, 7))

    more, _ = ranks(2, run, *options(workshop, tmp_path, *PATIENT[:-1], "evaluation.patience=4"))
    assert "stopped at step 10 of 12: 4 evaluations" in more, "what was counted before still counts"
    assert list(losses(tmp_path)) == list(range(1, 11))


def test_patience_runs_out_as_if_the_run_had_not_been_stopped(ranks, workshop, tmp_path):  # noqa: F811
    ranks(2, run, *options(workshop, tmp_path, "train.steps=4", *PATIENT[1:], "optim.schedule=constant"))
    assert rows(tmp_path)[-1]["step"] == 4
    told, _ = ranks(2, run, *options(workshop, tmp_path, *PATIENT, "optim.schedule=constant"))
    assert "stopped at step 6 of 12" in told


@pytest.mark.parametrize("architecture", ["xlm-roberta", "qwen2", "qwen3"])
def test_gathering_whole_or_block_by_block_changes_nothing(ranks, workshop, tmp_path, architecture):  # noqa: F811
    """Bit for bit: losses with dropout after evaluations of either way, or of none, and the figures themselves."""
    model = save_small(small_model(architecture, dropout=0.1), tmp_path / "model")
    pooling = "last" if architecture.startswith("qwen") else "mean"
    common = [*options(workshop, tmp_path, "train.steps=4"), f"model.path={model}", f"model.pooling={pooling}"]
    found = {}
    for name, more in {
        "never": ["evaluation.sets=[]"],
        "block": ["evaluation.every=1", "evaluation.at_start=true"],
        "whole": ["evaluation.every=1", "evaluation.at_start=true", "evaluation.gather=whole"],
    }.items():
        ranks(2, run, *common, *more, f"output_dir={tmp_path / name}")
        found[name] = losses(tmp_path / name), figures(tmp_path / name)
    assert found["never"][0] == found["block"][0] == found["whole"][0]
    assert found["block"][1] == found["whole"][1]
    assert list(found["whole"][1]) == [0, 1, 2, 3, 4]
