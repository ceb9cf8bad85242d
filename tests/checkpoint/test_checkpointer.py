"""Checkpoints of several ranks: read by any number of ranks, saved asynchronously, and rejected if they do not fit."""

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedtrain.checkpoint.step_directory import list_steps, open_checkpoint, step_path
from embedtrain.config.recipe import CheckpointContents, CheckpointLayout, ParallelConfig, Strategy
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from tests.checkpoint.live import Live, open_checkpoints, slow_disk, state_of, steps_in, verified
from tests.small import parallel

Kinds = list[tuple[CheckpointLayout, CheckpointContents]]
KINDS: Kinds = [(layout, contents) for layout in CheckpointLayout for contents in CheckpointContents]
COMPLETE = [kind for kind in KINDS if kind[1] is CheckpointContents.all]
FSDP = parallel(Strategy.fsdp)
WRITERS = {"fsdp": (2, FSDP), "ddp": (2, parallel(Strategy.ddp)), "hsdp": (4, parallel(Strategy.hsdp, shard_size=2))}
READERS = [(1, FSDP), (3, FSDP), (4, WRITERS["hsdp"][1]), (2, parallel(Strategy.ddp))]


Written = tuple[dict[str, str], dict[str, str], list[str]]


def save_all_kinds(world: World, root: Path, config: ParallelConfig, kinds: Kinds) -> list[Written]:
    """Save two models in every layout and contents, synchronously and not: their tensors, and files opened here."""
    written = []
    for odd in (False, True):
        live = Live(world, config, odd=odd, seed=1)
        live.step()
        opened: list[str] = []
        with listening(opened):
            for layout, contents in kinds:
                for asynchronous in (False, True):
                    path = root / f"{odd} {layout.value} {contents.value} {asynchronous}"
                    kind = {"layout": layout, "contents": contents, "asynchronous": asynchronous}
                    with open_checkpoints(path, world, **kind) as checkpoints:
                        checkpoints.save(live.trained, live.optimizer, state_of(1))
        written.append((live.digests(), live.digests(optimizer=False), opened))
    return written


_listeners: list[list[str]] = []
_hooked: list[bool] = []


@contextmanager
def listening(names: list[str]) -> Iterator[None]:
    """Collect names of the weight files that this process opens."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _listeners and str(arguments[0]).endswith(".safetensors"):
            _listeners[0].append(Path(str(arguments[0])).name)

    if not _hooked:  # hooks cannot be removed
        sys.addaudithook(hook)
        _hooked.append(True)
    _listeners.append(names)
    yield
    _listeners.clear()


def load_all(world: World, roots: list[Path], config: ParallelConfig) -> list[dict[str, str]]:
    """Tensors of models of another seed after they have loaded each checkpoint, with a step in between."""
    loaded = []
    models = [Live(world, config, odd=odd, seed=2) for odd in (False, True)]
    for root in roots:
        live = models[root.name.startswith("True")]
        live.step()
        checkpoints = open_checkpoints(root, world)
        checkpoint = checkpoints.newest()
        assert checkpoint is not None
        state = checkpoints.resume(checkpoint, live.trained, live.optimizer)
        complete = " all " in root.name
        assert state == (state_of(1) if complete else None)
        loaded.append(live.digests(optimizer=complete))
    return loaded


@pytest.mark.slow
def test_any_number_of_ranks_reads_what_any_number_wrote(ranks, tmp_path):
    expected: dict[Path, dict[str, str]] = {}
    for name, (size, config) in WRITERS.items():
        kinds = KINDS if name == "fsdp" else COMPLETE
        written = ranks(size, save_all_kinds, tmp_path / name, config, kinds)
        for model in (0, 1):
            complete, weights = written[0][model][:2]
            for layout, contents in kinds:
                roots = [
                    tmp_path / name / f"{bool(model)} {layout.value} {contents.value} {asynchronous}"
                    for asynchronous in (False, True)
                ]
                expected[roots[1]] = complete if contents is CheckpointContents.all else weights
                files = [sorted(path for path in step_path(root, 1).iterdir()) for root in roots]
                for synchronous, asynchronous in zip(*files, strict=True):
                    assert synchronous.name == asynchronous.name
                    assert synchronous.read_bytes() == asynchronous.read_bytes()
        if name != "fsdp":  # one replica writes
            writers = {"ddp": 1, "hsdp": 2}[name]
            opened = [bool(rank_written[0][2]) for rank_written in written]
            assert opened == [rank < writers for rank in range(size)]
    for size, config in READERS:
        for loaded in ranks(size, load_all, list(expected), config):
            assert dict(zip(expected, loaded, strict=True)) == expected


def train_during_a_save(world: World, root: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Tensors at the save, after further steps during the save, and as loaded; one save at a time."""
    live = Live(world, FSDP, odd=False)
    live.step()
    with open_checkpoints(root, world) as checkpoints:
        with slow_disk() as resumed:
            before = live.digests()
            checkpoints.save(live.trained, live.optimizer, state_of(1))
            for _ in range(3):
                checkpoints.wait_for_staging()
                live.step()
            after = live.digests()
            assert not checkpoints.failed
            assert not list_steps(root)
            threading.Timer(0.3, resumed.set).start()
            checkpoints.save(live.trained, live.optimizer, state_of(4))
            assert resumed.is_set(), "the previous save had not ended"
            assert steps_in(root)[-1:] == [1]
        checkpoints.wait()
        assert steps_in(root) == [4, 1]
        loaded = []
        for step in (1, 4):
            checkpoints.resume(open_checkpoint(step_path(root, step)), live.trained, live.optimizer)
            loaded.append(live.digests())
    assert loaded[1] == after
    return before, after, loaded[0]


def test_training_continues_during_an_asynchronous_save(ranks, tmp_path):
    for before, after, loaded in ranks(2, train_during_a_save, tmp_path):
        assert before != after
        assert loaded == before


def fail_during_a_save(world: World, root: Path) -> list[int]:
    """The steps on disk after an error in a process without other ranks."""
    live = Live(world, FSDP, odd=True)
    with (
        pytest.raises(ValueError, match="wolves"),
        slow_disk() as resumed,
        open_checkpoints(root, world) as checkpoints,
    ):
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        threading.Timer(0.3, resumed.set).start()
        raise ValueError("wolves")
    return steps_in(root)


def test_a_save_is_finished_after_an_error(ranks, tmp_path):
    assert ranks(1, fail_during_a_save, tmp_path) == [[1]]


def save_rapidly(world: World, root: Path) -> None:
    live = Live(world, parallel(Strategy.hsdp, shard_size=2), odd=True)
    with open_checkpoints(root, world, keep=3) as checkpoints:
        for step in range(1, 11):
            live.step()
            checkpoints.save(live.trained, live.optimizer, state_of(step))


def test_rapid_saves_leave_nothing_but_checkpoints(ranks, tmp_path):
    ranks(4, save_rapidly, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (8, 9, 10)]
    for step in (8, 9, 10):
        verified(tmp_path, step)


def load_mismatches(world: World, root: Path) -> list[str]:
    """Errors for a checkpoint of another model, and for a manifest with another shape."""
    errors = []
    live, other = Live(world, FSDP, odd=True), Live(world, FSDP, odd=False)
    with open_checkpoints(root, world, layout=CheckpointLayout.full) as checkpoints:
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        checkpoints.wait()
        checkpoint = verified(root, 1)
        with pytest.raises(EmbedtrainError) as error:
            checkpoints.resume(checkpoint, other.trained, other.optimizer)
        errors.append(str(error.value))
        manifest = copy.deepcopy(checkpoint.manifest)
        manifest.tensors["weights"]["encoder.words.weight"]["shape"] = [4, 7]
        with pytest.raises(EmbedtrainError) as error:
            checkpoints.resume(replace(checkpoint, manifest=manifest), live.trained, live.optimizer)
        errors.append(str(error.value))
    return errors


def test_a_checkpoint_of_another_model_is_rejected(ranks, tmp_path):
    for missing, transposed in ranks(2, load_mismatches, tmp_path):
        assert "does not fit this model: encoder.backbone." in missing
        assert missing.endswith("missing in the checkpoint")
        assert "encoder.words.weight has the shape [4, 7]" in transposed
        assert transposed.endswith("[7, 4]")
