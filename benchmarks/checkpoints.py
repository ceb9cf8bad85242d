"""Saving, resuming and exporting on two ranks: against a plain copy of the same bytes, DCP, and whole state dicts."""

import ctypes
import gc
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from benchmarks.inputs import MINILM, train_data
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from benchmarks.sides import OPTIM, trainable
from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.export.model_directory import write_architecture
from embedtrain.checkpoint.export.model_export import live_weights, plan_export
from embedtrain.checkpoint.step_directory import step_path
from embedtrain.config.recipe import (
    CheckpointConfig,
    CheckpointLayout,
    ExportConfig,
    ModelConfig,
    ParallelConfig,
    Pooling,
    Precision,
    Strategy,
)
from embedtrain.distributed.world import World
from embedtrain.loading.load import LoadedModel, load_model
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import StepContext, train_step

RANKS, PAIRS, STEPS, MB = 2, 4, 6, 10**6
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
TITLE = f"Checkpoints of a BERT of four layers, {RANKS} ranks, fsdp"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call: wall seconds until the last rank was done, CPU seconds of both, MB that a rank's memory grew by."""

    seconds: float
    cpu_seconds: float
    extra: float


def measure() -> str:
    """Both tables; what was saved is read again and compared in every round."""
    steps, moved = on_ranks(RANKS, _run)[0]
    return f"{steps}\n\n{moved}"


def _run(rank: int, folder: Path) -> tuple[str, str]:
    with world_of(RANKS, rank, folder / "store", most=RANKS) as world:
        given = {"model_type": "bert", **SIZES}
        model = load_model(
            ModelConfig(config=given, tokenizer=MINILM, pooling=Pooling.mean, max_length=256),
            ParallelConfig(strategy=Strategy.fsdp, precision=Precision.fp32),
            world,
            seed=0,
        )
        run = trainable(model, world, OPTIM)
        data = train_data(PAIRS, model.tokenizer)

        def step(number: int) -> None:
            batch = data.batch(number)
            train_step(run, make_rank_batch(batch, world.rank, world.size, model.tokenizer, ChunkOptions(16384)))

        step(0)
        return _cost_of_a_save(world, run, folder, step), _everything(world, model, run, folder)


def _checkpoints(world: World, root: Path, layout: CheckpointLayout, *, asynchronous: bool) -> Checkpointer:
    config = CheckpointConfig(layout=layout, asynchronous=asynchronous, keep=1)
    return Checkpointer(root, config, world, metadata={}, log=print)


def _cost_of_a_save(world: World, run: StepContext, folder: Path, step: Callable[[int], None]) -> str:
    """STEPS steps without a save and with one before the first, until it is whole: what a checkpoint costs."""
    ways = {"none": None, "false": False, "true": True}
    waits: dict[str, list[float]] = {name: [] for name in ways}
    walls: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for turn in range(len(ways)):
            name = list(ways)[(turn + number) % len(ways)]
            asynchronous = ways[name]
            world.barrier()
            cpu = time.process_time()
            with _checkpoints(
                world, folder / "beside", CheckpointLayout.sharded, asynchronous=bool(asynchronous)
            ) as checkpoints:
                began = time.perf_counter()
                if asynchronous is not None:
                    checkpoints.save(run.module, run.optimizer, {"step": 1})
                waited, began = time.perf_counter() - began, time.perf_counter()
                for place in range(STEPS):
                    step(number * STEPS + place)
                stepped = time.perf_counter() - began
            if number:
                waits[name].append(waited)
                walls[name].append(stepped / STEPS)
                work[name].append(sum(world.gather(time.process_time() - cpu)) / STEPS)
    wall, one = statistics.median(walls["none"]), statistics.median(work["none"])
    rows = []
    for name in ("false", "true"):
        wait, more = statistics.median(waits[name]), sorted(STEPS * (cost - one) for cost in work[name])
        figures = (f"{wall:.2f}", f"{wait:.2f}", f"{wait / wall:.2f}", _spread([cost / one for cost in more]))
        rows.append([name, *figures])
    header = ["checkpoint.asynchronous", "a step, wall s", "training waits, wall s", "in steps"]
    return markdown([*header, "CPU time of all ranks, in that of a step"], rows)


def _everything(world: World, model: LoadedModel, run: StepContext, folder: Path) -> str:
    """Every way of saving, reading and exporting, in turns; speed is that of the bytes of a checkpoint."""
    ways = _Ways(world, model, run, folder)
    costs: dict[str, list[Cost]] = {name: [] for name in ways.all}
    for number in range(ROUNDS + 1):
        for group in (ways.saves, ways.reads, ways.exports):  # what is read has been saved in this round
            for turn in range(len(group)):
                name = list(group)[(turn + number) % len(group)]
                prepare, act = group[name]
                prepare()
                cost = _cost(world, act)
                if name in ways.reads:
                    ways.require_read(name)
                if number:
                    costs[name].append(cost)
    return "\n\n".join(
        _table(world, what, list(group), costs, size, ways.model_bytes)
        for what, group, size in (
            ("saving", ways.saves, ways.bytes),
            ("reading", ways.reads, ways.bytes),
            ("exporting", ways.exports, ways.model_bytes),
        )
    )


def _table(world: World, what: str, names: list[str], costs: dict[str, list[Cost]], size: int, model_bytes: int) -> str:
    rows = []
    for name in names:
        ratios = sorted(b.seconds / a.seconds for a, b in zip(costs[name], costs[names[0]], strict=True))
        extra = statistics.median(cost.extra for cost in costs[name])
        seconds = statistics.median(cost.seconds for cost in costs[name])
        cpu = statistics.median(cost.cpu_seconds for cost in costs[name])
        figures = (f"{seconds:.2f}", f"{size / MB / seconds:,.0f}", _spread(ratios), f"{cpu:.2f}", f"{extra:,.0f}")
        rows.append([name, *figures, f"{extra * MB / model_bytes:.2f}"])
    header = [f"{what} {size / MB:,.0f} MB", "wall s", "MB/s", f"times {names[0]}", "CPU s, all ranks"]
    return markdown([*header, "most extra MB of a rank", f"over the model's {model_bytes / MB:,.0f} MB"], rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def _cost(world: World, act: Callable[[], None]) -> Cost:
    with _growth() as grown:
        world.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        act()
        world.barrier()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    found = world.gather((seconds, cpu, grown[0]))
    return Cost(max(one[0] for one in found), sum(one[1] for one in found), max(one[2] for one in found))


@contextmanager
def _growth() -> Iterator[list[float]]:
    """The most that anonymous memory of this process grew by in the block, looked at every five milliseconds; MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    before = _anonymous()
    grown, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            grown[0] = max(grown[0], _anonymous() - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    yield grown
    over.set()
    watcher.join()


def _anonymous() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    require(found is not None, "this kernel does not tell RssAnon")
    return int(found[1]) * 1024 / MB if found else 0.0


class _Ways:
    """What is measured: for each way what comes before it, unmeasured, and itself."""

    def __init__(self, world: World, model: LoadedModel, run: StepContext, folder: Path) -> None:
        self.world, self.run, self.encoder, self.folder = world, run, model.encoder, folder
        self.architecture = folder / "architecture"
        if world.is_main:
            write_architecture(self.architecture, model.source, model.tokenizer)
        for layout in CheckpointLayout:
            self._save(layout)
        self._dcp_save()
        self._whole_save()
        self.expected = [_local(tensor).clone() for tensor in self._state().values()]
        self.bytes = sum(path.stat().st_size for path in self._step(CheckpointLayout.sharded).iterdir())
        self.model_bytes = sum(p.numel() * p.element_size() for p in model.encoder.parameters())
        self.saves: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "a plain copy": (partial(self._gone, "copy"), self._copy),
            "sharded": (partial(self._gone, "sharded"), partial(self._save, CheckpointLayout.sharded)),
            "full": (partial(self._gone, "full"), partial(self._save, CheckpointLayout.full)),
            "sharded, beside training": (partial(self._gone, "beside"), self._save_beside),
            "DCP": (partial(self._gone, "dcp"), self._dcp_save),
            "whole on rank 0, save_file, fsync": (partial(self._gone, "whole"), self._whole_save),
        }
        self.reads: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "a plain copy of it": (partial(self._gone, "copy"), self._copy),
            "sharded, checksums compared": (self._spoil, partial(self._resume, CheckpointLayout.sharded)),
            "full, checksums compared": (self._spoil, partial(self._resume, CheckpointLayout.full)),
            "DCP, no checksums": (self._spoil, self._dcp_load),
            "load_file on every rank": (self._spoil, self._whole_load),
        }
        self.exports: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "whole on rank 0, save_file": (partial(self._gone, "theirs"), self._export_whole),
            "streamed, every rank its rows": (partial(self._gone, "ours.tmp"), self._export),
        }

    @property
    def all(self) -> list[str]:
        return [*self.saves, *self.reads, *self.exports]

    def require_read(self, name: str) -> None:
        """See that the model and its optimiser are what was saved."""
        found = [_local(tensor) for tensor in self._state().values()]
        same = name.startswith("a plain") or all(map(torch.equal, found, self.expected))
        require(same, f"checkpoints: {name} read something else than was saved")

    def _state(self) -> dict[str, Any]:
        return get_model_state_dict(self.run.module) | self._optimizer_state()

    def _optimizer_state(self) -> dict[str, Any]:
        state = get_optimizer_state_dict(self.run.module, self.run.optimizer, options=FLAT)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _spoil(self) -> None:
        with torch.no_grad():
            for tensor in self._state().values():
                _local(tensor).zero_()

    def _gone(self, name: str) -> None:
        if self.world.is_main:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.world.barrier()

    def _step(self, layout: CheckpointLayout) -> Path:
        return step_path(self.folder / layout.value, 1)

    def _copy(self) -> None:
        if self.world.is_main:
            (self.folder / "copy").mkdir(exist_ok=True)
            for path in self._step(CheckpointLayout.sharded).iterdir():
                shutil.copyfile(path, self.folder / "copy" / path.name)
                _flush(self.folder / "copy" / path.name)

    def _save(self, layout: CheckpointLayout) -> None:
        with _checkpoints(self.world, self.folder / layout.value, layout, asynchronous=False) as checkpoints:
            checkpoints.save(self.run.module, self.run.optimizer, {"step": 1})

    def _save_beside(self) -> None:
        with _checkpoints(
            self.world, self.folder / "beside", CheckpointLayout.sharded, asynchronous=True
        ) as checkpoints:
            checkpoints.save(self.run.module, self.run.optimizer, {"step": 1})

    def _resume(self, layout: CheckpointLayout) -> None:
        with _checkpoints(self.world, self.folder / layout.value, layout, asynchronous=False) as checkpoints:
            newest = checkpoints.newest()
            require(newest is not None, "checkpoints: nothing to resume from")
            if newest is not None:
                checkpoints.resume(newest, self.run.module, self.run.optimizer)

    def _dcp_save(self) -> None:
        state_dict_saver.save(self._state(), checkpoint_id=self.folder / "dcp")

    def _dcp_load(self) -> None:
        state_dict_loader.load(self._state(), checkpoint_id=self.folder / "dcp")  # in place

    def _whole_save(self) -> None:
        model = get_model_state_dict(self.run.module, options=WHOLE)
        state = model | get_optimizer_state_dict(self.run.module, self.run.optimizer, options=WHOLE)
        if self.world.is_main:
            (self.folder / "whole").mkdir(exist_ok=True)
            path = self.folder / "whole" / "all.safetensors"
            save_file({name: value for name, value in state.items() if isinstance(value, Tensor)}, path)
            _flush(path)

    def _whole_load(self) -> None:
        found: dict[str, Any] = load_file(self.folder / "whole" / "all.safetensors")
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.run.module, self.run.optimizer)
        for name, state in optimizer["state"].items():
            optimizer["state"][name] = {key: found.pop(f"state.{name}.{key}") for key in state}
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.run.module, found, options=options)
        set_optimizer_state_dict(self.run.module, self.run.optimizer, optimizer, options=options)

    def _export(self) -> None:
        pieces = live_weights(self.encoder)
        export = plan_export(self.folder / "ours", self.architecture, pieces, torch.float32, ExportConfig())
        if self.world.is_main:
            export.begin()
        self.world.barrier()
        export.write(pieces.rows, main=self.world.is_main)

    def _export_whole(self) -> None:
        state: dict[str, Any] = get_model_state_dict(self.encoder, options=WHOLE)
        if self.world.is_main:
            shutil.copytree(self.architecture, self.folder / "theirs")
            save_file(state, self.folder / "theirs" / "model.safetensors")
            _flush(self.folder / "theirs" / "model.safetensors")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
