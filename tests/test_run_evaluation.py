"""Evaluation within whole runs: early stopping, weights gathered whole or block by block, sets of every kind."""

import json
import math
from pathlib import Path

import pytest

from tests.small import save_small, small_model, text, write_beir
from tests.test_run import figures, losses, options, rows, run, workshop  # noqa: F401

# One document of each query's is found by any model, so recall@100 of twenty documents never gets better than 1.
PATIENT = (
    "train.steps=12", "evaluation.every=2", "checkpoint.every=4", "checkpoint.best_metric=dev/recall@100",
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


@pytest.mark.parametrize(
    "architecture", ["xlm-roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]
)
def test_gathering_whole_or_block_by_block_changes_nothing(ranks, workshop, tmp_path, architecture):  # noqa: F811
    """Bit for bit: losses with dropout after evaluations of either way, or of none, and the figures themselves."""
    model = save_small(small_model(architecture, dropout=0.1), tmp_path / "model")
    pooling = "last" if architecture.startswith("qwen") else "mean"
    common = [*options(workshop, tmp_path, "train.steps=4"), f"model.path={model}", f"model.pooling={pooling}"]
    found = {}
    for name, more in {
        "never": ["evaluation.sets=[]"],
        "block": ["evaluation.every=1", "evaluation.at_start=true"],
        "whole": ["evaluation.every=1", "evaluation.at_start=true", "evaluation.unshard=model"],
    }.items():
        ranks(2, run, *common, *more, f"output_dir={tmp_path / name}")
        found[name] = losses(tmp_path / name), figures(tmp_path / name)
    assert found["never"][0] == found["block"][0] == found["whole"][0]
    assert found["block"][1] == found["whole"][1]
    assert list(found["whole"][1]) == [0, 1, 2, 3, 4]


def every_kind(folder: Path) -> list[str]:
    """A set of each kind, in files, as the entries of `evaluation.sets`."""
    folder.mkdir()
    texts = [text(i, 2 + i % 5) for i in range(24)]
    pairs = list(zip(texts[:12], texts[12:], strict=True))

    def table(name: str, rows: list[dict[str, object]]) -> str:
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    table("topics/train", [{"text": t, "label": i % 3} for i, t in enumerate(texts)])
    table("topics/test", [{"text": t + " mu", "label": i % 3} for i, t in enumerate(texts)])
    return [
        table("sts", [{"sentence1": a, "sentence2": b, "score": i % 5} for i, (a, b) in enumerate(pairs)]),
        table("same", [{"sentence1": a, "sentence2": b, "label": i % 2} for i, (a, b) in enumerate(pairs)]),
        table("bitext", [{"sentence1": a, "sentence2": b} for a, b in pairs]),
        table(
            "rerank", [{"query": a, "positive": [b], "negative": texts[i : i + 3]} for i, (a, b) in enumerate(pairs)]
        ),
        table("clusters", [{"sentences": t, "labels": i % 4} for i, t in enumerate(texts)]),
        str(folder / "topics"),
    ]


def test_every_kind_of_set_leaves_training_as_it_was(ranks, workshop, tmp_path):  # noqa: F811
    """Bit for bit with dropout, although some kinds draw at random; the same figures on two and on three ranks."""
    sets = [*every_kind(tmp_path / "sets"), str(workshop / "dev")]
    common = ("train.steps=3", "evaluation.every=1", "evaluation.at_start=true")
    ranks(2, run, *options(workshop, tmp_path / "plain", *common, model="dropout"))
    for size in (2, 3):
        more = (*common, f"evaluation.sets=[{','.join(sets)}]")
        ranks(size, run, *options(workshop, tmp_path / str(size), *more, model="dropout"))
    assert losses(tmp_path / "2") == losses(tmp_path / "plain")
    at_start = [[row for row in rows(tmp_path / size) if row.get("step") == 0] for size in ("2", "3")]
    assert at_start[0] == at_start[1]
    names = {"sts", "same", "bitext", "rerank", "clusters", "topics", "dev", "mean"}
    assert {row["set"] for row in at_start[0]} == names
    assert all(math.isfinite(value) for row in at_start[0] for value in row.values() if isinstance(value, float))


def test_the_best_by_the_mean_of_several_sets(ranks, workshop, tmp_path):  # noqa: F811
    write_beir(tmp_path / "other", 12)
    sets = f"evaluation.sets=[{workshop / 'dev'},{tmp_path / 'other'}]"
    common = ("train.steps=2", "evaluation.every=1", sets, "checkpoint.best_metric=mean/ndcg@10")
    ranks(2, run, *options(workshop, tmp_path / "run", *common))
    of = {row["set"]: row for row in rows(tmp_path / "run") if row.get("set") and row["step"] == 2}
    assert of["mean"]["ndcg@10"] == pytest.approx((of["dev"]["ndcg@10"] + of["other"]["ndcg@10"]) / 2)
