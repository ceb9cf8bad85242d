"""Profiles of chosen steps: traces contain the parts of a step, fractions add up, results do not change."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from embedtrain.training.profile import BATCHES, RANKS, RankTiming, time_shares
from tests.runs import BASE, losses, run
from tests.small import save_small, small_model, write_rows

PARTS = {"encode", "loss", "backward", "gradient norm", "optimizer", BATCHES}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_rows(folder / "train.jsonl", 36)
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "model")
    return folder


def options(inputs, out, *more):
    return (
        f"model.path={inputs / 'model'}", f"data.train=[{inputs / 'train.jsonl'}]", f"output_dir={out}",
        "train.steps=5", *more,
    )  # fmt: skip


def spans(path):
    """Name -> number of spans in a trace."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    counts = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


def check_shares(path, ranks, steps):
    content = json.loads(path.read_text())
    assert content["steps"] == steps
    assert len(content["ranks"]) == ranks
    for shares in content["ranks"]:
        fractions = [shares[name] for name in ("compute", "communication", "ranks", "data", "rest")]
        assert sum(fractions) == pytest.approx(1.0)
        assert all(-1e-6 <= share <= 1 for share in fractions)
        assert shares["compute"] > 0.05
        assert shares["rest"] < 0.5
        assert shares["seconds"] > 0
    return content


def test_a_profile_shows_the_parts_of_steps_and_changes_nothing(ranks, inputs, tmp_path):
    output, other_output = ranks(2, run, *options(inputs, tmp_path / "with", "tracking.profile=[2,3,5]"))
    ranks(2, run, *options(inputs, tmp_path / "without"))
    assert other_output == ""
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert (tmp_path / "with/model/model.safetensors").read_bytes() == (
        tmp_path / "without/model/model.safetensors"
    ).read_bytes()
    folder = tmp_path / "with" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-5-rank-0.json.gz", "step-5.json", "steps-2-3-rank-0.json.gz", "steps-2-3.json",
    ]  # fmt: skip
    counts = spans(folder / "steps-2-3-rank-0.json.gz")
    assert counts.keys() >= PARTS
    assert {"step 2", "step 3"} <= counts.keys()
    assert counts["optimizer"] == counts[BATCHES] == 2
    assert counts[RANKS] > 10
    check_shares(folder / "steps-2-3.json", 2, 2)
    assert "profile of steps 2 to 3" in output
    assert "longest operators on rank 0" in output
    assert not (tmp_path / "without" / "profile").exists()


def test_steps_that_cannot_be_profiled_are_reported(ranks, inputs, tmp_path):
    ranks(1, run, *options(inputs, tmp_path / "run", "train.steps=2"))
    more = ("tracking.profile=[1,2,4]", "tracking.profile_ranks=[0,3]", "checkpoint.every=4")
    (output,) = ranks(1, run, *options(inputs, tmp_path / "run", *more))
    assert "tracking.profile: steps 1, 2 are already complete" in output
    assert "tracking.profile_ranks=[0, 3]: there are 1 ranks, counted from 0" in output
    epochs = ("train.steps=null", "train.epochs=1", "tracking.profile=[40]")
    (output,) = ranks(1, run, *options(inputs, tmp_path / "epoch", *epochs))
    assert "tracking.profile: step 40 is beyond the last step of the run, 4" in output


def test_training_continues_if_a_trace_cannot_be_written(ranks, inputs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("not a folder")
    (output,) = ranks(1, run, *options(inputs, tmp_path / "run", "tracking.profile=[2]"))
    assert "warning: tracking.profile: rank 0 has written no trace: " in output
    assert len(losses(tmp_path / "run")) == 5


def test_waiting_for_a_late_rank_is_separated_from_transfer():
    """Rank 1 is 2 s late for the second of two collectives, each of which takes 1 s."""
    parts = {"encode": 4.0, BATCHES: 1.0}
    early = RankTiming(10.0, parts, exposed=4.0, computed=None, collectives=[1.0, 3.0], operators=[])
    late = RankTiming(
        10.0, {"encode": 6.0, BATCHES: 1.0}, exposed=2.0, computed=None, collectives=[1.0, 1.0], operators=[]
    )
    first, second = time_shares([early, late])
    assert (first.communication, first.ranks, first.compute, first.data) == pytest.approx((0.2, 0.2, 0.4, 0.1))
    assert (second.communication, second.ranks, second.compute, second.data) == pytest.approx((0.2, 0.0, 0.6, 0.1))
    assert first.rest == pytest.approx(0.1)


@pytest.mark.slow
def test_a_profile_under_torchrun(inputs, tmp_path):
    """Real processes, a trace of each rank, batches prepared on demand, and a step followed by a checkpoint."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "embedtrain",
        *BASE,
        *options(
            inputs, tmp_path / "run", "tracking.profile=[2,3,4]", "tracking.profile_ranks=null", "data.workers=0",
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
