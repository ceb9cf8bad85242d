"""The tracker: only rank 0 prints and writes, one history over restarts, and wandb that works or fails."""

import contextlib
import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from embedtrain.config.recipe import Recipe, TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.metrics import DatasetInfo, MetricsFile, read_metrics
from embedtrain.tracking.tracker import Tracker

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
DATASET = DatasetInfo("retrieval", {"queries": 4}, subset=False)


def fake_wandb(**failures):
    """A module that records its calls; `init=RuntimeError("...")` makes that function raise."""
    module = types.ModuleType("wandb")
    module.inits, module.rows, module.finished, module.uploaded, module.summary = [], [], [], [], {}

    def failing(name, action):
        def call(*args, **kwargs):
            if name in failures:
                raise failures[name]
            return action(*args, **kwargs)

        return call

    def init(**options):
        module.inits.append(options)
        return types.SimpleNamespace(
            id=options["id"] or "fresh123",
            define_metric=lambda *args, **kwargs: None,
            summary=module.summary,
            log_artifact=failing("log_artifact", module.uploaded.append),
            log=failing("log", module.rows.append),
            finish=failing("finish", lambda *, exit_code: module.finished.append(exit_code)),
        )

    module.init = failing("init", init)
    module.Settings = dict
    module.Artifact = Artifact
    return module


class Artifact:
    def __init__(self, name, type):
        self.name, self.type, self.folders = name, type, []

    def add_dir(self, path):
        self.folders.append(path)


def recipe(wandb=True):
    return Recipe(name="tiny", tracking=TrackingConfig(wandb=wandb, wandb_init={"project": "p", "group": "g"}))


def evaluated(tracker, step, metrics):
    tracker.set_evaluated(step, "dev", metrics, DATASET)
    tracker.evaluation(step, {"dev": metrics})


def run(run_dir, steps, **options):
    with Tracker.open(options.pop("recipe", recipe()), WORLD, run_dir, **options) as tracker:
        for step in steps:
            tracker.step({"step": step, "loss": 1 / step, "lr": 1e-3, "in_batch_accuracy": 0.5})
        evaluated(tracker, steps[-1], {"ndcg@10": steps[-1] / 10})
        return tracker.ids.get("wandb")


def check_only_rank_0(world, run_dir, wandb):
    sys.modules["wandb"] = fake = fake_wandb()
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            tracker = Tracker.open(recipe(wandb), world, Path(run_dir), resumed_step=None)
            with tracker.training(2), tracker.phase("training"):
                tracker.step({"step": 1, "loss": 1.0})
                tracker.advance(2)
            evaluated(tracker, 2, {"ndcg@10": 0.5})
            tracker.note("done")
            tracker.warn("careful")
            tracker.close()
        return out.getvalue(), err.getvalue(), len(fake.inits), tracker.ids.get("wandb")
    finally:
        del sys.modules["wandb"]


def test_only_rank_0_prints_and_writes(ranks, tmp_path):
    first, second = ranks(2, check_only_rank_0, str(tmp_path / "run"), True)
    out, err, inits, wandb_id = first
    assert "step 1/2" in out
    assert "careful" in out
    assert (err, inits, wandb_id) == ("", 1, "fresh123")
    assert second == ("", "", 0, None)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row.get("set")) for row in rows] == [(1, None), (2, "dev")]


def test_wandb_and_tensorboard_are_not_imported_unless_enabled(tmp_path):
    script = (
        "import sys, torch; from embedtrain.config.recipe import Recipe\n"
        "from embedtrain.distributed.world import World; from embedtrain.tracking.tracker import Tracker\n"
        "Tracker.open(Recipe(), World(0, 1, 0, 1, torch.device('cpu')), sys.argv[1]).close()\n"
        "print('wandb' in sys.modules, 'tensorboard' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_unknown_metrics_reach_the_file_and_wandb_and_memory_is_added(tmp_path, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(tmp_path, [1])
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert next(iter(first)) == "step"
    assert first["in_batch_accuracy"] == 0.5
    assert 0.01 < first["memory_gib"] < 1000
    assert second == {"step": 1, "set": "dev", "dataset": DATASET.as_row(), "ndcg@10": 0.1}
    assert fake.rows[0]["train/in_batch_accuracy"] == 0.5
    assert fake.rows[1] == {"step": 1, "dev/ndcg@10": 0.1}
    assert fake.finished == [0]


def test_a_resumed_run_has_one_history_one_wandb_run_and_compares_with_earlier_evaluations(
    tmp_path, monkeypatch, capsys
):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    wandb_id = run(tmp_path, [1, 2])
    run(tmp_path, [3, 4], resumed_step=2, ids={"wandb": wandb_id})
    again = run(tmp_path, [3], resumed_step=2, ids={"wandb": wandb_id})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], "set" in row) for row in rows] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    assert again == wandb_id
    assert [options["id"] for options in fake.inits] == [None, wandb_id, wandb_id]
    assert all(options["resume"] == "allow" for options in fake.inits)
    assert [row["step"] for row in fake.rows] == [1, 2, 2, 3, 4, 4, 3, 3]  # of our column: nothing is dropped
    assert capsys.readouterr().out.rstrip().endswith("0.3000  +0.1000")


def test_starting_from_scratch_moves_the_old_rows(tmp_path, capsys):
    run(tmp_path, [1, 2], recipe=recipe(wandb=False))
    run(tmp_path, [1], recipe=recipe(wandb=False))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.previous.jsonl")] == [1, 2, 2]
    assert "metrics.previous.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no network\nat all"), SystemExit(1)])
def test_a_failing_wandb_is_reported_once_and_stops_nothing(tmp_path, monkeypatch, capsys, where, error):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(**{where: error}))
    run(tmp_path, [1, 2, 3], ids={"wandb": "kept42"})
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert warning.startswith("warning: wandb ")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_the_id_of_a_run_is_kept_if_wandb_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=RuntimeError("no network")))
    assert run(tmp_path, [1], ids={"wandb": "kept42"}) == "kept42"
    assert run(tmp_path, [1], ids={}) is None


def test_a_wandb_that_is_not_installed_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, [1])
    assert "wandb could not be started" in capsys.readouterr().out


def test_a_wandb_run_has_its_name_tags_notes_group_and_config(tmp_path, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracking = TrackingConfig(
        wandb=True,
        wandb_init={
            "name": "second try", "tags": ["zh", "small"], "notes": "with more negatives", "mode": "offline",
            "group": "g",
        },
    )  # fmt: skip
    run(tmp_path, [1], recipe=Recipe(name="tiny", tracking=tracking))
    (options,) = fake.inits
    assert (options["name"], options["tags"], options["notes"]) == (
        "second try",
        ["zh", "small"],
        "with more negatives",
    )
    assert (options["mode"], options["group"]) == ("offline", "g")
    assert options["config"]["tracking"]["wandb_init"]["mode"] == "offline"
    assert options["config"]["world_size"] == 1
    run(tmp_path / "plain", [1])
    assert fake.inits[1]["name"] == "tiny"
    assert not {"tags", "notes", "mode"} & fake.inits[1].keys()


def test_the_summary_has_the_best_of_each_set_also_after_a_resume(tmp_path, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracker.open(recipe(), WORLD, tmp_path) as tracker:
        for step, value in ((1, 0.3), (2, 0.5), (3, 0.4)):
            evaluated(tracker, step, {"ndcg@10": value, "queries": 100})
    assert fake.summary == {"best/dev/ndcg@10": 0.5, "best/dev/step": 2}
    fake.summary.clear()
    with Tracker.open(recipe(), WORLD, tmp_path, resumed_step=3, ids={"wandb": "fresh123"}) as tracker:
        evaluated(tracker, 4, {"ndcg@10": 0.45})
    assert fake.summary == {"best/dev/ndcg@10": 0.5, "best/dev/step": 2}


@pytest.mark.parametrize("upload", [False, True])
def test_the_model_is_uploaded_only_on_request(tmp_path, monkeypatch, upload):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracking = TrackingConfig(wandb=True, wandb_artifacts=upload)
    with Tracker.open(Recipe(name="tiny", tracking=tracking), WORLD, tmp_path) as tracker:
        tracker.exported(tmp_path / "model")
    assert [(artifact.name, artifact.type, artifact.folders) for artifact in fake.uploaded] == (
        [("tiny-fresh123", "model", [str(tmp_path / "model")])] if upload else []
    )


def test_an_error_marks_the_wandb_run_as_failed(tmp_path, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ZeroDivisionError), Tracker.open(recipe(), WORLD, tmp_path):
        raise ZeroDivisionError
    assert fake.finished == [1]


def test_a_file_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    def full(_metrics, _row):
        raise OSError("No space left on device")

    monkeypatch.setattr(MetricsFile, "append", full)
    with Tracker.open(recipe(wandb=False), WORLD, tmp_path) as tracker:
        tracker.step({"step": 1, "loss": 1.0})
        tracker.step({"step": 2, "loss": 1.0})
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1
    assert "step 2" in out


REAL = """
import sys, torch
from embedtrain.config.recipe import Recipe, TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.tracking.tracker import Tracker
recipe = Recipe(name="tiny", tracking=TrackingConfig(wandb=True))
run_dir, resumed_step, wandb_id = sys.argv[1], *map(eval, sys.argv[2:4])
ids = {'wandb': wandb_id} if wandb_id else {}
world = World(0, 1, 0, 1, torch.device("cpu"))
with Tracker.open(recipe, world, run_dir, resumed_step=resumed_step, ids=ids) as tracker:
    for step in (1, 2):
        tracker.step({"step": step + (resumed_step or 0), "loss": float("nan"), "lr": 1e-3})
    tracker.set_evaluated(2, "dev", {"ndcg@10": 0.5}, DatasetInfo("retrieval", {"queries": 4}, subset=False))
    tracker.evaluation(2, {"dev": {"ndcg@10": 0.5}})
    print("id", tracker.ids.get("wandb"))
"""


def real_wandb(run_dir, resumed_step, wandb_id, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**clean, "HOME": str(run_dir), "NETRC": str(run_dir / "netrc"), **environment}
    return subprocess.run(
        [sys.executable, "-c", REAL, str(run_dir), repr(resumed_step), repr(wandb_id)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


@pytest.mark.slow
def test_real_wandb_offline_writes_a_run_and_continues_it(tmp_path):
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "elsewhere")}
    (tmp_path / "elsewhere").mkdir()
    first = real_wandb(tmp_path, None, None, **environment).stdout
    wandb_id = first.split("id ")[1].strip()
    second = real_wandb(tmp_path, 2, wandb_id, **environment).stdout
    assert f"id {wandb_id}" in second
    assert "warning" not in first + second
    runs = sorted((tmp_path / "elsewhere" / "wandb").glob(f"offline-run-*-{wandb_id}"))
    assert len(runs) == 2
    for folder in runs:
        content = (folder / f"run-{wandb_id}.wandb").read_bytes()
        for text in (b"train/loss", b"dev/ndcg@10", b"global_batch_size", b"world_size"):
            assert text in content
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")][:3] == [1, 2, 2]


def test_real_wandb_without_a_key_stops_nothing(tmp_path):
    done = real_wandb(tmp_path, None, None)
    assert done.stdout.count("warning: wandb could not be started") == 1
    assert "API key" in done.stdout
    assert "id None" in done.stdout
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
