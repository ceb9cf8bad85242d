"""A whole run with losses on several layers: stopped and resumed, and pruned to its first layers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from embedtrain.commands.prune import compose
from embedtrain.commands.prune import run as main
from embedtrain.distributed.world import World
from tests.runs import losses, metric_rows, run_without_base
from tests.small import batch, save_small, small_model

TEXTS = ["alpha", "beta gamma delta", "kappa lambda mu nu " * 3]


def run(world: World, *arguments: str) -> str:
    """Train like the command; the standard output of this rank."""
    return run_without_base(world, *arguments)[0]


def drawn_layers(output_dir: Path) -> list[list[str]]:
    """The metrics of layers in each step."""
    rows = [row for row in metric_rows(output_dir) if "loss" in row]
    return [sorted(name for name in row if name.startswith(("loss@layer", "kl@layer"))) for row in rows]


def test_a_run_is_resumed_and_pruned(ranks, tmp_path):
    """Drawn layers of a resumed run are those of the whole one; the model of the first layers has their vectors."""
    small = small_model("modernbert")
    assert small.config is not None
    model = save_small(replace(small, config=small.config | {"num_hidden_layers": 4}), tmp_path / "model")
    rows = [{"query": row.query, "pos": list(row.documents.texts)} for row in batch(26).rows]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [
        "name=t", f"model.path={model}", "model.pooling=mean", f"data.train=[{tmp_path / 'train.jsonl'}]",
        "train.steps=6", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=60",
        "checkpoint.every=3", "checkpoint.keep=9", "parallel.strategy=fsdp", "parallel.precision=fp32", "optim.lr=1e-3",
        "loss.matryoshka.dims=[32,16,8]", "loss.matryoshka.dims_per_step=2",
        "loss.matryoshka.layers=[1,2,3]", "loss.matryoshka.layers_per_step=1", "loss.matryoshka.layer_kl=0.5",
        "loss.temperature=0.2", "tracking.report=false",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    ranks(2, run, *options, f"output_dir={whole}")
    layers = drawn_layers(whole)
    assert all(len(names) == 2 for names in layers)
    assert len({names[0] for names in layers}) > 1, "layers are drawn for each batch"
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    ranks(2, run, *options, f"output_dir={resumed}")
    assert drawn_layers(resumed) == layers
    assert losses(resumed) == losses(whole)
    pruned = main(compose([f"model={whole / 'model'}", "keep=2", "select=first", f"output_dir={tmp_path / 'pruned'}"]))
    trained = SentenceTransformer(str(whole / "model"), device="cpu")
    actual = SentenceTransformer(str(pruned), device="cpu").encode(TEXTS, convert_to_tensor=True)
    for text, vector in zip(TEXTS, actual, strict=True):
        inputs = trained.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = trained[0].auto_model(**inputs, output_hidden_states=True).hidden_states[2]
            expected_vector = F.normalize(trained[0].auto_model.final_norm(hidden)[0].mean(0), dim=0)
        torch.testing.assert_close(vector, expected_vector, atol=2e-6, rtol=0)
