"""Evaluation within whole runs: early stopping, ways of gathering weights, sets of every kind."""

import json
import math
import re
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import load_model
from tests.runs import evaluation_metrics, losses, metric_rows, options, run
from tests.small import model_options, parallel, save_small, small_model, text, write_beir

# Any model finds the document of each query among twenty, so recall@100 never exceeds 1.
EARLY_STOPPING = (
    "train.steps=12", "evaluation.every=2", "checkpoint.every=4", "checkpoint.best_metric=dev/recall@100",
    "evaluation.patience=2",
)  # fmt: skip


def test_training_stops_when_evaluation_does_not_improve(ranks, run_inputs, tmp_path):
    output, _ = ranks(2, run, *options(run_inputs, tmp_path, *EARLY_STOPPING))
    reason = "2 evaluations without a better dev/recall@100 than 1.0000 at step 2 (evaluation.patience)"
    assert f"stopped at step 6 of 12: {reason}" in output
    assert "exporting step 2, the best by dev/recall@100 (1.0000)" in output
    assert list(losses(tmp_path)) == list(range(1, 7))

    (output,) = ranks(1, run, *options(run_inputs, tmp_path, *EARLY_STOPPING))
    assert f"stopped at step 6 of 12: {reason}" in output
    assert "trained" not in output
    assert list(losses(tmp_path)) == list(range(1, 7))

    (output,) = ranks(1, run, *options(run_inputs, tmp_path, *EARLY_STOPPING[:-1], "evaluation.patience=4"))
    assert "stopped at step 10 of 12: 4 evaluations" in output, "evaluations before the restart count"
    assert list(losses(tmp_path)) == list(range(1, 11))


@pytest.mark.slow
def test_patience_survives_a_restart(ranks, run_inputs, tmp_path):
    ranks(2, run, *options(run_inputs, tmp_path, "train.steps=4", *EARLY_STOPPING[1:], "optim.schedule=constant"))
    assert metric_rows(tmp_path)[-1]["step"] == 4
    output, _ = ranks(2, run, *options(run_inputs, tmp_path, *EARLY_STOPPING, "optim.schedule=constant"))
    assert "stopped at step 6 of 12" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["xlm-roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]
)
def test_gathering_weights_by_model_or_layer_changes_nothing(ranks, run_inputs, tmp_path, architecture):
    """Bit for bit: losses with dropout after evaluations of either way or none, and the metrics."""
    model = save_small(small_model(architecture, dropout=0.1), tmp_path / "model")
    pooling = "last" if architecture.startswith("qwen") else "mean"
    common = [*options(run_inputs, tmp_path, "train.steps=4"), f"model.path={model}", f"model.pooling={pooling}"]
    results = {}
    for name, more in {
        "never": ["evaluation.sets=[]"],
        "layer": ["evaluation.every=1", "evaluation.at_start=true"],
        "model": ["evaluation.every=1", "evaluation.at_start=true", "evaluation.unshard=model"],
    }.items():
        ranks(2, run, *common, *more, f"output_dir={tmp_path / name}")
        results[name] = losses(tmp_path / name), evaluation_metrics(tmp_path / name)
    assert results["never"][0] == results["layer"][0] == results["model"][0]
    assert results["layer"][1] == results["model"][1]
    assert list(results["model"][1]) == [0, 1, 2, 3, 4]


def write_sets_of_every_kind(folder: Path) -> list[str]:
    """Write one set of each kind; the entries of `evaluation.sets`."""
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


@pytest.mark.slow
def test_no_kind_of_set_affects_training(ranks, run_inputs, tmp_path):
    """Bit for bit with dropout, although some kinds are random; the same metrics on two and three ranks."""
    sets = [*write_sets_of_every_kind(tmp_path / "sets"), str(run_inputs / "dev")]
    common = ("train.steps=3", "evaluation.every=1", "evaluation.at_start=true")
    ranks(2, run, *options(run_inputs, tmp_path / "plain", *common, model="dropout"))
    for size in (2, 3):
        more = (*common, f"evaluation.sets=[{','.join(sets)}]")
        ranks(size, run, *options(run_inputs, tmp_path / str(size), *more, model="dropout"))
    assert losses(tmp_path / "2") == losses(tmp_path / "plain")
    at_start = [[row for row in metric_rows(tmp_path / size) if row.get("step") == 0] for size in ("2", "3")]
    assert at_start[0] == at_start[1]
    names = {"sts", "same", "bitext", "rerank", "clusters", "topics", "dev", "mean"}
    assert {row["set"] for row in at_start[0]} == names
    assert all(math.isfinite(value) for row in at_start[0] for value in row.values() if isinstance(value, float))


def test_the_best_by_the_mean_of_several_sets(ranks, run_inputs, tmp_path):
    write_beir(tmp_path / "other", 12)
    sets = f"evaluation.sets=[{run_inputs / 'dev'},{tmp_path / 'other'}]"
    common = ("train.steps=2", "evaluation.every=1", sets, "checkpoint.best_metric=mean/ndcg@10")
    ranks(2, run, *options(run_inputs, tmp_path / "run", *common))
    rows = {row["set"]: row for row in metric_rows(tmp_path / "run") if row.get("set") and row["step"] == 2}
    assert rows["mean"]["ndcg@10"] == pytest.approx((rows["dev"]["ndcg@10"] + rows["other"]["ndcg@10"]) / 2)


def test_a_model_with_matryoshka_dims_is_evaluated_and_exported_at_them(ranks, run_inputs, tmp_path):
    """At those of its loss by default, and in another run at none; the run also measures compressed vectors."""
    form = "evaluation.vectors=[{dims: 8, documents: binary, rescore: {times: 2}}]"
    common = ("train.steps=1", "loss.matryoshka.dims=[12,4]", "checkpoint.best_metric=dev@4/ndcg@10")
    export = ("export.truncate_dim=4", "export.check=true", "tracking.report=true")
    output, _ = ranks(2, run, *options(run_inputs, tmp_path / "run", *common, form, *export))
    rows = {row["set"]: row for row in metric_rows(tmp_path / "run") if "set" in row}
    assert list(rows) == ["dev", "dev@12", "dev@4", "dev@8-binary-x2"]
    assert rows["dev@8-binary-x2"]["dataset"]["vectors"] == {
        "label": "8-binary-x2", "bytes": 1, "rescore_bytes": 32,
    }  # fmt: skip
    value = f"{rows['dev@8-binary-x2']['ndcg@10']:.4f}"
    assert re.search(rf"dev +8-binary-x2 +1 +128x +32 +{value}", output)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| dev | 8-binary-x2 | 1 | 128x | 32 | ndcg@10 {value} |" in card
    assert f"8-binary-x2: 1 bytes, {value}" in (tmp_path / "run" / "report.html").read_text()
    assert rows["dev@4"]["dataset"]["dimension"] == 4
    texts = ["alpha beta", "gamma"]
    model = SentenceTransformer(str(tmp_path / "run" / "model"))
    assert model.encode(texts).shape == (2, 4)
    (evaluated,) = ranks(1, evaluated_export, tmp_path / "run" / "model", run_inputs / "dev", texts)
    assert evaluated[0] == pytest.approx(rows["dev@4"]["ndcg@10"], abs=1e-6)
    assert evaluated[1] == pytest.approx(model.encode(texts), abs=1e-5)

    ranks(2, run, *options(run_inputs, tmp_path / "none", *common[:2], "evaluation.truncate_dims=[]"))
    assert [row["set"] for row in metric_rows(tmp_path / "none") if "set" in row] == ["dev"]
    for option, value in (("evaluation.truncate_dims", "[4000]"), ("export.truncate_dim", "4000")):
        with pytest.raises(AssertionError, match=rf"ConfigError: {re.escape(option)}: 4000 "):
            ranks(1, run, *options(run_inputs, tmp_path / "no", "train.steps=1", f"{option}={value}"))


def evaluated_export(world, directory, dev, texts):
    """nDCG of a model directory, and its vectors, as commands load it."""
    model = load_model(model_options(path=str(directory)), parallel(), world, seed=0, work=None)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=100)
    sets = load_sets([EvaluationSet(path=str(dev))], world)
    return Evaluator(sets, encoder, world).evaluate()["dev"]["ndcg@10"], encoder.encode_all(texts).tolist()
