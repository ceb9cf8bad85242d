"""What a run of an earlier version saved is read with the options of this version."""

import copy
import json
import re
import zlib
from pathlib import Path

import pytest
import yaml

from embedtrain.config.compose import load_recipe, to_plain
from embedtrain.config.losses import CombinedConfig, InfoNCEConfig, LossConfig, MatryoshkaConfig, OrthogonalConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import Recipe
from embedtrain.config.saved_recipe import current_identity, current_recipe
from embedtrain.training.schedule import LearningRate
from tests.runs import losses, options, rewind_run, run

LOSS_BEFORE = {
    "matryoshka_dims": None,
    "matryoshka_weights": None,
    "matryoshka_weighting": "uniform",
    "matryoshka_per_step": None,
    "precisions": None,
    "precision_weights": None,
    "precisions_per_step": None,
    "precision_warmup": 0.0,
    "precision_sides": "both",
    "matryoshka_layers": None,
    "layers_per_step": None,
    "layer_weights": None,
    "layer_weighting": "uniform",
    "layer_kl": 0.0,
}
NO_SECTIONS = {"late_interaction": {"dim": None}, "m3": {"dim": None}, "sparse": {"pooling": None, "queries": None}}
OF_RERANKERS = {"pair_template": None, "score_head": "auto", "score_tokens": None, "score_labels": None}


def saved_before(loss: LossConfig, **model: object) -> dict[str, dict]:
    """A recipe.yaml of an earlier version: it had these options of all kinds and losses."""
    saved = to_plain(Recipe(loss=loss))
    saved["loss"].pop("matryoshka")
    saved["loss"] |= LOSS_BEFORE
    saved["model"] |= {"path": "a/b", **OF_RERANKERS, **copy.deepcopy(NO_SECTIONS), **model}
    saved["optim"] |= {"min_lr": None, "min_lr_ratio": None, "loss_lr": None, "head_lr": None}
    saved["tracking"].pop("wandb_init")
    names = ("mode", "entity", "group", "name", "notes")
    saved["tracking"] |= {**{f"wandb_{name}": None for name in names}, "wandb_project": "embedtrain", "wandb_tags": []}
    saved["data"]["train"] = [{"path": "a.jsonl", "loss": None, "temperature": None, "in_batch_negatives": None}]
    saved["train"]["steps"] = 10
    return saved


def read(tmp_path, saved) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(saved))
    return load_recipe(path)


@pytest.mark.parametrize(
    ("kind", "before", "options"),
    [
        ("dense", {"pooling": "cls"}, {"pooling": "cls"}),
        ("cross_encoder", {"score_head": "tokens", "score_tokens": ["yes", "no"]}, {"score_tokens": ["yes", "no"]}),
        (
            "late_interaction",
            {"late_interaction": {"dim": 64, "query_length": 32}},
            {"dimension": 64, "query_length": 32},
        ),
        ("sparse", {"sparse": {"pooling": "max", "queries": "static"}}, {"pooling": "max", "queries": "static"}),
        ("m3", {"m3": {"dim": 16, "hybrid_weights": [1.0, 0.3, 1.0]}}, {"dimension": 16}),
    ],
)
def test_options_of_a_kind(tmp_path, kind, before, options):
    saved = saved_before(InfoNCEConfig(temperature=0.1), kind=kind, **before)
    if kind == "m3":
        saved["loss"] = {"name": "m3", **LOSS_BEFORE}
    if kind == "cross_encoder":
        saved["loss"] = {"name": "softmax", **LOSS_BEFORE}
        saved["data"]["batch_negatives"] = 2
    recipe = read(tmp_path, saved)
    model = to_plain(recipe.model)
    assert model["kind"] == kind
    assert {name: model[name] for name in options} == options


def test_what_a_loss_is_trained_on_besides_whole_vectors(tmp_path):
    saved = saved_before(InfoNCEConfig(), pooling="cls")
    saved["loss"] |= {"matryoshka_dims": [32, 16], "matryoshka_weights": [1.0, 0.5], "precisions": ["float", "int8"]}
    expected = MatryoshkaConfig(dims=[32, 16], dim_weights=[1.0, 0.5], precisions=["float", "int8"])
    assert to_plain(read(tmp_path, saved).loss.matryoshka) == to_plain(expected)


def test_parts_of_a_combined_loss(tmp_path):
    saved = saved_before(CombinedConfig(), pooling="cls")
    part = {"name": "infonce", **LOSS_BEFORE, "matryoshka_dims": [8], "matryoshka_layers": [1]}
    saved["loss"]["losses"] = [part, {"name": "infonce", **LOSS_BEFORE, "temperature": 0.2}]
    recipe = read(tmp_path, saved)
    assert isinstance(recipe.loss, CombinedConfig)
    assert [part.matryoshka for part in recipe.loss.losses] == [
        MatryoshkaConfig(dims=[8], layers=[1]),
        MatryoshkaConfig(),
    ]


def test_the_temperature_of_a_source_is_one_of_its_loss(tmp_path):
    saved = saved_before(InfoNCEConfig(margin=0.1), pooling="cls")
    saved["data"]["train"].append({"path": "b.jsonl", "loss": None, "temperature": 0.07, "in_batch_negatives": False})
    first, second = read(tmp_path, saved).data.train
    assert first.loss is None
    assert second.loss == InfoNCEConfig(margin=0.1, temperature=0.07)
    assert second.in_batch_negatives is False


def test_the_temperature_of_a_source_is_one_of_each_part_that_has_one(tmp_path):
    saved = saved_before(CombinedConfig(), pooling="cls")
    saved["loss"]["losses"] = [{"name": "infonce", **LOSS_BEFORE}, {"name": "orthogonal", **LOSS_BEFORE, "weight": 0.5}]
    saved["data"]["train"][0]["temperature"] = 0.07
    recipe = read(tmp_path, saved)
    (source,) = recipe.data.train
    assert source.loss.losses == [InfoNCEConfig(temperature=0.07), OrthogonalConfig(weight=0.5)]
    assert recipe.loss.losses[0] == InfoNCEConfig()


def test_the_floor_of_the_learning_rate_is_the_ratio_that_one_writes():
    assert current_recipe({"optim": {"lr": 2e-5, "min_lr": 2e-6}})["optim"] == {"lr": 2e-5, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("before", "ratio"), [({}, 0.0), ({"min_lr": 1e-4}, 0.1), ({"min_lr_ratio": 0.2}, 0.2), ({"min_lr": 0.0}, 0.0)]
)
def test_the_floor_of_the_learning_rate_is_the_same(tmp_path, before, ratio):
    saved = saved_before(InfoNCEConfig(), pooling="cls")
    saved["optim"] |= {"lr": 1e-3, "schedule": "cosine", **before}
    recipe = read(tmp_path, saved)
    assert recipe.optim.min_lr_ratio == pytest.approx(ratio)
    assert LearningRate(recipe.optim, 10)(10) == pytest.approx(before.get("min_lr", ratio * 1e-3))


def test_learning_rates_of_the_loss_and_of_heads_are_groups(tmp_path):
    saved = saved_before(InfoNCEConfig(), pooling="cls")
    saved["optim"] |= {"loss_lr": 1e-2, "head_lr": 1e-3, "groups": [{"match": "norm", "lr": 0.0}]}
    groups = read(tmp_path, saved).optim.groups
    assert [(group.name, group.lr) for group in groups] == [(None, 0.0), ("loss", 1e-2), ("head", 1e-3)]
    names = ("backbone.layer.0.weight", "dense.0.linear.weight", "loss.temperature", "backbone.head_norm")
    names += ("query_weights.weight",)  # of static queries, which had their own learning rate
    matched = [next((g.name for g in groups[1:] if re.search(g.match, name)), None) for name in names]
    assert matched == [None, "head", "loss", None, None]


def test_arguments_of_wandb(tmp_path):
    saved = saved_before(InfoNCEConfig(), pooling="cls")
    assert read(tmp_path, saved).tracking.wandb_init is None
    saved["tracking"] |= {"wandb_group": "g", "wandb_tags": ["a"], "wandb_project": "mine"}
    assert read(tmp_path, saved).tracking.wandb_init == {"group": "g", "tags": ["a"], "project": "mine"}


def test_a_recipe_of_this_version_stays_as_it_is():
    for loss in (InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[8])), CombinedConfig(losses=[InfoNCEConfig()])):
        recipe = Recipe(loss=loss, optim=OptimConfig(min_lr_ratio=0.3))
        recipe.tracking.wandb_init = {"group": "g"}
        assert current_recipe(to_plain(recipe)) == to_plain(recipe)


def test_damaged_values_stay_for_the_reader_to_reject():
    saved = {"model": [], "loss": "x", "optim": None, "data": {"train": [3, {"loss": 5}]}, "tracking": 1}
    assert current_recipe(saved) == {**saved, "data": {"train": [3, {"loss": 5}]}}
    assert current_recipe({"model": {"kind": "late_interaction", "late_interaction": 4}})["model"] == {
        "kind": "late_interaction"
    }
    assert current_identity({"data.train": 3, "loss": None}) == {"data.train": 3, "loss": None}


def as_saved_before(loss: dict) -> dict:
    """The options of a loss without a section."""
    names = {"dims": "matryoshka_dims", "dim_weights": "matryoshka_weights", "dim_weighting": "matryoshka_weighting"}
    names |= {"dims_per_step": "matryoshka_per_step", "layers": "matryoshka_layers"}
    section = loss.pop("matryoshka")
    return loss | {names.get(name, name): value for name, value in section.items()}


def write_as_before(output_dir: Path) -> None:
    """Give the checkpoints of a run and its recipe.yaml the options that they had."""
    for path in output_dir.glob("checkpoints/*/checkpoint.json"):
        manifest = json.loads(path.read_text())
        manifest.pop("crc32")
        manifest["identity"]["loss"] = as_saved_before(manifest["identity"]["loss"])
        saved = manifest["recipe"]
        saved["loss"] = as_saved_before(saved["loss"])
        groups, ratio = saved["optim"].pop("groups"), saved["optim"].pop("min_lr_ratio")
        assert [group["name"] for group in groups] == ["loss"]
        saved["optim"] |= {"groups": [], "loss_lr": groups[0]["lr"], "head_lr": None}
        saved["optim"] |= {"min_lr": ratio * saved["optim"]["lr"], "min_lr_ratio": None}
        saved["model"] |= {**OF_RERANKERS, **NO_SECTIONS}
        manifest["identity"] |= {f"model.{name}": value for name, value in {**OF_RERANKERS, **NO_SECTIONS}.items()}
        manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        path.write_text(json.dumps(manifest))
        (output_dir / "recipe.yaml").write_text(yaml.safe_dump(saved))


def test_a_run_of_an_earlier_version_is_resumed(ranks, run_inputs, tmp_path):
    of_loss = "optim.groups=[{match: '^loss\\.', name: loss, lr: 0.01}]"
    more = "loss.learn_temperature=true", "loss.matryoshka.dims=[8,4]", "optim.min_lr_ratio=0.5", of_loss
    more += "train.steps=4", "checkpoint.every=2", "checkpoint.keep=2"
    ranks(2, run, *options(run_inputs, tmp_path / "whole", *more))
    rewind_run(tmp_path / "whole", tmp_path / "resumed", 2)
    write_as_before(tmp_path / "resumed")
    output, _ = ranks(2, run, *options(run_inputs, tmp_path / "resumed", *more))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert "step-00000002, written by 2 ranks" in output
    (change,) = (line for line in output.splitlines() if "changed since step" in line)
    assert "without effect on training: output_dir" in change
    assert "," not in change.partition("output_dir")[2]  # nothing else
