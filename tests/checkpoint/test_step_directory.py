"""Step directories: which checkpoints are complete, which are kept, which one a name refers to, and disk space."""

import json
import shutil
import time
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embedtrain.checkpoint.snapshot import WEIGHTS
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
    prunable,
    require_disk_limit,
    step_path,
    unfinished_path,
    verify_checksums,
)
from embedtrain.checkpoint.tensor_files import (
    LocalShard,
    ShardPosition,
    TensorSpec,
    describe_tensors,
    tensor_files,
    write_local_shards,
)
from embedtrain.config.recipe import CheckpointConfig, CheckpointContents, CheckpointLayout
from embedtrain.errors import CheckpointError, ConfigError, UnreadableError

FILE = "weights-00000-of-00001.safetensors"
SIZE = 1000


def edit(path: Path, key: str, value: object) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {key: value}))


def write(root: Path, step: int, value: float = 1.0, best_step: int | None = None) -> Path:
    """A checkpoint of one tensor, as a save leaves it."""
    unfinished = unfinished_path(root, step)
    unfinished.mkdir(parents=True)
    rows = torch.full((3, 2), value)
    shards = {"w": LocalShard(TensorSpec.of(rows), rows, first_row=0, sharded=True)}
    files = tensor_files(WEIGHTS, shards, CheckpointLayout.sharded, num_shards=1)
    checksums = write_local_shards(unfinished, files, ShardPosition(replica=0, shard=0, num_shards=1), shards)
    manifest = {"format": FORMAT, "step": step, "state": {"best_step": best_step}, "layout": "sharded", "shards": 1}
    tensors = {"tensors": {WEIGHTS: describe_tensors(files, [checksums])}}
    commit_checkpoint(unfinished, step_path(root, step), manifest | tensors)
    return step_path(root, step)


def directories(root: Path, *steps: int) -> Path:
    """Step directories of SIZE bytes each."""
    for step in steps:
        step_path(root, step).mkdir(parents=True)
        (step_path(root, step) / "weights.safetensors").write_bytes(bytes(SIZE))
    return root


def steps_in(root: Path) -> list[int]:
    return [step for step, _ in list_steps(root)]


@pytest.mark.parametrize(
    ("steps", "newest", "keep", "every", "protected", "deleted"),
    [
        ((10, 20, 30, 40, 1000), 1000, 2, 0, {20}, [30, 10]),
        ((10, 15, 20, 25, 30), 30, 1, 20, set(), [25, 15, 10]),
        # 60 is damaged, so the run resumed from 20 and has now saved 30.
        ((20, 30, 60), 30, 1, 0, set(), [60, 20]),
    ],
    ids=["newest-and-best", "every-nth", "abandoned-run"],
)
def test_which_steps_are_deleted(tmp_path, steps, newest, keep, every, protected, deleted):
    root = directories(tmp_path, *steps)
    paths = prunable(root, newest=newest, keep=keep, every=every, protected=protected)
    assert paths == [step_path(root, step) for step in deleted]


def test_steps_of_any_number_and_odd_names(tmp_path):
    directories(tmp_path, 7, 99_999_999, 100_000_000, 12_345_678_901)
    odd = ["step-000000007", "step-0000008", "step-٠٠٠٠٠٠٠٩", "step-00000010.tmp", "step-00000011 ", "step-", "best"]
    for name in odd:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000012").write_text("a file")
    (tmp_path / "step-00000013").symlink_to(tmp_path / "gone")
    assert steps_in(tmp_path) == [12_345_678_901, 100_000_000, 99_999_999, 7]
    assert step_path(tmp_path, 12_345_678_901).name == "step-12345678901"
    prune = prunable(tmp_path, newest=12_345_678_901, keep=2, every=0, protected=set())
    assert prune == [step_path(tmp_path, 99_999_999), step_path(tmp_path, 7)]
    for name in ("²", "9" * 5000, "step-00000012", ""):
        with pytest.raises(CheckpointError, match=r"^step=.* latest and 7, 99999999, "):
            find_checkpoint(tmp_path, name)


def test_many_checkpoints(tmp_path):
    """A message names some of them, and space is freed without measuring all of them again for each one deleted."""
    root = directories(tmp_path / "checkpoints", *range(1, 2001))
    assert len(list_steps(root)) == 2000
    with pytest.raises(CheckpointError, match=r"latest and 1, 2, \.\.\., 1991, .* 2000$"):
        find_checkpoint(root, "3000")
    deletable = prunable(root, newest=2000, keep=1, every=0, protected=set())
    started = time.process_time()
    free_disk_space(root, SIZE, 5 * SIZE / GB, deletable)
    assert steps_in(root) == [2000, 1999, 1998, 1997]
    assert time.process_time() - started < 10  # 40 s if the rest is measured after each


def test_a_name_refers_to_a_step(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path, "latest")
    write(tmp_path, 10)
    write(tmp_path, 20, best_step=10)
    assert [find_checkpoint(tmp_path, name).step for name in ("latest", "best", "10")] == [20, 10, 10]
    with pytest.raises(CheckpointError, match=r"step=15: .*latest.* 10, 20"):
        find_checkpoint(tmp_path, "15")
    file = tmp_path / "step-00000020" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert find_checkpoint(tmp_path, "latest").step == 10
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged: .* w "):
        find_checkpoint(tmp_path, "20")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / MANIFEST).unlink(), f"has no {MANIFEST}"),
        (lambda path: (path / MANIFEST).write_text("{"), f"{MANIFEST} is damaged"),
        (lambda path: (path / MANIFEST).write_text(json.dumps({"step": 10})), f"{MANIFEST} is damaged"),
        (lambda path: (path / MANIFEST).write_text('{"step": 10, "format": 9, "files": {}}'), "newer .*format 9"),
        (lambda path: (path / MANIFEST).write_text('{"step": 10, "format": 1, "files": {}}'), "older .*format 1"),
        (lambda path: edit(path, "step", 900), f"{MANIFEST} is damaged: .* checksum"),
        (lambda path: (path / MANIFEST).write_text("[" * 100_000), f"{MANIFEST} is damaged: RecursionError"),
        (lambda path: (path / FILE).unlink(), f"{FILE} is missing"),
        (lambda path: (path / FILE).write_bytes(b"weight"), f"{FILE} is damaged: 6 bytes"),
    ],
)
def test_damage_is_reported(tmp_path, damage, message):
    path = write(tmp_path, 10)
    verify_checksums(open_checkpoint(path), 0, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensors", {"weights": {}, "../../outside": {}}),
        ("tensors", {"optimizer": {}}),
        ("tensors", {"weights": []}),
        ("tensors", None),
        ("shards", -1),
        ("shards", 0),
        ("shards", 10**11),
        ("shards", "1"),
        ("shards", 10**400),
        ("step", None),
        ("layout", "pickle"),
        ("contents", ["all"]),
        ("state", [1]),
        ("identity", "x"),
        ("recipe", 7),
        ("world_size", {"a": 1}),
    ],
)
def test_an_impossible_manifest_is_damaged(tmp_path, key, value):
    """Written by somebody who computes the checksum."""
    path = write(tmp_path, 10)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"]
    commit_checkpoint(path, step_path(tmp_path, 11), manifest | {key: value})
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged: .*{'tensors' if key == 'tensors' else key}"):
        open_checkpoint(step_path(tmp_path, 11))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest | {"shards": 10**11},
        lambda manifest: manifest | {"shards": 0},
        lambda manifest: manifest | {"shards": -3},
        lambda manifest: manifest | {"shards": 1e308},
        lambda manifest: manifest | {"tensors": {WEIGHTS: {"w": {"dtype": "F32", "shape": [10**30], "crc32": [0]}}}},
        lambda manifest: manifest | {"tensors": {WEIGHTS: {"w": {"dtype": "F32", "shape": [2**40] * 9, "crc32": [0]}}}},
        lambda manifest: manifest | {"tensors": {WEIGHTS: {"w": {"dtype": "F32", "shape": [-1], "crc32": [0]}}}},
        lambda manifest: manifest | {"tensors": {WEIGHTS: {"w": {"dtype": "F32", "shape": [3, 2], "crc32": []}}}},
    ],
)
def test_absurd_numbers_in_a_manifest_are_reported_at_once(tmp_path, change):
    path = write(tmp_path, 10)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"]
    manifest = change(manifest)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged: .*Error"):
        open_checkpoint(path)


def test_what_cannot_be_read_is_not_damaged(tmp_path):
    """Reading /proc/self/mem fails with EIO."""
    path = write(tmp_path, 10)
    (path / MANIFEST).unlink()
    (path / MANIFEST).symlink_to("/proc/self/mem")
    for read in (lambda: open_checkpoint(path), lambda: find_checkpoint(tmp_path, "latest")):
        with pytest.raises(UnreadableError, match=rf"step-00000010/{MANIFEST} cannot be read \(Input/output error\)"):
            read()


def test_an_interrupted_save_is_not_a_checkpoint(tmp_path):
    write(tmp_path, 10)
    unfinished_path(tmp_path, 20).mkdir()
    (tmp_path / "step-latest").mkdir()
    assert steps_in(tmp_path) == [10]
    assert [path.name for path in list_unfinished(tmp_path)] == ["step-00000020.tmp"]
    assert list_steps(tmp_path / "nowhere") == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, 1.0)
    path = write(tmp_path, 10, 2.0)
    assert load_file(path / FILE)["w"].unique().tolist() == [2.0]
    verify_checksums(open_checkpoint(path), 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize(
    ("options", "total_steps", "count"),
    [
        ({}, 100, 2),
        ({"every_minutes": 0.0}, 100, 2),
        ({"keep": 5}, 100, 5),  # by time, after any step
        ({"keep": 5}, 3, 3),
        ({"keep": 5, "contents": CheckpointContents.model}, 100, 2),  # never by time
        ({"keep": 3, "every_minutes": 0.0, "best_metric": "dev/ndcg@10"}, 100, 4),
        ({"every": 10, "keep": 1}, 100, 2),
        ({"every": 10, "keep": 2}, 100, 2),
        ({"every": 10, "keep": 5}, 100, 5),
        ({"every": 10, "keep": 5}, 30, 3),
        ({"every": 10, "keep": 2, "best_metric": "dev/ndcg@10"}, 100, 3),
        ({"every": 10, "keep": 2, "keep_every": 30}, 100, 4),  # 30, 60 and 90, which is also the previous one
        ({"every": 10, "keep": 2, "keep_every": 40}, 100, 4),  # 40, 80, 90 and 100
        ({"every": 10, "keep": 3, "keep_every": 10}, 100, 10),
        ({"every": 10, "keep": 2, "keep_every": 1000}, 100, 2),
    ],
)
def test_the_limit_is_compared_with_all_checkpoints_that_are_kept(options, total_steps, count):
    config = CheckpointConfig(**options)
    assert max_checkpoints_on_disk(config, total_steps) == count
    require_disk_limit(config, 10**20, total_steps)
    config.max_disk_gb = count * SIZE / GB
    require_disk_limit(config, SIZE, total_steps)
    with pytest.raises(ConfigError, match=rf"checkpoint\.max_disk_gb=.*up to {count} checkpoints"):
        require_disk_limit(config, SIZE + 1, total_steps)


@pytest.mark.parametrize(
    ("limit_gb", "left"), [(5 * SIZE / GB, [4, 3, 2, 1]), (4 * SIZE / GB, [4, 3, 2]), (None, [4, 3, 2, 1])]
)
def test_the_oldest_steps_are_deleted_only_as_far_as_needed(tmp_path, limit_gb, left):
    root = directories(tmp_path / "checkpoints", 1, 2, 3, 4)
    free_disk_space(root, SIZE, limit_gb, [step_path(root, step) for step in (3, 2, 1)])
    assert steps_in(root) == left


def test_protected_steps_are_not_deleted(tmp_path):
    root = directories(tmp_path / "checkpoints", 1, 2)
    with pytest.raises(CheckpointError, match=r"1e-06 GB: .* holds 2e-06 GB.*checkpoint\.max_disk_gb="):
        free_disk_space(root, SIZE, 2.5 * SIZE / GB, [])
    assert steps_in(root) == [2, 1]


def test_interrupted_saves_are_deleted_first(tmp_path):
    root = directories(tmp_path / "checkpoints", 1, 2, 3)
    step_path(root, 3).rename(unfinished_path(root, 3))
    free_disk_space(root, SIZE, 3 * SIZE / GB, [step_path(root, 1)])
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_detected_before_anything_is_written(tmp_path):
    root = directories(tmp_path / "checkpoints", 1)
    needed = shutil.disk_usage(root).total
    with pytest.raises(CheckpointError, match=rf"{root} has .* GB left"):
        free_disk_space(root, needed, None, [])
    assert steps_in(root) == [1]
