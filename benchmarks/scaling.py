"""One global batch on more and more ranks of this machine: tokens a second of all together over those of one."""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from benchmarks.sides import trainable
from benchmarks.workloads import Workload, short_pairs
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision, Strategy, TrainConfig
from embedtrain.loading.load import load_model
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch, pass_overhead
from embedtrain.training.step import train_step

WORKLOAD = short_pairs()
STRATEGIES = (Strategy.ddp, Strategy.fsdp)
TITLE = f"Training all-MiniLM-L6-v2 on more ranks, a global batch of {WORKLOAD.num_pairs} {WORKLOAD.name}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank took for the steps; tokens are those of all ranks."""

    wall: float
    cpu: float
    tokens: int
    losses: tuple[float, ...]


def sizes() -> list[int]:
    """1, 2, 4, ... as far as there are GPUs, or cores, for a rank each."""
    most = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return [size for size in (1, 2, 4, 8) if size <= most]


def measure(workload: Workload = WORKLOAD, rounds: int = ROUNDS) -> str:
    """Every round each layout in fresh processes, who goes first in turns; by the wall, as ranks wait for others."""
    precision = Precision.bf16 if torch.cuda.is_available() else Precision.fp32
    cases = list(itertools.product(STRATEGIES, sizes()))
    found: list[list[list[Measured]]] = [[] for _ in cases]
    for number in range(rounds):
        for turn in range(len(cases)):
            place = (turn + number) % len(cases)
            strategy, size = cases[place]
            found[place].append(on_ranks(size, partial(_on_rank, workload, strategy, precision, size)))
    first = found[0][0][0]
    for ranks in (ranks for side in found for ranks in side):
        apart = max(abs(a - b) for one in ranks for a, b in zip(one.losses, first.losses, strict=True))
        require(apart <= (1e-5 if precision is Precision.fp32 else 2e-2), f"scaling: losses are {apart} apart: {ranks}")
        require(all(one.tokens == first.tokens for one in ranks), "scaling: not the same tokens")
    rows = [
        _row(strategy, size, side, found[cases.index((strategy, 1))])
        for (strategy, size), side in zip(cases, found, strict=True)
    ]
    header = ["parallel.strategy", "ranks", "real tokens / wall s, all ranks", "times 1 rank", "CPU s, times 1 rank"]
    return markdown(header, rows)


def _row(strategy: Strategy, size: int, side: list[list[Measured]], alone: list[list[Measured]]) -> Sequence[object]:
    speed = statistics.median(ranks[0].tokens / _wall(ranks) for ranks in side)
    times = sorted(_wall(one) / _wall(ranks) for ranks, one in zip(side, alone, strict=True))
    work = statistics.median(_cpu(ranks) / _cpu(one) for ranks, one in zip(side, alone, strict=True))
    told = f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
    return [strategy.value, size, f"{speed:,.0f}", told, f"{work:.2f}"]


def _wall(ranks: list[Measured]) -> float:
    return max(one.wall for one in ranks)


def _cpu(ranks: list[Measured]) -> float:
    return sum(one.cpu for one in ranks)


def _on_rank(
    workload: Workload, strategy: Strategy, precision: Precision, size: int, rank: int, folder: Path
) -> Measured:
    with world_of(size, rank, folder / "store", most=max(sizes())) as world:
        parallel = ParallelConfig(strategy=strategy, precision=precision)
        model = load_model(ModelConfig(path=MINILM), parallel, world, seed=0)
        run, data = trainable(model, world), workload.data(workload.steps + 1, model.tokenizer)
        cost = pass_overhead(on_gpu=world.device.type == "cuda", sharded=model.layout.shard > 1)
        cutting = ChunkOptions(TrainConfig().chunk_tokens, pass_overhead_tokens=cost)
        train_step(run, make_rank_batch(data.batch(0), rank, size, model.tokenizer, cutting))  # warms up
        world.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        reports = [
            train_step(run, make_rank_batch(data.batch(step), rank, size, model.tokenizer, cutting))
            for step in range(1, workload.steps + 1)
        ]
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        taken = time.perf_counter() - wall, time.process_time() - cpu
        return Measured(*taken, sum(one.real_tokens for one in reports), tuple(one.loss for one in reports))
