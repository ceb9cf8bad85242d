"""Which checkpoints are complete, which are kept, and which one a name stands for."""

import json
from pathlib import Path

import pytest

from embedtrain.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    choose_step,
    describe_files,
    finish,
    list_steps,
    list_unfinished,
    prune,
    read_manifest,
    step_path,
    unfinished_path,
    verify,
)
from embedtrain.errors import CheckpointError


def write(root: Path, step: int, content: bytes = b"weights", best_step: int | None = None) -> Path:
    """A checkpoint as a save leaves it."""
    unfinished = unfinished_path(root, step)
    unfinished.mkdir(parents=True)
    (unfinished / "part").write_bytes(content)
    files = describe_files(unfinished, 0, 1)
    finish(
        unfinished,
        step_path(root, step),
        {"format": FORMAT, "step": step, "state": {"best_step": best_step}, "files": files},
    )
    return step_path(root, step)


def test_the_newest_and_the_best_stay(tmp_path):
    for step in (10, 20, 30, 40, 1000):
        write(tmp_path, step)
    prune(tmp_path, newest=1000, keep=2, protected={20})
    assert [step for step, _ in list_steps(tmp_path)] == [1000, 40, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000040", "step-00001000"]


def test_what_an_abandoned_course_left_does_not_push_out_what_was_just_saved(tmp_path):
    """Step 60 is damaged, so the run went back to 20 and has now saved 30."""
    for step in (20, 30, 60):
        write(tmp_path, step)
    prune(tmp_path, newest=30, keep=1, protected=set())
    assert [step for step, _ in list_steps(tmp_path)] == [30]


def test_a_name_stands_for_a_step(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        choose_step(tmp_path, "latest")
    write(tmp_path, 10)
    write(tmp_path, 20, best_step=10)
    assert [choose_step(tmp_path, name).step for name in ("latest", "best", "10")] == [20, 10, 10]
    with pytest.raises(CheckpointError, match=r"step=15: .* has latest and 10, 20"):
        choose_step(tmp_path, "15")
    (tmp_path / "step-00000020" / "part").write_bytes(b"weighty")
    assert choose_step(tmp_path, "latest").step == 10
    with pytest.raises(CheckpointError, match="part is damaged: its checksum"):
        choose_step(tmp_path, "20")


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
        (lambda path: (path / "part").unlink(), "part is missing"),
        (lambda path: (path / "part").write_bytes(b"weight"), "part is damaged: 6 bytes instead of 7"),
    ],
)
def test_damage_is_named(tmp_path, damage, sentence):
    path = write(tmp_path, 10)
    verify(read_manifest(path), 0, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=sentence):
        read_manifest(path)


def test_a_save_that_was_cut_off_is_no_checkpoint(tmp_path):
    write(tmp_path, 10)
    unfinished_path(tmp_path, 20).mkdir()
    (tmp_path / "step-latest").mkdir()
    assert [step for step, _ in list_steps(tmp_path)] == [10]
    assert [path.name for path in list_unfinished(tmp_path)] == ["step-00000020.tmp"]
    assert list_steps(tmp_path / "nowhere") == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, b"old")
    path = write(tmp_path, 10, b"new")
    assert (path / "part").read_bytes() == b"new"
    verify(read_manifest(path), 0, 1)
