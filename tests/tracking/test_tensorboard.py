"""TensorBoard event files, read back with TensorBoard: one history over restarts."""

import sys

import pytest
import torch

from embedtrain.config.recipe import Recipe, TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.metrics import DatasetInfo, read_metrics
from embedtrain.tracking.tracker import Tracker

pytest.importorskip("tensorboard")

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
RECIPE = Recipe(name="tiny", tracking=TrackingConfig(tensorboard=True))


def run(run_dir, steps, resumed_step=None, scale=1.0):
    with Tracker.open(RECIPE, WORLD, run_dir, resumed_step=resumed_step) as tracker:
        for step in steps:
            tracker.step({"step": step, "loss": scale * step, "lr": 1e-3})
        metrics = {"ndcg@10": steps[-1] / 10}
        tracker.set_evaluated(steps[-1], "dev", metrics, DatasetInfo("retrieval", {"queries": 4}, subset=False))
        tracker.evaluation(steps[-1], {"dev": metrics})


def read_events(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    tags = events.Tags()
    scalars = {tag: {event.step: round(event.value, 6) for event in events.Scalars(tag)} for tag in tags["scalars"]}
    return scalars, tags["tensors"]


def test_steps_evaluations_and_the_recipe_are_written(tmp_path):
    run(tmp_path, [1, 2])
    scalars, texts = read_events(tmp_path)
    assert scalars["train/loss"] == {1: 1.0, 2: 2.0}
    assert scalars["dev/ndcg@10"] == {2: 0.2}
    assert {"train/lr", "train/memory_gib"} <= scalars.keys()
    assert texts == ["recipe/text_summary"]


def test_a_resumed_run_replaces_later_steps_and_a_new_one_replaces_all(tmp_path):
    run(tmp_path, [1, 2, 3, 4])
    run(tmp_path, [3, 4, 5], resumed_step=2, scale=10.0)
    assert read_events(tmp_path)[0]["train/loss"] == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0}
    run(tmp_path, [1, 2], scale=100.0)
    assert read_events(tmp_path)[0]["train/loss"] == {1: 100.0, 2: 200.0}


def test_without_the_package_a_warning_says_what_to_install(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run(tmp_path, [1, 2])
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: TensorBoard could not be started")
    assert warnings[0].endswith("pip install '.[tensorboard]'"), "the command for a checkout"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
