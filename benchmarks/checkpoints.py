"""Saving, resuming and exporting on two ranks, compared with a plain file copy, DCP and full state dicts."""

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

from benchmarks.comparison import OPTIM, make_step_context
from benchmarks.inputs import MINILM, train_data
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.step_directory import step_path
from embedtrain.config.recipe import (
    CheckpointConfig,
    CheckpointLayout,
    ExportConfig,
    ParallelConfig,
    Pooling,
    Precision,
    Strategy,
)
from embedtrain.distributed.world import World
from embedtrain.formats.export import live_weights, plan_export
from embedtrain.formats.weights import write_architecture
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import StepContext, train_step

RANKS, PAIRS, STEPS, MB = 2, 4, 6, 10**6
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
TITLE = f"Checkpoints of a BERT of four layers, {RANKS} ranks, fsdp"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """One call: wall seconds until the last rank ends, CPU seconds of all ranks, maximal memory growth in MB."""

    seconds: float
    cpu_seconds: float
    extra: float


def measure() -> str:
    """Return all tables; every round reads the saved state again and compares it."""
    save_cost, operations = on_ranks(RANKS, _run)[0]
    return f"{save_cost}\n\n{operations}"


def _run(rank: int, folder: Path) -> tuple[str, str]:
    with world_of(RANKS, rank, folder / "store", min_gpus=RANKS) as world:
        bert = {"model_type": "bert", **SIZES}
        model = load_model(
            DenseOptions(config=bert, tokenizer=MINILM, pooling=Pooling.mean, max_length=256),
            ParallelConfig(strategy=Strategy.fsdp, precision=Precision.fp32),
            world,
            seed=0,
        )
        run = make_step_context(model, world, OPTIM)
        data = train_data(PAIRS, model.tokenizer)

        def step(number: int) -> None:
            batch = data.batch(number)
            train_step(run, make_rank_batch(batch, world.rank, world.size, model.tokenizer, ChunkOptions(16384)))

        step(0)
        return _save_cost(world, run, folder, step), _operation_tables(world, model, run, folder)


def _checkpoints(world: World, root: Path, layout: CheckpointLayout, *, asynchronous: bool) -> Checkpointer:
    config = CheckpointConfig(layout=layout, asynchronous=asynchronous, keep=1)
    return Checkpointer(root, config, world, metadata={}, log=print)


def _save_cost(world: World, run: StepContext, folder: Path, step: Callable[[int], None]) -> str:
    """Table of the cost of a checkpoint: STEPS steps without a save, and STEPS steps with a save before the first."""
    modes = {"none": None, "false": False, "true": True}
    save_seconds: dict[str, list[float]] = {name: [] for name in modes}
    step_seconds: dict[str, list[float]] = {name: [] for name in modes}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in modes}
    for round_number in range(ROUNDS + 1):
        for position in range(len(modes)):
            name = list(modes)[(position + round_number) % len(modes)]
            asynchronous = modes[name]
            world.barrier()
            cpu_start = time.process_time()
            with _checkpoints(
                world, folder / "asynchronous", CheckpointLayout.sharded, asynchronous=bool(asynchronous)
            ) as checkpoints:
                start = time.perf_counter()
                if asynchronous is not None:
                    checkpoints.save(run.module, run.optimizer, {"step": 1})
                saved = time.perf_counter()
                for index in range(STEPS):
                    step(round_number * STEPS + index)
                end = time.perf_counter()
            if round_number:
                save_seconds[name].append(saved - start)
                step_seconds[name].append((end - saved) / STEPS)
                cpu_seconds[name].append(sum(world.gather(time.process_time() - cpu_start)) / STEPS)
    step_wall, step_cpu = statistics.median(step_seconds["none"]), statistics.median(cpu_seconds["none"])
    rows = []
    for name in ("false", "true"):
        wait, extra_cpu = (
            statistics.median(save_seconds[name]),
            sorted(STEPS * (s - step_cpu) for s in cpu_seconds[name]),
        )
        relative_cpu = _spread([s / step_cpu for s in extra_cpu])
        rows.append([name, f"{step_wall:.2f}", f"{wait:.2f}", f"{wait / step_wall:.2f}", relative_cpu])
    header = ["checkpoint.asynchronous", "step, wall s", "training waits, wall s", "wait / step"]
    return markdown([*header, "extra CPU time of all ranks / CPU time of a step"], rows)


def _operation_tables(world: World, model: LoadedModel, run: StepContext, folder: Path) -> str:
    """Tables of all ways to save, read and export, alternating which goes first; speed is file bytes per second."""
    operations = _Operations(world, model, run, folder)
    costs: dict[str, list[Cost]] = {name: [] for name in operations.names}
    for round_number in range(ROUNDS + 1):
        for group in (
            operations.saves,
            operations.reads,
            operations.exports,
        ):  # reads use the files saved in this round
            for position in range(len(group)):
                name = list(group)[(position + round_number) % len(group)]
                prepare, call = group[name]
                prepare()
                cost = _cost(world, call)
                if name in operations.reads:
                    operations.require_read(name)
                if round_number:
                    costs[name].append(cost)
    return "\n\n".join(
        _table(action, list(group), costs, size, operations.model_bytes)
        for action, group, size in (
            ("saving", operations.saves, operations.bytes),
            ("reading", operations.reads, operations.bytes),
            ("exporting", operations.exports, operations.model_bytes),
        )
    )


def _table(action: str, names: list[str], costs: dict[str, list[Cost]], size: int, model_bytes: int) -> str:
    rows = []
    for name in names:
        ratios = sorted(b.seconds / a.seconds for a, b in zip(costs[name], costs[names[0]], strict=True))
        extra = statistics.median(cost.extra for cost in costs[name])
        seconds = statistics.median(cost.seconds for cost in costs[name])
        cpu = statistics.median(cost.cpu_seconds for cost in costs[name])
        metrics = (f"{seconds:.2f}", f"{size / MB / seconds:,.0f}", _spread(ratios), f"{cpu:.2f}", f"{extra:,.0f}")
        rows.append([name, *metrics, f"{extra * MB / model_bytes:.2f}"])
    header = [f"{action} {size / MB:,.0f} MB", "wall s", "MB/s", f"speed relative to {names[0]}", "CPU s, all ranks"]
    return markdown([*header, "max extra MB per rank", f"relative to the model's {model_bytes / MB:,.0f} MB"], rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def _cost(world: World, call: Callable[[], None]) -> Cost:
    with _memory_growth() as growth:
        world.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        world.barrier()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    seconds_per_rank, cpu_per_rank, growth_per_rank = zip(*world.gather((seconds, cpu_seconds, growth[0])), strict=True)
    return Cost(max(seconds_per_rank), sum(cpu_per_rank), max(growth_per_rank))


@contextmanager
def _memory_growth() -> Iterator[list[float]]:
    """Maximal growth of this process's anonymous memory in the block, in MB; sampled every five milliseconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed before must not hide new allocations
    before = _rss_anon()
    growth, stop = [0.0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            growth[0] = max(growth[0], _rss_anon() - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield growth
    stop.set()
    sampler.join()


def _rss_anon() -> float:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    require(match is not None, "this kernel does not report RssAnon")
    return int(match[1]) * 1024 / MB if match else 0.0


class _Operations:
    """The measured operations by name, each with a preparation that is not measured."""

    def __init__(self, world: World, model: LoadedModel, run: StepContext, folder: Path) -> None:
        self.world, self.run, self.encoder, self.folder = world, run, model.encoder, folder
        self.architecture = folder / "architecture"
        if world.is_main:
            write_architecture(self.architecture, model.source, model.tokenizer)
        for layout in CheckpointLayout:
            self._save(layout)
        self._dcp_save()
        self._full_state_save()
        self.expected = [_local(tensor).clone() for tensor in self._state().values()]
        self.bytes = sum(path.stat().st_size for path in self._step(CheckpointLayout.sharded).iterdir())
        self.model_bytes = sum(p.numel() * p.element_size() for p in model.encoder.parameters())
        self.saves: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "a plain copy": (partial(self._delete, "copy"), self._copy),
            "sharded": (partial(self._delete, "sharded"), partial(self._save, CheckpointLayout.sharded)),
            "full": (partial(self._delete, "full"), partial(self._save, CheckpointLayout.full)),
            "sharded, asynchronous": (partial(self._delete, "asynchronous"), self._save_asynchronously),
            "DCP": (partial(self._delete, "dcp"), self._dcp_save),
            "full state dict on rank 0, save_file, fsync": (partial(self._delete, "full_state"), self._full_state_save),
        }
        self.reads: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "a plain copy of it": (partial(self._delete, "copy"), self._copy),
            "sharded, checksums compared": (self._zero_state, partial(self._resume, CheckpointLayout.sharded)),
            "full, checksums compared": (self._zero_state, partial(self._resume, CheckpointLayout.full)),
            "DCP, no checksums": (self._zero_state, self._dcp_load),
            "load_file on every rank": (self._zero_state, self._full_state_load),
        }
        self.exports: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "full state dict on rank 0, save_file": (partial(self._delete, "theirs"), self._export_full_state),
            "streamed, each rank writes its rows": (partial(self._delete, "ours.tmp"), self._export),
        }

    @property
    def names(self) -> list[str]:
        return [*self.saves, *self.reads, *self.exports]

    def require_read(self, name: str) -> None:
        """Require that the model and its optimizer have the saved values."""
        tensors = [_local(tensor) for tensor in self._state().values()]
        equal = name.startswith("a plain") or all(map(torch.equal, tensors, self.expected))
        require(equal, f"checkpoints: {name} read values that differ from the saved ones")

    def _state(self) -> dict[str, Any]:
        return get_model_state_dict(self.run.module) | self._optimizer_state()

    def _optimizer_state(self) -> dict[str, Any]:
        state = get_optimizer_state_dict(self.run.module, self.run.optimizer, options=FLAT)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _zero_state(self) -> None:
        with torch.no_grad():
            for tensor in self._state().values():
                _local(tensor).zero_()

    def _delete(self, name: str) -> None:
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

    def _save_asynchronously(self) -> None:
        with _checkpoints(
            self.world, self.folder / "asynchronous", CheckpointLayout.sharded, asynchronous=True
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

    def _full_state_save(self) -> None:
        model = get_model_state_dict(self.run.module, options=FULL_STATE)
        state = model | get_optimizer_state_dict(self.run.module, self.run.optimizer, options=FULL_STATE)
        if self.world.is_main:
            (self.folder / "full_state").mkdir(exist_ok=True)
            path = self.folder / "full_state" / "all.safetensors"
            save_file({name: value for name, value in state.items() if isinstance(value, Tensor)}, path)
            _flush(path)

    def _full_state_load(self) -> None:
        loaded: dict[str, Any] = load_file(self.folder / "full_state" / "all.safetensors")
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.run.module, self.run.optimizer)
        for name, state in optimizer["state"].items():
            optimizer["state"][name] = {key: loaded.pop(f"state.{name}.{key}") for key in state}
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.run.module, loaded, options=options)
        set_optimizer_state_dict(self.run.module, self.run.optimizer, optimizer, options=options)

    def _export(self) -> None:
        weights = live_weights(self.encoder)
        unfinished = self.folder / "ours.tmp"
        config = ExportConfig()
        export = plan_export(self.folder / "ours", unfinished, self.architecture, weights, torch.float32, config)
        if self.world.is_main:
            export.begin()
        self.world.barrier()
        export.write(weights.rows, main=self.world.is_main)

    def _export_full_state(self) -> None:
        state: dict[str, Any] = get_model_state_dict(self.encoder, options=FULL_STATE)
        if self.world.is_main:
            shutil.copytree(self.architecture, self.folder / "theirs")
            save_file(state, self.folder / "theirs" / "model.safetensors")
            _flush(self.folder / "theirs" / "model.safetensors")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
