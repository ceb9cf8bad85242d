"""What a run keeps of its checkpoints, how much room they take, and what stays when a save fails."""

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.snapshot import take_snapshot
from embedtrain.checkpoint.step_directory import checkpoint_bytes, list_unfinished, step_path
from embedtrain.config.recipe import CheckpointContents, CheckpointLayout, Strategy
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError
from tests.checkpoint.live import Live, held_back, opened, sound, state_of, steps
from tests.small import parallel

FSDP = parallel(Strategy.fsdp)


@contextmanager
def small_files_only(limit: int | None) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: what a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def told_of(checkpoints: Checkpointer, live: Live, step: int) -> str:
    """What a save says; waited for where it is beside training."""
    with pytest.raises(EmbedtrainError) as failure:
        checkpoints.save(live.trained, live.optimizer, state_of(step))
        while checkpoints._pending is not None and not checkpoints._pending.done():
            time.sleep(0.01)
        assert checkpoints.failed, "whoever trains can ask"
        checkpoints.save(live.trained, live.optimizer, state_of(step + 1))
    return f"{failure.type.__name__}: {failure.value}"


def fail_on(world: World, root: Path, asynchronous: bool, layout: CheckpointLayout, rank: int) -> list[str]:
    """Saves of which the second fails on one rank for want of room, and the third because the folder vanishes."""
    live = Live(world, FSDP, odd=False)
    told = []
    with opened(root, world, asynchronous=asynchronous, layout=layout) as checkpoints:
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        checkpoints.wait()
        with small_files_only(5000 if world.rank == rank else None):
            told.append(told_of(checkpoints, live, 2))
        assert steps(root) == [1]
        world.barrier()
        assert not list_unfinished(root), "half a checkpoint is of no use, and may be what fills the disk"
        sound(root, 1)
        if asynchronous:
            with held_back(checkpoints) as free:
                checkpoints.save(live.trained, live.optimizer, state_of(3))
                world.barrier()
                if world.is_main:
                    shutil.move(root, root.with_suffix(".moved"))
                    root.write_text("in the way")
                world.barrier()
                free.set()
                with pytest.raises(EmbedtrainError) as failure:
                    checkpoints.wait()
            told.append(f"{failure.type.__name__}: {failure.value}")
        else:
            world.barrier()
            if world.is_main:
                shutil.move(root, root.with_suffix(".moved"))
                root.write_text("in the way")
            world.barrier()
            told.append(told_of(checkpoints, live, 3))
        world.barrier()
        if world.is_main:
            root.unlink()
            shutil.move(root.with_suffix(".moved"), root)
        world.barrier()
        checkpoints.save(live.trained, live.optimizer, state_of(4))
        checkpoints.wait()
    return told


@pytest.mark.parametrize(
    ("asynchronous", "layout", "rank"),
    [
        (False, CheckpointLayout.sharded, 0),
        (False, CheckpointLayout.full, 1),
        (True, CheckpointLayout.sharded, 1),
        (True, CheckpointLayout.full, 0),
    ],
)
def test_a_save_that_fails_says_why_on_all_ranks_and_leaves_what_was(ranks, tmp_path, asynchronous, layout, rank):
    root = tmp_path / "checkpoints"
    told = ranks(3, fail_on, root, asynchronous, layout, rank)
    for number, (no_room, in_the_way) in enumerate(told):
        cause = "CheckpointError: saving the checkpoint of step 2 failed: File too large: "
        if number != rank:
            assert no_room.startswith(f"FailedElsewhere: rank {rank} failed while saving the checkpoint of step 2: ")
        assert cause in no_room
        assert "CheckpointError: saving the checkpoint of step 3 failed: " in in_the_way
        assert str(root) in in_the_way
    assert steps(root) == [4, 1]
    sound(root, 4)
    assert not list_unfinished(root)


def room_for_two(root: Path, step: int, live: Live) -> float:
    """GB that one checkpoint beside another fits in, but no third; small ones have much besides their tensors."""
    on_disk = sum(path.stat().st_size for path in step_path(root, step).iterdir())
    return (1.5 * on_disk + take_snapshot(live.trained, live.optimizer).num_bytes) / 10**9


def keep_as_told(world: World, root: Path) -> None:
    live = Live(world, FSDP, odd=False)
    with opened(root / "kept", world, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(live.trained, live.optimizer, state_of(step, best_step=3 if step >= 3 else None))
        checkpoints.wait()
    assert steps(root / "kept") == [10, 9, 8, 4, 3]

    # Loose enough for three of a run that saves once, too tight for one that is to keep five.
    assert checkpoint_bytes(live.trained, CheckpointContents.model) == take_snapshot(live.trained, None).num_bytes
    whole = take_snapshot(live.trained, live.optimizer).num_bytes  # with AdamW's number of steps for each tensor
    assert checkpoint_bytes(live.trained, CheckpointContents.all) == pytest.approx(whole, rel=0.01)
    limit = room_for_two(root / "kept", 10, live)
    opened(root, world, max_disk_gb=limit).require_disk_space(live.trained, 10)
    with pytest.raises(ConfigError, match=r"max_disk_gb=.*: up to 5 checkpoints of .* GB lie there at a time \(keep=5"):
        opened(root, world, every=1, keep=5, max_disk_gb=limit).require_disk_space(live.trained, 10)

    with opened(root / "limited", world, keep=2, max_disk_gb=limit) as checkpoints:
        for step in range(1, 5):
            with held_back(checkpoints) as free:
                checkpoints.save(live.trained, live.optimizer, state_of(step))
                assert steps(root / "limited") == [step - 1][: step - 1], "room is made before, of the oldest"
                free.set()
                checkpoints.wait()
            assert steps(root / "limited") == [step, step - 1][:step]
        with pytest.raises(EmbedtrainError, match=r"no room for a checkpoint of .*max_disk_gb=.*; raise it, or keep"):
            checkpoints.save(live.trained, live.optimizer, state_of(5, best_step=3))
        assert steps(root / "limited") == [4, 3], "neither the newest nor the best goes"


def test_what_is_kept_and_how_much(ranks, tmp_path):
    ranks(2, keep_as_told, tmp_path)


def go_on_behind_damage(world: World, root: Path) -> list[str]:
    """Step 3 is damaged, so that 2 is the newest that is intact; there is room for two, and a new one is saved."""
    live = Live(world, FSDP, odd=False)
    said: list[str] = []
    with opened(root, world, keep=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(live.trained, live.optimizer, state_of(step))
    limit = room_for_two(root, 1, live)
    world.barrier()
    if world.is_main:
        part = next(step_path(root, 3).glob("weights-00001*"))
        part.write_bytes(part.read_bytes()[:-1] + b"!")
        step_path(root, 4).with_name("step-00000004.tmp").mkdir()
    world.barrier()
    with opened(root, world, said, keep=2, max_disk_gb=limit) as checkpoints:
        folder = checkpoints.newest()
        assert folder is not None
        assert folder.step == 2
        with held_back(checkpoints) as free:
            checkpoints.save(live.trained, live.optimizer, state_of(5))
            assert steps(root) == [2], "what is damaged and what is old makes room, the newest intact one does not"
            free.set()
            checkpoints.wait()
    assert steps(root) == [5, 2]
    return said


def test_a_damaged_step_is_not_taken_for_the_newest(ranks, tmp_path):
    for unfinished, damaged in ranks(2, go_on_behind_damage, tmp_path):
        assert unfinished == f"{tmp_path}/step-00000004.tmp was not written to its end: passed over"
        assert damaged.startswith(f"{step_path(tmp_path, 3)}/weights-00001-of-00002.safetensors is damaged: the check")
    assert not list_unfinished(tmp_path)


def save_again(world: World, root: Path) -> None:
    live = Live(world, FSDP, odd=True)
    with opened(root, world) as checkpoints:
        for best in (None, 2):
            checkpoints.save(live.trained, live.optimizer, state_of(2, best_step=best))
            checkpoints.wait()
        assert sound(root, 2).manifest["state"]["best_step"] == 2
        world.barrier()
        if world.is_main:  # as if it had ended between the two renamings
            step_path(root, 2).rename(root / "step-00000002.replaced.tmp")
        world.barrier()
        found = checkpoints.newest()
    assert found is not None
    assert found.step == 2


def test_a_step_may_be_saved_again_and_is_never_lost(ranks, tmp_path):
    ranks(2, save_again, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
