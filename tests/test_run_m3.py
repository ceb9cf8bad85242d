"""Whole runs of models of three representations (BGE-M3): trained, evaluated, exported, resumed and searched."""

import json
from pathlib import Path

import pytest
import torch

from embedtrain import evaluate, load_encoder
from embedtrain.config.compose import compose_recipes
from embedtrain.errors import ConfigError
from embedtrain.formats.flag_embedding import LAYERS
from embedtrain.formats.source import open_model_source
from tests.commands import call
from tests.models.test_m3 import save_m3
from tests.ranks import RankFailed
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import model_options, save_small, small_model, text, write_beir, write_rows
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
        "model.kind=m3", "model.dimension=8", "loss=m3", f"model.path={inputs / 'model'}",
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
    resumed = rewind_run(runs[2], tmp_path / "resumed", 2)
    ranks(1, run, *options(inputs, resumed, *common))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)

    model = runs[2] / "model"
    for name in LAYERS:
        state = torch.load(model / f"{name}.pt", weights_only=True)
        assert set(state) == {"weight", "bias"} and (model / f"{name}.safetensors").is_file()
    source = open_model_source(model_options(path=str(model), kind="m3"))
    assert source.kind.name == "m3" and not source.has_new_head and source.settings.token_dimension == 8
    reported = evaluate(model, [str(inputs / "dev")], precision="fp32", quiet=True)
    assert {name: reported[name]["ndcg@10"] for name in ROWS} == pytest.approx(measured, abs=1e-6)
    lexical = evaluate(model, [str(inputs / "dev")], precision="fp32", quiet=True, hybrid_weights=[0, 1, 0])
    assert lexical["dev"] == reported["dev@lexical"]


@pytest.mark.slow
def test_adapters_are_trained_beside_both_layers(ranks, inputs, tmp_path):
    """Resumed on another number of ranks, and merged: the exported model has the metrics of the run."""
    arguments = ["model.lora.rank=2", "checkpoint.every=2", "model.lora.modules_to_save=[norms]"]
    output_dir, resumed = tmp_path / "run", tmp_path / "resumed"
    ranks(2, run, *options(inputs, output_dir, *arguments))
    ranks(1, run, *options(inputs, rewind_run(output_dir, resumed, 2), *arguments))
    assert losses(resumed) == pytest.approx(losses(output_dir), rel=1e-4)
    rows = [row for row in metric_rows(output_dir) if "set" in row]
    measured = {row["set"]: row["ndcg@10"] for row in rows if row["step"] == rows[-1]["step"]}
    reported = evaluate(output_dir / "model", [str(inputs / "dev")], precision="fp32", quiet=True)
    assert {name: reported[name]["ndcg@10"] for name in ROWS} == pytest.approx(measured, abs=1e-6)


@pytest.mark.slow
def test_search_and_load_encoder(inputs, tmp_path):
    """The layers of a new model are those of a seed; the scores are the weighted sum of those of FlagEmbedding."""
    model, _ = save_m3(tmp_path / "model")
    corpus = {f"d{i}": text(i, 3 + i) for i in range(6)}
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": name, "text": words}) + "\n" for name, words in corpus.items()))
    query = "alpha beta gamma"
    with load_encoder(model, quiet=True, precision="fp32") as loaded:
        names = "sentence_embedding", "lexical_weights", "token_embeddings"
        encoded = {name: loaded.encode([query, *corpus.values()], output_value=name) for name in names}
    dense, lexical, tokens = (encoded[name] for name in names)
    scores: dict[str, list[float]] = {}
    for number, name in enumerate(corpus, 1):
        shared = sum(weight * lexical[number].get(token, 0.0) for token, weight in lexical[0].items())
        multi = (tokens[0] @ tokens[number].T).amax(dim=1).mean().item()
        scores[name] = [float(dense[0] @ dense[number]), shared, multi]
    arguments = [f"model={model}", f"corpus={path}", f"query={query}", "top_k=3", "precision=fp32"]
    for weights, option in (((1, 0.3, 1), []), ((0, 2, 0.5), ["hybrid_weights=[0,2,0.5]"])):
        expected = {name: sum(w * score for w, score in zip(weights, scores[name], strict=True)) for name in corpus}
        printed = call("search", *arguments, *option)
        best = sorted(expected, key=lambda name: -expected[name])[:3]
        lines = [line.split()[:2] for line in printed.splitlines() if line.split()[1:2] in [[name] for name in corpus]]
        assert lines == [[f"{expected[name]:.3f}", name] for name in best]


def test_weights_of_scores_are_for_models_of_three(inputs, tmp_path):
    model, _ = save_m3(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^hybrid_weights=\[1\.0,-1\.0,1\.0\]: "):
        evaluate(model, [str(inputs / "dev")], quiet=True, hybrid_weights=[1, -1, 1])
    with pytest.raises(ConfigError, match=r"^hybrid_weights=\[1\.0,1\.0,1\.0\]: "):
        evaluate(model, [str(inputs / "dev")], quiet=True, hybrid_weights=[1, 1, 1], pooling="cls")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("loss=infonce", r"loss=infonce: .*loss=m3"),
        ("loss.matryoshka.dims=[4]", r"loss\.matryoshka\.dims"),
        ("loss.loss_weights=[1,1]", r"loss\.loss_weights=\[1\.0, ?1\.0\]: must be 4"),
        ("loss.kd_loss_type=mse", r"loss\.kd_loss_type.*m3_kd_loss"),
        ("model.hybrid_weights=[1,2]", r"model\.hybrid_weights"),
        ("export.formats=[adapter]", r"export\.formats=\[adapter\]: .*"),
        ("evaluation.index.dtype=bf16", r"evaluation\.index\.dtype=bf16: .*fp32"),
        ("model.kind=dense", r"model\.dimension=8: is for model\.kind=late_interaction or m3"),
    ],
)
def test_options_that_cannot_work_are_rejected(inputs, tmp_path, option, message):
    given = [*BASE, *options(inputs, tmp_path / "run"), option]
    names = [name.partition("=")[0] for name in given]
    last = [value for index, value in enumerate(given) if names[index] not in names[index + 1 :]]
    with pytest.raises(ConfigError, match=message):
        compose_recipes(last)


def test_a_teachers_scores_and_rows_without_in_batch_negatives(ranks, inputs, tmp_path):
    """As in FlagEmbedding: a batch of scored rows, and one of rows in a folder whose name excludes other documents."""
    scored, alone = tmp_path / "scored.jsonl", tmp_path / "no_in_batch_neg"
    alone.mkdir()
    rows = [
        {"query": text(i, 4), "pos": [text(i + 1, 6)], "neg": [text(i + 2, 5), text(i + 3, 7)]}
        | {"pos_scores": [3.0], "neg_scores": [1.0, 0.5]}
        for i in range(26)
    ]
    for path in (scored, alone / "rows.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output_dir = tmp_path / "run"
    data = f"data.train=[{scored},{alone / 'rows.jsonl'}]"
    ranks(2, run, *options(inputs, output_dir, "loss.kd_loss_type=m3_kd_loss", data, "evaluation.sets=[]"))
    assert all(loss > 0 for loss in losses(output_dir))
    with pytest.raises(RankFailed, match=r"train\.jsonl:1: loss=m3 .*pos_scores"):
        ranks(1, run, *options(inputs, tmp_path / "without", "loss.kd_loss_type=m3_kd_loss"))
