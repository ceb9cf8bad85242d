"""Traces of chosen steps: they open, name the parts of a step, change nothing, and their shares add up."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from embedtrain.training.profile import RankTiming, time_shares
from embedtrain.training.spans import BATCHES, RANKS
from tests.small import save_small, small_model, write_rows
from tests.test_run import BASE, losses, run

PARTS = {"encode", "loss", "backward", "gradient norm", "optimizer", BATCHES}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    write_rows(folder / "train.jsonl", 36)
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "model")
    return folder


def options(workshop, out, *more):
    return (
        f"model.path={workshop / 'model'}", f"data.train=[{workshop / 'train.jsonl'}]", f"output_dir={out}",
        "train.steps=5", *more,
    )  # fmt: skip


def spans(path):
    """Name -> how many spans, of a trace, which must be JSON."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            found[event["name"]] = found.get(event["name"], 0) + 1
    return found


def check_shares(path, ranks, steps):
    content = json.loads(path.read_text())
    assert content["steps"] == steps
    assert len(content["ranks"]) == ranks
    for shares in content["ranks"]:
        told = [shares[name] for name in ("compute", "communication", "ranks", "data", "rest")]
        assert sum(told) == pytest.approx(1.0)
        assert all(-1e-6 <= share <= 1 for share in told)
        assert shares["compute"] > 0.05
        assert shares["rest"] < 0.5
        assert shares["seconds"] > 0
    return content


def test_a_profile_names_the_parts_of_steps_and_changes_nothing(ranks, workshop, tmp_path):
    told, silent = ranks(2, run, *options(workshop, tmp_path / "with", "tracking.profile=[2,3,5]"))
    ranks(2, run, *options(workshop, tmp_path / "without"))
    assert silent == ""
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert (tmp_path / "with/model/model.safetensors").read_bytes() == (
        tmp_path / "without/model/model.safetensors"
    ).read_bytes()
    folder = tmp_path / "with" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-5-rank-0.json.gz", "step-5.json", "steps-2-3-rank-0.json.gz", "steps-2-3.json",
    ]  # fmt: skip
    found = spans(folder / "steps-2-3-rank-0.json.gz")
    assert found.keys() >= PARTS
    assert {"step 2", "step 3"} <= found.keys()
    assert found["optimizer"] == found[BATCHES] == 2
    assert found[RANKS] > 10
    check_shares(folder / "steps-2-3.json", 2, 2)
    assert "profile of steps 2 to 3" in told
    assert "longest operators of rank 0" in told
    assert not (tmp_path / "without" / "profile").exists()


def test_steps_that_are_not_to_come_are_said(ranks, workshop, tmp_path):
    ranks(1, run, *options(workshop, tmp_path / "run", "train.steps=2"))
    asked = ("tracking.profile=[1,2,4]", "tracking.profile_ranks=[0,3]", "checkpoint.every=4")
    (told,) = ranks(1, run, *options(workshop, tmp_path / "run", *asked))
    assert "tracking.profile: steps 1, 2 are done already, and not profiled" in told
    assert "tracking.profile_ranks=[0, 3]: there are 1 ranks, counted from 0" in told
    epochs = ("train.steps=null", "train.epochs=1", "tracking.profile=[40]")
    (told,) = ranks(1, run, *options(workshop, tmp_path / "epoch", *epochs))
    assert "tracking.profile: step 40 is beyond the run's last step, 4" in told


def test_a_trace_that_cannot_be_written_stops_nothing(ranks, workshop, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    (told,) = ranks(1, run, *options(workshop, tmp_path / "run", "tracking.profile=[2]"))
    assert "warning: tracking.profile: rank 0 has written no trace: " in told
    assert len(losses(tmp_path / "run")) == 5


def test_who_comes_late_is_waited_for_by_the_others():
    """Rank 1 is 2 s late for the second of two collectives, each of which takes 1 s."""
    parts = {"encode": 4.0, BATCHES: 1.0}
    early = RankTiming(10.0, parts, alone=4.0, computed=None, collectives=[1.0, 3.0], operators=[])
    late = RankTiming(
        10.0, {"encode": 6.0, BATCHES: 1.0}, alone=2.0, computed=None, collectives=[1.0, 1.0], operators=[]
    )
    first, second = time_shares([early, late])
    assert (first.communication, first.ranks, first.compute, first.data) == pytest.approx((0.2, 0.2, 0.4, 0.1))
    assert (second.communication, second.ranks, second.compute, second.data) == pytest.approx((0.2, 0.0, 0.6, 0.1))
    assert first.rest == pytest.approx(0.1)


@pytest.mark.slow
def test_a_profile_under_torchrun(workshop, tmp_path):
    """Real processes, a trace of each rank, batches that are waited for, and a step with a checkpoint after it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "embedtrain",
        *BASE,
        *options(
            workshop, tmp_path / "run", "tracking.profile=[2,3,4]", "tracking.profile_ranks=null", "data.workers=0",
            "checkpoint.every=3",
        ),
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "run" / "profile"
    for name in ("steps-2-3", "step-4"):
        content = check_shares(folder / f"{name}.json", 2, 2 if "steps" in name else 1)
        assert all(shares["data"] > 0.01 for shares in content["ranks"])
        for rank in range(2):
            assert spans(folder / f"{name}-rank-{rank}.json.gz").keys() >= PARTS
    assert "profile of step 4" in done.stdout
