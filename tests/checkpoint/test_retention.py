"""Which checkpoints a run keeps, how much disk space they need, and what remains after a failed save."""

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.snapshot import live_snapshot
from embedtrain.checkpoint.step_directory import checkpoint_bytes, list_unfinished, step_path
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import CheckpointContents, CheckpointLayout, Strategy
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError
from tests.checkpoint.live import Live, open_checkpoints, slow_disk, state_of, steps_in, verified
from tests.small import parallel

FSDP = parallel(Strategy.fsdp)


@contextmanager
def file_size_limit(limit: int | None) -> Iterator[None]:
    """Limit the size of files of this process, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_error(checkpoints: Checkpointer, live: Live, step: int) -> str:
    """Error of a save; an asynchronous one raises it in the next save."""
    with pytest.raises(EmbedtrainError) as error:
        checkpoints.save(live.trained, live.optimizer, state_of(step))
        while not checkpoints.failed:
            time.sleep(0.01)
        checkpoints.save(live.trained, live.optimizer, state_of(step + 1))
    return f"{error.type.__name__}: {error.value}"


def replace_by_file(world: World, root: Path) -> None:
    world.barrier()
    if world.is_main:
        shutil.move(root, root.with_suffix(".moved"))
        root.write_text("in the way")
    world.barrier()


def fail_saves(world: World, root: Path, asynchronous: bool, layout: CheckpointLayout, rank: int) -> list[str]:
    """Errors of a save that exceeds a quota on one rank, and of one whose folder disappears; then a good save."""
    live = Live(world, FSDP, odd=False)
    errors = []
    with open_checkpoints(root, world, asynchronous=asynchronous, layout=layout) as checkpoints:
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        checkpoints.wait()
        with file_size_limit(5000 if world.rank == rank else None):
            errors.append(save_error(checkpoints, live, 2))
        assert steps_in(root) == [1]
        world.barrier()
        assert not list_unfinished(root)
        verified(root, 1)
        if asynchronous:
            with slow_disk() as resumed:
                checkpoints.save(live.trained, live.optimizer, state_of(3))
                replace_by_file(world, root)
                resumed.set()
                with pytest.raises(EmbedtrainError) as error:
                    checkpoints.wait()
            errors.append(f"{error.type.__name__}: {error.value}")
        else:
            replace_by_file(world, root)
            errors.append(save_error(checkpoints, live, 3))
        world.barrier()
        if world.is_main:
            root.unlink()
            shutil.move(root.with_suffix(".moved"), root)
        world.barrier()
        checkpoints.save(live.trained, live.optimizer, state_of(4))
        checkpoints.wait()
    return errors


@pytest.mark.quick("True-sharded-1", "False-full-1")
@pytest.mark.parametrize(
    ("asynchronous", "layout", "rank"),
    [
        (False, CheckpointLayout.sharded, 0),
        (False, CheckpointLayout.full, 1),
        (True, CheckpointLayout.sharded, 1),
        (True, CheckpointLayout.full, 0),
    ],
)
def test_a_failed_save_raises_on_all_ranks_and_keeps_earlier_checkpoints(ranks, tmp_path, asynchronous, layout, rank):
    root = tmp_path / "checkpoints"
    for number, (quota, in_the_way) in enumerate(ranks(3, fail_saves, root, asynchronous, layout, rank)):
        assert "CheckpointError: saving the checkpoint of step 2 failed: File too large: " in quota
        if number != rank:
            assert quota.startswith(f"FailedElsewhere: rank {rank} failed while saving the checkpoint of step 2: ")
        assert "CheckpointError: saving the checkpoint of step 3 failed: " in in_the_way
        assert str(root) in in_the_way
    assert steps_in(root) == [4, 1]
    verified(root, 4)
    assert not list_unfinished(root)


def limit_for_two(root: Path, step: int, live: Live) -> float:
    """GB for two checkpoints but not three; in small ones headers and manifests count."""
    on_disk = sum(path.stat().st_size for path in step_path(root, step).iterdir())
    return (1.5 * on_disk + live_snapshot(live.trained, live.optimizer).num_bytes) / 10**9


OPTIM = OptimConfig()


def keep_and_limit(world: World, root: Path) -> None:
    live = Live(world, FSDP, odd=False)
    with open_checkpoints(root / "kept", world, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(live.trained, live.optimizer, state_of(step, best_step=3 if step >= 3 else None))
        checkpoints.wait()
    assert steps_in(root / "kept") == [10, 9, 8, 4, 3]

    assert (
        checkpoint_bytes(live.trained, CheckpointContents.model, OPTIM) == live_snapshot(live.trained, None).num_bytes
    )
    complete = live_snapshot(live.trained, live.optimizer).num_bytes  # includes AdamW's step of each tensor
    assert checkpoint_bytes(live.trained, CheckpointContents.all, OPTIM) == pytest.approx(complete, rel=0.01)
    # Enough for a run that saves once, too little for one that keeps five.
    limit = limit_for_two(root / "kept", 10, live)
    open_checkpoints(root, world, max_disk_gb=limit).require_disk_space(live.trained, 10, OPTIM)
    with pytest.raises(ConfigError, match=r"max_disk_gb=.*up to 5 checkpoints .*\(keep=5"):
        open_checkpoints(root, world, every=1, keep=5, max_disk_gb=limit).require_disk_space(live.trained, 10, OPTIM)

    with open_checkpoints(root / "limited", world, keep=2, max_disk_gb=limit) as checkpoints:
        for step in range(1, 5):
            with slow_disk() as resumed:
                checkpoints.save(live.trained, live.optimizer, state_of(step))
                assert steps_in(root / "limited") == [step - 1][: step - 1], "the oldest is deleted before the save"
                resumed.set()
                checkpoints.wait()
            assert steps_in(root / "limited") == [step, step - 1][:step]
        with pytest.raises(EmbedtrainError, match=r"checkpoint\.max_disk_gb="):
            checkpoints.save(live.trained, live.optimizer, state_of(5, best_step=3))
        assert steps_in(root / "limited") == [4, 3], "neither the newest nor the best is deleted"


def test_retention_and_disk_limit(ranks, tmp_path):
    ranks(2, keep_and_limit, tmp_path)


def resume_behind_damage(world: World, root: Path) -> list[str]:
    """Messages of a run in which step 3 is damaged, so that 2 is the newest; the limit allows two checkpoints."""
    live = Live(world, FSDP, odd=False)
    messages: list[str] = []
    with open_checkpoints(root, world, keep=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(live.trained, live.optimizer, state_of(step))
    limit = limit_for_two(root, 1, live)
    world.barrier()
    if world.is_main:
        file = next(step_path(root, 3).glob("weights-00001*"))
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        step_path(root, 4).with_name("step-00000004.tmp").mkdir()
    world.barrier()
    with open_checkpoints(root, world, messages, keep=2, max_disk_gb=limit) as checkpoints:
        checkpoint = checkpoints.newest()
        assert checkpoint is not None
        assert checkpoint.step == 2
        with slow_disk() as resumed:
            checkpoints.save(live.trained, live.optimizer, state_of(5))
            assert steps_in(root) == [2], "damaged and old steps are deleted, the newest intact one is not"
            resumed.set()
            checkpoints.wait()
    assert steps_in(root) == [5, 2]
    return messages


def test_a_damaged_step_is_skipped(ranks, tmp_path):
    for unfinished, damaged in ranks(2, resume_behind_damage, tmp_path):
        assert unfinished.startswith(f"{tmp_path}/step-00000004.tmp ")
        assert damaged.startswith(f"{step_path(tmp_path, 3)}/weights-00001-of-00002.safetensors is damaged: ")
    assert not list_unfinished(tmp_path)


def save_again(world: World, root: Path) -> None:
    live = Live(world, FSDP, odd=True)
    with open_checkpoints(root, world) as checkpoints:
        for best in (None, 2):
            checkpoints.save(live.trained, live.optimizer, state_of(2, best_step=best))
            checkpoints.wait()
        assert verified(root, 2).manifest.state["best_step"] == 2
        world.barrier()
        if world.is_main:  # as if interrupted between the two renames
            step_path(root, 2).rename(root / "step-00000002.replaced.tmp")
        world.barrier()
        checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_a_step_can_be_saved_again_and_is_never_lost(ranks, tmp_path):
    ranks(2, save_again, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
