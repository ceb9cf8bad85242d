"""Whether a checkpoint has room: told before the run where that is known, and before a byte is written."""

import shutil
from pathlib import Path

import pytest

from embedtrain.checkpoint.disk_space import GB, free_disk_space, max_checkpoints_on_disk, require_disk_limit
from embedtrain.checkpoint.step_directory import list_steps, step_path, unfinished_path
from embedtrain.config.recipe import CheckpointConfig
from embedtrain.errors import CheckpointError, ConfigError

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
