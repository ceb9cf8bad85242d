"""Whole runs of models of three representations (BGE-M3): trained, evaluated, exported, resumed and searched."""

from pathlib import Path

import pytest
import torch

from embedtrain import evaluate
from embedtrain.config.m3 import M3Settings
from embedtrain.config.recipe import ModelConfig, ModelKind
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.m3 import M3Score
from embedtrain.models.m3_files import LAYERS
from embedtrain.models.source import open_model_source
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import save_small, small_model, write_beir, write_rows
from tests.test_run_losses import BASE as OPTIONS

BASE = [option for option in OPTIONS if not option.startswith(("model.pooling", "export.check"))]
ROWS = ["dev", "dev@dense", "dev@lexical", "dev@multi_vector"]


def run(world, *arguments):
    return run_without_base(world, *BASE, *arguments)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    write_rows(folder / "train.jsonl", 26)
    write_beir(folder / "dev", 6)
    save_small(small_model("xlm-roberta"), folder / "model")
    return folder


def options(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        "model.kind=m3", "model.m3.dim=8", "loss=m3", f"model.path={inputs / 'model'}",
        f"data.train=[{inputs / 'train.jsonl'}]", f"evaluation.sets=[{inputs / 'dev'}]", f"output_dir={output_dir}",
        *more,
    ]  # fmt: skip


def test_trained_evaluated_exported_resumed_and_searched(ranks, inputs, tmp_path):
    common = ["loss.self_distillation_start_step=2", "checkpoint.every=2", "checkpoint.best_metric=dev@lexical/ndcg@10"]
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, output_dir in runs.items():
        ranks(size, run, *options(inputs, output_dir, *common))
    first, second = (metric_rows(output_dir) for output_dir in runs.values())
    for left, right in zip(first, second, strict=True):
        assert left["step"] == right["step"] and left.get("set") == right.get("set")
        for name in ("loss", "grad_norm", "ce/lexical", "ndcg@10"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4)
    measured = {row["set"]: row["ndcg@10"] for row in first if "set" in row}
    assert list(measured) == ROWS
    resumed = rewind_run(runs[1], tmp_path / "resumed", 2)
    ranks(2, run, *options(inputs, resumed, *common))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)

    model = runs[2] / "model"
    for name in LAYERS:
        state = torch.load(model / f"{name}.pt", weights_only=True)
        assert set(state) == {"weight", "bias"} and (model / f"{name}.safetensors").is_file()
    source = open_model_source(ModelConfig(path=str(model), kind=ModelKind.m3))
    assert source.m3 is not None and not source.has_new_head and source.m3.token_dimension == 8
    reported = evaluate(model, [str(inputs / "dev")], precision="fp32", quiet=True)
    assert {name: reported[name]["ndcg@10"] for name in ROWS} == pytest.approx(measured, abs=1e-6)


def scores(settings: M3Settings, encoded: list[Part]) -> torch.Tensor:
    """Of all pairs of a query and a document."""
    queries, documents = encoded
    owners = torch.arange(len(queries)).repeat_interleave(len(documents))
    columns = torch.arange(len(documents)).repeat(len(queries))
    score = M3Score(settings)
    prepared = [score.prepare(Encoded((part,))) for part in (queries, documents.take(columns, columns.numpy()))]
    return score.compare(*prepared, owners, None).view(len(queries), -1)
