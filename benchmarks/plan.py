"""Memory that a plan predicts, compared with the peak memory of real training steps on this machine."""

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
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import LoraConfig, ParallelConfig, Pooling, Precision, Strategy
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, GlobalBatch, Tokens
from embedtrain.distributed.sharding import shard_encoder, warm_up
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.adapters import add_adapters
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.packing import enable_packing
from embedtrain.planning.memory import ClusterSpec, StepWorkload
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.strategy import choose_layout
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step

TITLE = "Planned memory and peak memory of training steps, MB of one rank"
STEPS = 2  # Adam's moments exist from the second step on
# malloc retains freed memory; these thresholds return large blocks to the system at once.
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
    "vocab_size": 24000,  # the embedding is an FSDP group of its own
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to plan and to measure."""

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
    """Planned and measured bytes of one rank."""

    planned: float
    measured: float
    layout: str
    moment: str


def cases() -> list[Case]:
    gpu = torch.cuda.is_available()
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    xlmr = {**XLMR, **large, "vocab_size": 250002, "max_position_embeddings": 514} if gpu else XLMR
    size: dict[str, Any] = {"rows": 256, "chunk_tokens": 32768, "length": 256} if gpu else {}
    replicated, sharded = (
        partial(ParallelConfig, strategy=strategy, precision=Precision.bf16)
        for strategy in (Strategy.ddp, Strategy.fsdp)
    )
    all_cases = [
        Case(name="XLM-R", config=xlmr, parallel=replicated(precision=Precision.fp32), **size),
        Case(
            name="XLM-R",
            config=xlmr,
            parallel=replicated(),
            **{**size, "rows": 2 * _rows(size)},
        ),
        Case(name="Llama", config=LLAMA, parallel=replicated(), **size),
        Case(name="Llama, LoRA", config=LLAMA, parallel=replicated(), lora=LoraConfig(rank=16), **size),
        Case(name="XLM-R", config=xlmr, parallel=replicated(activation_checkpointing=True), **size),
    ]
    ranks = torch.cuda.device_count() if gpu else 2
    if ranks > 1:
        all_cases += [
            Case(name="XLM-R", config=xlmr, parallel=sharded(precision=Precision.fp32), ranks=ranks, **size),
            Case(name="Llama", config=LLAMA, parallel=sharded(reshard_after_forward=True), ranks=ranks, **size),
            Case(name="Llama", config=LLAMA, parallel=sharded(reshard_after_forward=False), ranks=ranks, **size),
        ]
    return all_cases


def measure(_: str = "", *, small: bool = False) -> str:
    """Measure all cases; `small`: one tiny model."""
    rows = []
    for case in [tiny_case()] if small else cases():
        result = compare(case)
        ratio = f"{result.planned / result.measured:.2f}"
        names = [f"{case.name}, {case.parallel.precision.value}", case.ranks, result.layout]
        rows.append([*names, f"{result.planned / 1e6:,.0f}", f"{result.measured / 1e6:,.0f}", ratio, result.moment])
    return markdown(["model", "ranks", "layout", "planned", "measured", "ratio", "phase of the planned peak"], rows)


def tiny_case() -> Case:
    """A case that takes a second."""
    tiny = {**XLMR, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    ddp = ParallelConfig(strategy=Strategy.ddp, precision=Precision.bf16)
    return Case(name="tiny", config=tiny, parallel=ddp, rows=4)


def compare(case: Case) -> Compared:
    """Plan a case, train it for a few steps in new processes, and return the rank with the highest peak."""
    with _environment():
        results = on_ranks(case.ranks, partial(_on_rank, case))
    return max(results, key=lambda result: result.measured)


def _on_rank(case: Case, rank: int, folder: Path) -> Compared:
    with world_of(case.ranks, rank, folder / "store", min_gpus=case.ranks) as world:
        return compare_here(case, world)


def compare_here(case: Case, world: World) -> Compared:
    """Plan a case and train it on the ranks of this process."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    # Allocate first what a process never frees.
    _train(replace(case, config={**case.config, **small, "num_attention_heads": 4}), world)
    gc.collect()
    memory = _MemoryGrowth(world.device)
    planned, layout, moment = _train(case, world)
    return Compared(planned, memory.peak(), layout, moment)


def _train(case: Case, world: World) -> tuple[float, str, str]:
    """Plan and train; return the planned bytes, layout and phase."""
    encoder = build_encoder(open_model_source(DenseOptions(config=case.config, pooling=Pooling.mean)))
    if case.lora.on:
        add_adapters(encoder, case.lora, None, torch.bfloat16)
    blocks, gpu, parallel = find_blocks(encoder), world.device.type == "cuda", case.parallel
    enable_packing(encoder)
    spec = model_spec(encoder, blocks, precision=parallel.precision, tokens_per_text=case.length, gpu=gpu, packed=True)
    cluster = ClusterSpec(ranks=world.size, per_node=world.size, memory=2**40, gpu=gpu)
    rows = case.rows * world.size
    workload = StepWorkload(rows=rows, tokens_per_text=case.length, chunk_tokens=case.chunk_tokens)
    defaults = {"reshard_after_forward": parallel.reshard_after_forward is not False}
    defaults["activation_checkpointing"] = parallel.activation_checkpointing or False
    choice = choose_layout(replace(parallel, **defaults), cluster, spec, workload, always_measure=True)
    assert choice.best is not None
    shard_encoder(encoder, blocks, choice.layout, parallel, world.device)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0.0, 0.02)
    dummy = Chunk.of_one_token(world.device)
    warm_up(encoder, dummy)
    optim, loss = OptimConfig(), InfoNCE(InfoNCEConfig())
    optimizer = build_optimizer(encoder, optim)
    run = StepContext(
        module=EncoderWithLoss(encoder, loss),
        schedule=Schedule(optimizer, optim, total_steps=STEPS),
        backward=Backward(encoder, loss, world, seed=0, dummy=dummy, reduce_per_step=choice.reduce_per_step),
        state=TrainState(),
    )
    texts = _Texts(rows, case.length)
    batch = GlobalBatch(0, [Example("", Documents(("",)))] * rows, tokens=texts, has_loss_columns=False)
    without_texts: Any = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    tokenizer = TextTokenizer(without_texts, case.length, packed=True)
    for _ in range(STEPS):
        train_step(run, make_rank_batch(batch, world.rank, world.size, tokenizer, ChunkOptions(case.chunk_tokens)))
    return choice.best.memory.total, choice.best.name, choice.best.memory.phase


class _Texts:
    """Tokens of texts of equal length (implements BatchTokens)."""

    def __init__(self, rows: int, length: int) -> None:
        self.num_documents = np.ones(rows, dtype=np.int64)
        self.lengths = np.full(2 * rows, length, dtype=np.int64)
        self.keys = np.arange(2 * rows, dtype=np.int64)

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        return Tokens.of([np.random.default_rng(int(text)).integers(2, 90, self.lengths[0]).tolist() for text in texts])


class _MemoryGrowth:
    """Peak memory of a rank above its memory now; mapped files are not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before, self.files = torch.cuda.memory_allocated(device), 0
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self.before, self.files = _status("VmRSS"), _status("RssFile")

    def peak(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device) - self.before)
        return float(_status("VmHWM") - self.before - (_status("RssFile") - self.files))


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _rows(size: dict[str, Any]) -> int:
    return int(size.get("rows", Case.rows))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the allocator's environment variables for the ranks that are started in the block."""
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
