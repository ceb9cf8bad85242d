"""Which checkpoints are complete, which are kept, and which one a name stands for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embedtrain.checkpoint.snapshot import WEIGHTS, LocalShard, ShardPosition
from embedtrain.checkpoint.step_directory import (
    FORMAT,
    GB,
    MANIFEST,
    commit_checkpoint,
    find_checkpoint,
    free_disk_space,
    list_steps,
    list_unfinished,
    max_checkpoints_on_disk,
    open_checkpoint,
    prune,
    require_disk_limit,
    step_path,
    unfinished_path,
    verify_checksums,
)
from embedtrain.checkpoint.tensor_files import describe_tensors, tensor_files, write_local_shards
from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.config.recipe import CheckpointConfig, CheckpointLayout
from embedtrain.errors import CheckpointError, ConfigError

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


SIZE = 1000


def filled(root: Path, *steps: int) -> Path:
    """Steps that take SIZE bytes each."""
    for step in steps:
        step_path(root, step).mkdir(parents=True)
        (step_path(root, step) / "weights.safetensors").write_bytes(bytes(SIZE))
    return root


@pytest.mark.parametrize(
    ("options", "total_steps", "most"),
    [
        ({}, 100, 2),
        ({"every": 10, "keep": 1}, 100, 2),
        ({"every": 10, "keep": 2}, 100, 2),
        ({"every": 10, "keep": 5}, 100, 5),
        ({"every": 10, "keep": 5}, 30, 3),
        ({"every": 10, "keep": 2, "best": "dev/ndcg@10"}, 100, 3),
        ({"every": 10, "keep": 2, "keep_every": 30}, 100, 4),  # 30, 60 and 90, which is the one before as well
        ({"every": 10, "keep": 2, "keep_every": 40}, 100, 4),  # 40, 80, 90 and 100
        ({"every": 10, "keep": 3, "keep_every": 10}, 100, 10),
        ({"every": 10, "keep": 2, "keep_every": 1000}, 100, 2),
    ],
)
def test_a_limit_is_compared_with_all_that_is_to_be_kept(options, total_steps, most):
    config = CheckpointConfig(**options)
    assert max_checkpoints_on_disk(config, total_steps) == most
    require_disk_limit(config, 10**20, total_steps)
    config.max_disk_gb = most * SIZE / GB
    require_disk_limit(config, SIZE, total_steps)
    with pytest.raises(ConfigError, match=rf"checkpoint.max_disk_gb=.*: up to {most} checkpoints of .*allow .*"):
        require_disk_limit(config, SIZE + 1, total_steps)


def test_room_is_made_of_the_oldest_and_no_more_than_is_needed(tmp_path):
    root = filled(tmp_path / "checkpoints", 1, 2, 3, 4)
    spare = [step_path(root, step) for step in (3, 2, 1)]
    free_disk_space(root, SIZE, 5 * SIZE / GB, spare)
    assert [step for step, _ in list_steps(root)] == [4, 3, 2, 1]
    free_disk_space(root, SIZE, 4 * SIZE / GB, spare)
    assert [step for step, _ in list_steps(root)] == [4, 3, 2]
    free_disk_space(root, SIZE, None, spare)
    assert [step for step, _ in list_steps(root)] == [4, 3, 2]


def test_what_must_stay_stays(tmp_path):
    root = filled(tmp_path / "checkpoints", 1, 2)
    with pytest.raises(
        CheckpointError, match=r"no room for a checkpoint of 1e-06 GB: .* holds 2e-06 GB already, and chec"
    ):
        free_disk_space(root, SIZE, 2.5 * SIZE / GB, [])
    assert [step for step, _ in list_steps(root)] == [2, 1]


def test_what_was_cut_off_gives_its_room_back_first(tmp_path):
    root = filled(tmp_path / "checkpoints", 1, 2, 3)
    step_path(root, 3).rename(unfinished_path(root, 3))
    free_disk_space(root, SIZE, 3 * SIZE / GB, [step_path(root, 1)])
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_disk_without_room_is_told_before_a_byte_is_written(tmp_path):
    root = filled(tmp_path / "checkpoints", 1)
    needed = shutil.disk_usage(root).total
    with pytest.raises(CheckpointError, match=rf"no room for a checkpoint of .* GB: the disk of {root} has .* GB left"):
        free_disk_space(root, needed, None, [])
    assert [step for step, _ in list_steps(root)] == [1]
