"""MLflow and trackio: one run over restarts, read back with the real packages where they are installed."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from embedtrain.config.recipe import Recipe, TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.metrics import read_metrics
from embedtrain.tracking.tracker import Tracker
from tests.tracking.test_failures import warnings

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
OPTIONS = {
    "mlflow": {"mlflow": True, "mlflow_init": {"experiment": "tests", "tags": {"language": "zh"}}},
    "trackio": {"trackio": True, "trackio_init": {"project": "tests"}},
}


def run(client, run_dir, steps, *, failed=False, **options):
    """The ids of the run in trackers after `steps` and an evaluation."""
    recipe = Recipe(name="tiny", tracking=TrackingConfig(**OPTIONS[client]))
    tracker = Tracker.open(recipe, WORLD, run_dir, **options)
    for step in steps:
        tracker.step({"step": step, "loss": step / 2, "lr": 1e-3})
    tracker.evaluation(steps[-1], {"dev": {"ndcg@10": steps[-1] / 10}})
    tracker.close(failed=failed)
    return tracker.ids


@pytest.fixture
def mlflow_client(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI") or f"file:{tmp_path}/store")
    return mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def test_mlflow(tmp_path, mlflow_client, capsys):
    ids = run("mlflow", tmp_path / "run", [1, 2])
    assert run("mlflow", tmp_path / "run", [3, 4], resumed_step=2, ids=ids) == ids
    other = run("mlflow", tmp_path / "run", [1], failed=True)
    assert other != ids
    assert not warnings(capsys.readouterr().out, "MLflow")
    first, second = (mlflow_client.get_run(found["mlflow"]) for found in (ids, other))
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert (first.info.run_name, first.data.tags["language"]) == ("tiny", "zh")
    assert first.data.params["optim.lr"] == "5e-05"
    assert first.data.params["world_size"] == "1"
    history = mlflow_client.get_metric_history(ids["mlflow"], "train/loss")
    assert [(value.step, value.value) for value in history] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    history = mlflow_client.get_metric_history(ids["mlflow"], "dev/ndcg_at_10")
    assert [(value.step, value.value) for value in history] == [(2, 0.2), (4, 0.4)]


# In a process of its own: trackio keeps threads and connections until its process ends.
TRACKIO = """
import pathlib, sys
from tests.tracking.test_clients import run
folder = pathlib.Path(sys.argv[1])
ids = run("trackio", folder, [1, 2])
assert run("trackio", folder, [3], resumed_step=2, ids=ids) == ids
import trackio
(found,) = trackio.Api().runs("tests")
print("config", found.config["train"]["global_batch_size"])
for row in trackio.sqlite_storage.SQLiteStorage.get_logs("tests", found.name):
    print("row", row["step"], row.get("train/loss"), row.get("dev/ndcg@10"))
"""


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "store")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not warnings(done.stdout, "trackio")
    rows = sorted(line for line in done.stdout.splitlines() if line.startswith(("row", "config")))
    assert rows[0].startswith("config ")
    assert rows[1:] == [
        "row 1 0.5 None", "row 2 1.0 None", "row 2 None 0.2", "row 3 1.5 None", "row 3 None 0.3",
    ]  # fmt: skip


def test_mlflow_whose_server_cannot_be_reached(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    began = time.monotonic()
    assert run("mlflow", tmp_path, [1, 2]) == {}
    assert time.monotonic() - began < 90
    assert len(warnings(capsys.readouterr().out, "MLflow")) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(("client", "name"), [("mlflow", "MLflow"), ("trackio", "trackio")])
def test_without_the_package_a_warning_says_what_to_install(tmp_path, monkeypatch, capsys, client, name):
    monkeypatch.setitem(sys.modules, client, None)
    assert run(client, tmp_path, [1, 2]) == {}
    (warning,) = warnings(capsys.readouterr().out, name)
    assert f"[{client}]" in warning
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
