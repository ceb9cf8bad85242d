"""Planned memory compared with real training steps: new processes, real weights, Adam."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.plan import LLAMA, XLMR, Case, _environment, _MemoryGrowth, compare
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import LoraConfig, ParallelConfig, Precision, Strategy
from embedtrain.distributed.collectives import exchange_rows
from embedtrain.distributed.world import World
from embedtrain.inference.exact import unit_vectors
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.types import BatchInfo, GlobalRows, Sizes
from embedtrain.planning.memory import ClusterSpec, StepWorkload, loss_memory
from tests.planning.models import spec_of


def within(case: Case) -> None:
    found = compare(case)
    print(case.name, found)
    assert found.planned == pytest.approx(found.measured, rel=0.15)
    assert found.measured > 2e8, "too little to tell a model from what else a process takes"


def options(strategy: Strategy, precision: Precision, **more: bool) -> ParallelConfig:
    return ParallelConfig(strategy=strategy, precision=precision, **more)


@pytest.mark.slow
def test_a_plan_is_what_a_step_takes():
    """56 million weights and one chunk of tokens."""
    parallel = options(Strategy.ddp, Precision.fp32)
    within(Case(name="XLM-R", config=XLMR, parallel=parallel, rows=4, chunk_tokens=512))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "parallel", "more"),
    [
        (XLMR, 1, options(Strategy.ddp, Precision.bf16), {"rows": 16}),
        (XLMR, 2, options(Strategy.ddp, Precision.fp32), {"rows": 16}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=True), {"rows": 16}),
        (XLMR, 2, options(Strategy.fsdp, Precision.bf16, reshard_after_forward=True), {}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=False), {}),
        (XLMR, 2, options(Strategy.fsdp, Precision.fp32, activation_checkpointing=True), {}),
        (LLAMA, 2, options(Strategy.fsdp, Precision.fp32, reshard_after_forward=True), {"rows": 16}),
        (LLAMA, 1, options(Strategy.ddp, Precision.bf16), {"lora": LoraConfig(rank=16)}),
    ],
)
def test_plans_of_other_layouts_are_too(config, ranks, parallel, more):
    within(Case(name=config["model_type"], config=config, parallel=parallel, ranks=ranks, **more))


PAGES, PAGE_RANKS, PAGE_VECTORS, DIMENSION = 64, 8, (30, 1030), 128
IMPLEMENTATIONS = [Implementation.auto, Implementation.tiled, Implementation.ring]


@pytest.mark.slow
def test_the_loss_of_pages_takes_what_is_planned():
    """64 pages of about 1,030 vectors on 8 ranks: gathered, as is chosen for so few, and around the ring."""
    with _environment():
        peaks = np.max(on_ranks(PAGE_RANKS, partial(_losses_of_pages, PAGE_RANKS)), axis=0)
    model = replace(spec_of(XLMR), vectors=PAGE_VECTORS, dimension=DIMENSION)
    cluster = ClusterSpec(ranks=PAGE_RANKS, per_node=PAGE_RANKS, memory=2**40, gpu=False)
    for implementation, measured in zip(IMPLEMENTATIONS, peaks, strict=True):
        work = StepWorkload(rows=PAGES, loss=InfoNCEConfig(implementation=implementation))
        planned = loss_memory(model, cluster, work, 2 * PAGES // PAGE_RANKS)
        print(f"{implementation.value}: planned {planned / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB")
        assert planned == pytest.approx(measured, rel=0.1), implementation


def _losses_of_pages(ranks: int, rank: int, folder: Path) -> list[float]:
    with world_of(ranks, rank, folder / "store", min_gpus=ranks) as world:
        _loss_of_pages(world, ranks, Implementation.auto)  # allocates first what a process never frees
        peaks = []
        for implementation in IMPLEMENTATIONS:
            gc.collect()
            memory = _MemoryGrowth(world.device)
            _loss_of_pages(world, PAGES, implementation)
            peaks.append(memory.peak())
        return peaks


def _loss_of_pages(world: World, pages: int, implementation: Implementation) -> None:
    """As in a step: vectors of chunks, which are sent to the ranks of their rows, and their gradients sent back."""
    texts = pages // world.size
    mine, keys = slice(world.rank * texts, (world.rank + 1) * texts), torch.arange(pages)
    sizes = np.full(pages, PAGE_VECTORS[0]), PAGE_VECTORS[1] + 5 * (np.arange(pages) % 7 - 3)
    batch_info = BatchInfo(
        owners=torch.arange(texts),
        query_keys=keys,
        document_keys=keys,
        global_rows=GlobalRows(
            rank=world.rank,
            num_rows=[texts] * world.size,
            num_documents=np.ones(pages, dtype=np.int64),
            query_keys=keys.numpy(),
            document_keys=keys.numpy(),
            sizes=(Sizes(*sizes),),
        ),
    )
    of_queries, of_documents = (int(size[mine].sum()) for size in sizes)
    chunks = [unit_vectors(torch.randn(number, DIMENSION)) for number in (of_queries, of_documents)]
    counts = [0] * world.size
    counts[world.rank] = of_queries + of_documents
    rows = exchange_rows(torch.cat(chunks), counts, counts).requires_grad_()
    parts = [Part(rows[:of_queries], sizes[0][mine]), Part(rows[of_queries:], sizes[1][mine])]
    loss = InfoNCE(InfoNCEConfig(implementation=implementation), MaxSim(mean=False))
    loss(*(Encoded((part,)) for part in parts), batch_info).local_loss.backward()
    assert rows.grad is not None
    exchange_rows(rows.grad, counts, counts)
