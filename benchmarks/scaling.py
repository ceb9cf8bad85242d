"""One global batch on an increasing number of ranks of this machine: tokens per second relative to one rank."""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.comparison import TOLERANCE, make_step_context
from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from benchmarks.workloads import Workload, short_pairs
from embedtrain.config.recipe import ParallelConfig, Precision, Strategy, TrainConfig
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch, pass_overhead
from embedtrain.training.step import train_step

WORKLOAD = short_pairs()
STRATEGIES = (Strategy.ddp, Strategy.fsdp)
TITLE = f"Training all-MiniLM-L6-v2 on more ranks, a global batch of {WORKLOAD.num_pairs} {WORKLOAD.name}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a rank's steps, and the tokens of all ranks."""

    wall: float
    cpu: float
    tokens: int
    losses: tuple[float, ...]


def sizes() -> list[int]:
    """1, 2, 4 and 8, up to the number of GPUs, or of cores without a GPU."""
    available = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return [size for size in (1, 2, 4, 8) if size <= available]


def measure(workload: Workload = WORKLOAD, rounds: int = ROUNDS) -> str:
    """Run each case in new processes in every round, alternating which goes first. Ranks wait, so time is wall time."""
    precision = Precision.bf16 if torch.cuda.is_available() else Precision.fp32
    cases = list(itertools.product(STRATEGIES, sizes()))
    results: list[list[list[Measured]]] = [[] for _ in cases]
    for round_number in range(rounds):
        for position in range(len(cases)):
            index = (position + round_number) % len(cases)
            strategy, size = cases[index]
            results[index].append(on_ranks(size, partial(_on_rank, workload, strategy, precision, size)))
    first = results[0][0][0]
    for ranks in (ranks for rounds_of_case in results for ranks in rounds_of_case):
        difference = max(abs(a - b) for rank in ranks for a, b in zip(rank.losses, first.losses, strict=True))
        require(difference <= TOLERANCE[precision], f"scaling: losses differ by {difference}: {ranks}")
        require(all(rank.tokens == first.tokens for rank in ranks), "scaling: token counts differ")
    rows = [
        _row(strategy, size, case_results, results[cases.index((strategy, 1))])
        for (strategy, size), case_results in zip(cases, results, strict=True)
    ]
    header = ["parallel.strategy", "ranks", "real tokens / wall s, all ranks", "times 1 rank", "CPU s, times 1 rank"]
    return markdown(header, rows)


def _row(
    strategy: Strategy, size: int, results: list[list[Measured]], single: list[list[Measured]]
) -> Sequence[object]:
    speed = statistics.median(ranks[0].tokens / _wall(ranks) for ranks in results)
    times = sorted(_wall(one_rank) / _wall(ranks) for ranks, one_rank in zip(results, single, strict=True))
    cpu = statistics.median(_cpu(ranks) / _cpu(one_rank) for ranks, one_rank in zip(results, single, strict=True))
    speedup = f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
    return [strategy.value, size, f"{speed:,.0f}", speedup, f"{cpu:.2f}"]


def _wall(ranks: list[Measured]) -> float:
    return max(rank.wall for rank in ranks)


def _cpu(ranks: list[Measured]) -> float:
    return sum(rank.cpu for rank in ranks)


def _on_rank(
    workload: Workload, strategy: Strategy, precision: Precision, size: int, rank: int, folder: Path
) -> Measured:
    with world_of(size, rank, folder / "store", min_gpus=max(sizes())) as world:
        parallel = ParallelConfig(strategy=strategy, precision=precision)
        model = load_model(DenseOptions(path=MINILM), parallel, world, seed=0)
        run, data = make_step_context(model, world), workload.data(workload.steps + 1, model.tokenizer)
        overhead = pass_overhead(on_gpu=world.device.type == "cuda", sharded=model.layout.shard > 1)
        options = ChunkOptions(TrainConfig().chunk_tokens, pass_overhead_tokens=overhead)
        train_step(run, make_rank_batch(data.batch(0), rank, size, model.tokenizer, options))  # warms up
        world.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        reports = [
            train_step(run, make_rank_batch(data.batch(step), rank, size, model.tokenizer, options))
            for step in range(1, workload.steps + 1)
        ]
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        elapsed = time.perf_counter() - start, time.process_time() - cpu_start
        return Measured(
            *elapsed, sum(report.real_tokens for report in reports), tuple(report.loss for report in reports)
        )
