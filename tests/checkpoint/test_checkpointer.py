"""Checkpoints of real ranks: read by any number of ranks, written beside training, and what may go wrong meanwhile."""

import json
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
from tests.checkpoint.live import Live, held_back, opened, sound, state_of, steps
from tests.small import parallel

Kinds = list[tuple[CheckpointLayout, CheckpointContents]]
KINDS: Kinds = [(layout, contents) for layout in CheckpointLayout for contents in CheckpointContents]
COMPLETE = [kind for kind in KINDS if kind[1] is CheckpointContents.all]
FSDP = parallel(Strategy.fsdp)
WRITERS = {"fsdp": (2, FSDP), "ddp": (2, parallel(Strategy.ddp)), "hsdp": (4, parallel(Strategy.hsdp, shard_size=2))}
READERS = [(1, FSDP), (3, FSDP), (4, WRITERS["hsdp"][1]), (2, parallel(Strategy.ddp))]


# What is saved is what is read.


Written = tuple[dict[str, str], dict[str, str], list[str]]


def written_by(world: World, root: Path, given: ParallelConfig, kinds: Kinds) -> list[Written]:
    """Save two models in these layouts and contents, both ways; what they held, and the files written here."""
    found = []
    for odd in (False, True):
        live = Live(world, given, odd=odd, seed=1)
        live.step()
        opened_here: list[str] = []
        with listening(opened_here):
            for layout, contents in kinds:
                for asynchronous in (False, True):
                    place = root / f"{odd} {layout.value} {contents.value} {asynchronous}"
                    kind = {"layout": layout, "contents": contents, "asynchronous": asynchronous}
                    with opened(place, world, **kind) as checkpoints:
                        checkpoints.save(live.trained, live.optimizer, state_of(1))
        found.append((live.held(), live.held(optimizer=False), opened_here))
    return found


_heard: list[list[str]] = []
_hooked: list[bool] = []


@contextmanager
def listening(names: list[str]) -> Iterator[None]:
    """Collect names of the weight files that this process opens."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _heard and str(arguments[0]).endswith(".safetensors"):
            _heard[0].append(Path(str(arguments[0])).name)

    if not _hooked:  # hooks stay for good
        sys.addaudithook(hook)
        _hooked.append(True)
    _heard.append(names)
    yield
    _heard.clear()


def read_by(world: World, roots: list[Path], given: ParallelConfig) -> list[dict[str, str]]:
    """What models of another seed hold after they have read each checkpoint; between them training goes on."""
    found = []
    models = [Live(world, given, odd=odd, seed=2) for odd in (False, True)]
    for root in roots:
        live = models[root.name.startswith("True")]
        live.step()
        checkpoints = opened(root, world)
        folder = checkpoints.newest()
        assert folder is not None
        state = checkpoints.resume(folder, live.trained, live.optimizer)
        whole = " all " in root.name
        assert state == (state_of(1) if whole else None)
        found.append(live.held(optimizer=whole))
    return found


def test_any_ranks_read_what_any_ranks_wrote(ranks, tmp_path):
    expected: dict[Path, dict[str, str]] = {}
    for name, (size, given) in WRITERS.items():
        kinds = KINDS if name == "fsdp" else COMPLETE
        held = ranks(size, written_by, tmp_path / name, given, kinds)
        for model in (0, 1):
            whole, weights = held[0][model][:2]
            for layout, contents in kinds:
                roots = [
                    tmp_path / name / f"{bool(model)} {layout.value} {contents.value} {way}" for way in (False, True)
                ]
                expected[roots[1]] = whole if contents is CheckpointContents.all else weights
                files = [sorted(path for path in step_path(root, 1).iterdir()) for root in roots]
                for one, other in zip(*files, strict=True):
                    assert one.name == other.name
                    assert one.read_bytes() == other.read_bytes(), "beside training the same is written"
        if name != "fsdp":  # of copies one is written
            writers = {"ddp": 1, "hsdp": 2}[name]
            assert [bool(opened_here) for *_, opened_here in (answer[0] for answer in held)] == [
                rank < writers for rank in range(size)
            ]
    for size, given in READERS:
        found = ranks(size, read_by, list(expected), given)
        for answers in found:
            assert dict(zip(expected, answers, strict=True)) == expected


# Beside training.


def trained_on(world: World, root: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """What was held at the save, after the steps that went on beside it, and what is read of it; one at a time."""
    live = Live(world, FSDP, odd=False)
    live.step()
    with opened(root, world) as checkpoints:
        with held_back(checkpoints) as free:
            before = live.held()
            checkpoints.save(live.trained, live.optimizer, state_of(1))
            for _ in range(3):
                checkpoints.wait_for_staging()
                live.step()
            after = live.held()
            assert not checkpoints.failed
            assert not list_steps(root)
            threading.Timer(0.3, free.set).start()
            checkpoints.save(live.trained, live.optimizer, state_of(4))
            assert free.is_set(), "the save before had not ended"
            assert steps(root)[-1:] == [1]
        checkpoints.wait()
        assert steps(root) == [4, 1]
        read = []
        for step in (1, 4):
            checkpoints.resume(open_checkpoint(step_path(root, step)), live.trained, live.optimizer)
            read.append(live.held())
    assert read[1] == after
    return before, after, read[0]


def test_training_goes_on_while_a_checkpoint_is_written(ranks, tmp_path):
    for before, after, read in ranks(2, trained_on, tmp_path):
        assert before != after
        assert read == before


def save_rapidly(world: World, root: Path) -> None:
    live = Live(world, parallel(Strategy.hsdp, shard_size=2), odd=True)
    with opened(root, world, keep=3) as checkpoints:
        for step in range(1, 21):
            live.step()
            checkpoints.save(live.trained, live.optimizer, state_of(step))


def test_rapid_saves_leave_nothing_but_checkpoints(ranks, tmp_path):
    ranks(4, save_rapidly, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (18, 19, 20)]
    for step in (18, 19, 20):
        sound(tmp_path, step)


def misfit(world: World, root: Path) -> list[str]:
    """A checkpoint of another model, and one whose manifest tells another shape."""
    told = []
    live, other = Live(world, FSDP, odd=True), Live(world, FSDP, odd=False)
    with opened(root, world, layout=CheckpointLayout.full) as checkpoints:
        checkpoints.save(live.trained, live.optimizer, state_of(1))
        checkpoints.wait()
        folder = sound(root, 1)
        with pytest.raises(EmbedtrainError) as failure:
            checkpoints.resume(folder, other.trained, other.optimizer)
        told.append(str(failure.value))
        manifest = json.loads(json.dumps(folder.manifest))
        manifest["tensors"]["weights"]["encoder.words.weight"]["shape"] = [4, 7]
        with pytest.raises(EmbedtrainError) as failure:
            checkpoints.resume(replace(folder, manifest=manifest), live.trained, live.optimizer)
        told.append(str(failure.value))
    return told


def test_a_checkpoint_of_another_model_is_refused(ranks, tmp_path):
    for other, turned in ranks(2, misfit, tmp_path):
        assert "does not fit this model: encoder.backbone." in other
        assert other.endswith(": the checkpoint lacks it")
        assert turned.endswith("encoder.words.weight has the shape [4, 7], the model's [7, 4]")
