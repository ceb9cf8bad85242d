"""What a plan says of memory beside what real training steps take at most, on this machine's ranks."""

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import markdown
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import LoraConfig, ModelConfig, OptimConfig, ParallelConfig, Pooling, Precision, Strategy
from embedtrain.data.tokens import packed
from embedtrain.data.types import GlobalBatch, Row, Tokens
from embedtrain.distributed.sharding import shard_, warm_up
from embedtrain.distributed.world import World
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.adapters import add_adapters
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.packing import enable_packing
from embedtrain.models.source import open_model_source
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.strategy import choose_layout
from embedtrain.planning.workload import ClusterSpec, StepWorkload
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step

TITLE = "A plan's memory against what training steps take at most, MB of one rank"
STEPS = 2  # Adam's moments are there from the second on
# A general allocator keeps what is freed for later; what is asked for in large pieces then goes back at once.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
XLMR = {
    "model_type": "xlm-roberta",
    "vocab_size": 8000,
    "hidden_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 130,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,  # a CPU's attention is not fused with dropout
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 24000,  # an embedding that is a group of its own
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training to plan and to measure."""

    name: str
    config: dict[str, Any]
    parallel: ParallelConfig
    ranks: int = 1
    lora: LoraConfig = field(default_factory=LoraConfig)
    rows: int = 8  # of each rank
    chunk_tokens: int = 1024
    length: int = 64


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of one rank."""

    planned: float
    measured: float
    layout: str
    moment: str


def cases() -> list[Case]:
    large = torch.cuda.is_available()
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    xlmr = {**XLMR, **wide, "vocab_size": 250002, "max_position_embeddings": 514} if large else XLMR
    size: dict[str, Any] = {"rows": 256, "chunk_tokens": 32768, "length": 256} if large else {}
    whole, sharded = partial(ParallelConfig, strategy=Strategy.ddp), partial(ParallelConfig, strategy=Strategy.fsdp)
    found = [
        Case(name="XLM-R", config=xlmr, parallel=whole(precision=Precision.fp32), **size),
        Case(name="XLM-R", config=xlmr, parallel=whole(precision=Precision.bf16), **{**size, "rows": 2 * _rows(size)}),
        Case(name="Llama", config=LLAMA, parallel=whole(), **size),
        Case(name="Llama, LoRA", config=LLAMA, parallel=whole(), lora=LoraConfig(rank=16), **size),
        Case(name="XLM-R", config=xlmr, parallel=whole(activation_checkpointing=True), **size),
    ]
    several = torch.cuda.device_count() if large else 2
    if several > 1:
        found += [
            Case(name="XLM-R", config=xlmr, parallel=sharded(precision=Precision.fp32), ranks=several, **size),
            Case(name="Llama", config=LLAMA, parallel=sharded(reshard_after_forward=True), ranks=several, **size),
            Case(name="Llama", config=LLAMA, parallel=sharded(reshard_after_forward=False), ranks=several, **size),
        ]
    return found


def measure() -> str:
    rows = []
    for case in cases():
        found = compare(case)
        ratio = f"{found.planned / found.measured:.2f}"
        told = [f"{case.name}, {case.parallel.precision.value}", case.ranks, found.layout]
        rows.append([*told, f"{found.planned / 1e6:,.0f}", f"{found.measured / 1e6:,.0f}", ratio, found.moment])
    return markdown(["model", "ranks", "layout", "planned", "measured", "ratio", "planned to be most when"], rows)


def compare(case: Case) -> Compared:
    """Plan a case, train it for some steps on fresh ranks, and take the rank that took most."""
    with _environment():
        found = on_ranks(case.ranks, partial(_on_rank, case))
    return max(found, key=lambda one: one.measured)


def _on_rank(case: Case, rank: int, folder: Path) -> Compared:
    with world_of(case.ranks, rank, folder / "store", most=case.ranks) as world:
        small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
        _trained(replace(case, config={**case.config, **small, "num_attention_heads": 4}), world)  # what stays for good
        gc.collect()
        before = _Before(world.device)
        planned, layout, moment = _trained(case, world)
        return Compared(planned, before.most(), layout, moment)


def _trained(case: Case, world: World) -> tuple[float, str, str]:
    """Train; what the plan said before."""
    encoder = build_encoder(open_model_source(ModelConfig(config=case.config, pooling=Pooling.mean)))
    if case.lora.on:
        add_adapters(encoder, case.lora, None, torch.bfloat16)
    blocks, gpu, parallel = find_blocks(encoder), world.device.type == "cuda", case.parallel
    enable_packing(encoder)
    facts = model_spec(encoder, blocks, precision=parallel.precision, tokens_per_text=case.length, gpu=gpu, packed=True)
    machines = ClusterSpec(ranks=world.size, per_node=world.size, memory=2**40, gpu=gpu)
    rows = case.rows * world.size
    work = StepWorkload(rows=rows, tokens_per_text=case.length, chunk_tokens=case.chunk_tokens)
    left_open = {"reshard_after_forward": parallel.reshard_after_forward is not False}
    left_open["activation_checkpointing"] = bool(parallel.activation_checkpointing)
    choice = choose_layout(replace(parallel, **left_open), machines, facts, work, always_measure=True)
    assert choice.best is not None
    shard_(encoder, blocks, choice.layout, parallel, world.device)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0.0, 0.02)
    warm_up(encoder, world.device)
    optim, loss = OptimConfig(), InfoNCE(InfoNCEConfig())
    optimizer = build_optimizer(encoder, optim)
    ones = torch.ones((1, 1), dtype=torch.int64)
    run = StepContext(
        world=world,
        module=EncoderWithLoss(encoder, loss),
        optimizer=optimizer,
        schedule=Schedule(optimizer, optim, total_steps=STEPS),
        backward=Backward(
            encoder, loss, world, seed=0, dummy=Tokens(ones, ones, (-1,)), reduce_per_step=choice.reduce_per_step
        ),
        optim=optim,
        state=TrainState(),
    )
    texts = _Texts(rows, case.length)
    batch = GlobalBatch(0, [Row("", ("",))] * rows, tokens=texts, has_loss_columns=False)
    tokenizer: Any = SimpleNamespace(packed=True, make_chunk=packed)
    for _ in range(STEPS):
        train_step(run, make_rank_batch(batch, world.rank, world.size, tokenizer, ChunkOptions(case.chunk_tokens)))
    return choice.best.memory.total, choice.best.name, choice.best.memory.phase


class _Texts:
    """Tokens of texts of one length; see BatchTokens."""

    def __init__(self, rows: int, length: int) -> None:
        self.num_documents = np.ones(rows, dtype=np.int64)
        self.lengths = np.full(2 * rows, length, dtype=np.int64)
        self.keys = np.arange(2 * rows, dtype=np.int64)

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.concatenate(
            [np.random.default_rng(int(text)).integers(2, 90, self.lengths[0]) for text in texts]
        ).astype(np.int32)


class _Before:
    """What a rank takes now, and then how much more it took at most; files that are mapped are not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.taken, self.files = torch.cuda.memory_allocated(device), 0
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
            self.taken, self.files = _status("VmRSS"), _status("RssFile")

    def most(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device) - self.taken)
        return float(_status("VmHWM") - self.taken - (_status("RssFile") - self.files))


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _rows(size: dict[str, Any]) -> int:
    return int(size.get("rows", Case.rows))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Ranks are started with the allocator's settings."""
    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    os.environ.update(_ALLOCATOR)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
