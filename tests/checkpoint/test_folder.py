"""Which checkpoints are complete, which are kept, and which one a name stands for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embedtrain.checkpoint.index import describe_tensors, tensor_files, write_local_shards
from embedtrain.checkpoint.snapshot import WEIGHTS, LocalShard, ShardPosition
from embedtrain.checkpoint.step_directory import (
    FORMAT,
    MANIFEST,
    commit_checkpoint,
    find_checkpoint,
    list_steps,
    list_unfinished,
    open_checkpoint,
    prune,
    step_path,
    unfinished_path,
    verify_checksums,
)
from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError

PART = "weights-00000-of-00001.safetensors"


def edit(path: Path, key: str, value: object) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {key: value}))


def write(root: Path, step: int, value: float = 1.0, best_step: int | None = None) -> Path:
    """A checkpoint of one tensor, as a save leaves it."""
    unfinished = unfinished_path(root, step)
    unfinished.mkdir(parents=True)
    rows = torch.full((3, 2), value)
    parts = {"w": LocalShard(TensorSpec.of(rows), rows, first=0, cut=True)}
    files = tensor_files(WEIGHTS, parts, CheckpointLayout.sharded, shards=1)
    checksums = write_local_shards(unfinished, files, ShardPosition(replica=0, shard=0, shards=1), parts)
    manifest = {"format": FORMAT, "step": step, "state": {"best_step": best_step}, "layout": "sharded", "shards": 1}
    commit_checkpoint(
        unfinished, step_path(root, step), manifest | {"tensors": {WEIGHTS: describe_tensors(files, [checksums])}}
    )
    return step_path(root, step)


def test_the_newest_and_the_best_stay(tmp_path):
    for step in (10, 20, 30, 40, 1000):
        write(tmp_path, step)
    prune(tmp_path, newest=1000, keep=2, every=0, protected={20})
    assert [step for step, _ in list_steps(tmp_path)] == [1000, 40, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000040", "step-00001000"]


def test_what_an_abandoned_course_left_does_not_push_out_what_was_just_saved(tmp_path):
    """Step 60 is damaged, so the run went back to 20 and has now saved 30."""
    for step in (20, 30, 60):
        write(tmp_path, step)
    prune(tmp_path, newest=30, keep=1, every=0, protected=set())
    assert [step for step, _ in list_steps(tmp_path)] == [30]


def test_a_name_stands_for_a_step(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path, "latest")
    write(tmp_path, 10)
    write(tmp_path, 20, best_step=10)
    assert [find_checkpoint(tmp_path, name).step for name in ("latest", "best", "10")] == [20, 10, 10]
    with pytest.raises(CheckpointError, match=r"step=15: .* has latest and 10, 20"):
        find_checkpoint(tmp_path, "15")
    part = tmp_path / "step-00000020" / PART
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert find_checkpoint(tmp_path, "latest").step == 10
    with pytest.raises(CheckpointError, match=f"{PART} is damaged: the checksum of w is not"):
        find_checkpoint(tmp_path, "20")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / MANIFEST).unlink(), "was not written to its end"),
        (lambda path: (path / MANIFEST).write_text("{"), "checkpoint.json is damaged"),
        (lambda path: (path / MANIFEST).write_text(json.dumps({"step": 10})), "checkpoint.json is damaged"),
        (
            lambda path: (path / MANIFEST).write_text('{"step": 10, "format": 9, "files": {}}'),
            "written by a newer embedtrain",
        ),
        (
            lambda path: (path / MANIFEST).write_text('{"step": 10, "format": 1, "files": {}}'),
            "written by an earlier embedtrain",
        ),
        (lambda path: edit(path, "step", 900), "checkpoint.json is damaged: .* checksum is not the one"),
        (lambda path: (path / MANIFEST).write_text("[" * 100_000), "checkpoint.json is damaged: RecursionError"),
        (lambda path: (path / PART).unlink(), f"{PART} is missing"),
        (lambda path: (path / PART).write_bytes(b"weight"), f"{PART} is damaged: 6 bytes instead of"),
    ],
)
def test_damage_is_named(tmp_path, damage, sentence):
    path = write(tmp_path, 10)
    verify_checksums(open_checkpoint(path), 0, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(path)


def test_a_save_that_was_cut_off_is_no_checkpoint(tmp_path):
    write(tmp_path, 10)
    unfinished_path(tmp_path, 20).mkdir()
    (tmp_path / "step-latest").mkdir()
    assert [step for step, _ in list_steps(tmp_path)] == [10]
    assert [path.name for path in list_unfinished(tmp_path)] == ["step-00000020.tmp"]
    assert list_steps(tmp_path / "nowhere") == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, 1.0)
    path = write(tmp_path, 10, 2.0)
    assert load_file(path / PART)["w"].unique().tolist() == [2.0]
    verify_checksums(open_checkpoint(path), 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_every_nth_step_stays(tmp_path):
    for step in (10, 15, 20, 25, 30):
        write(tmp_path, step)
    prune(tmp_path, newest=30, keep=1, every=20, protected=set())
    assert [step for step, _ in list_steps(tmp_path)] == [30, 20]
