"""Planned memory, traffic and files of a search, compared with those of real ranks."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from embedtrain.config.evaluation import IndexConfig, ScanDtype, Unshard, VectorDtype, VectorPlacement
from embedtrain.config.recipe import Strategy
from embedtrain.distributed import collectives
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.inference import encoding_plan
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.encoding_plan import PromptedTexts, plan_encoding
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.search_costs import PLAN_BYTES, PLANNING_BYTES, SearchCosts, SearchWorkload, search_costs
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.encoded import Part
from embedtrain.planning.memory import ClusterSpec
from tests.evaluation.tiny import sentence_encoder
from tests.planning.models import spec_of
from tests.ranks import RankPool
from tests.small import text

TEXTS = [f"{text(number, 4)} {number}" for number in range(240)]
QUERIES, TOP_K = 12, 7
MODEL = {"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def planned(
    size: int, index: IndexConfig, *, gpu: bool = False, memory: int = 2**34, vectors: tuple[int, int] = (1, 1)
) -> SearchCosts:
    model = replace(spec_of(MODEL), vectors=vectors)
    cluster = ClusterSpec(ranks=size, per_node=size, memory=memory, gpu=gpu)
    work = SearchWorkload(
        documents=len(TEXTS),
        queries=QUERIES,
        top_k=TOP_K,
        tokens_per_text=7,
        tokens_per_query=7,
        chunk_tokens=64,
        unshard=Unshard.layer,
        index=index,
        search_flops=1e12,
        tokens_per_second=1e6,
    )
    return search_costs(model, ParallelLayout(Strategy.ddp, size, 1, ""), cluster, work)


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Bytes that this rank sends in all-gathers (to a ring) and to other ranks."""
    sent = [0]

    def gathered(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(out: torch.Tensor, local: torch.Tensor, *args: Any) -> Any:
            sent[0] += local.nbytes * (dist.get_world_size() - 1)
            return call(out, local, *args)

        return count

    def exchanged(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(out: torch.Tensor, rows: torch.Tensor, received: list[int], counts: list[int]) -> Any:
            others = sum(counts) - counts[dist.get_rank()]
            sent[0] += others * rows[:1].nbytes
            return call(out, rows, received, counts)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_gather", gathered(collectives._all_gather))
        patch.setattr(dist, "all_to_all_single", exchanged(dist.all_to_all_single))
        yield sent


def search(world: World, config: IndexConfig, folder: Path) -> tuple[int, int, int, int]:
    """Bytes of the index in memory, bytes sent by planning and by the search, and tokens of all texts."""
    encoder: SentenceEncoder = sentence_encoder(world, chunk_tokens=64)
    index = ShardedIndex(first_added_order(len(TEXTS)), world, config)
    with sent_bytes() as of_planning:
        plan = plan_encoding(PromptedTexts(TEXTS), encoder.tokenizer, None, 64, world)
        plan.exchange_tokens(range(len(plan)), world)
    index.add_texts(encoder, TEXTS, vector_cache=VectorCache(folder, {}))
    queries = encoder.score.search_rows(encoder.encode_all(TEXTS[:QUERIES]))
    with sent_bytes() as of_search:
        index.search(queries, TOP_K)
    store: Any = index._documents
    held = store._vectors._sealed()
    if config.place is VectorPlacement.disk:
        held = []
    if config.scan_dtype is not None:
        held += [*store._copy._sealed(), store._residuals.rows, store._scales.rows]
    tokens = sum(map(len, encoder.tokenizer.ids(TEXTS, None)))
    return sum(part.nbytes for part in held), of_planning[0], of_search[0], tokens


CONFIGS = [
    IndexConfig(),
    IndexConfig(dtype=VectorDtype.bf16),
    IndexConfig(scan_dtype=ScanDtype.int8),
    IndexConfig(scan_dtype=ScanDtype.bf16, place=VectorPlacement.disk),
    IndexConfig(place=VectorPlacement.disk),
]


@pytest.mark.quick(
    "3-fp32-None-disk",
    "2-fp32-ScanDtype.int8-auto",
    "3-fp32-ScanDtype.bf16-disk",
    "3-bf16-None-auto",
    "1-fp32-None-auto",
)
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.dtype.value}-{config.scan_dtype}-{config.place.value}"
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_traffic_and_files_are_those_of_ranks(ranks, tmp_path, size, config):
    costs = planned(size, config)
    results = ranks(size, search, config, tmp_path)
    assert sum(held for held, _, _, _ in results) == costs.memory.host_index * size
    assert costs.traffic.results == sum(sent for _, _, sent, _ in results) / size
    others, keys, tokens = (size - 1) / size, 12 * len(TEXTS), results[0][3]
    assert costs.traffic.texts == pytest.approx(others * (keys + 5 * 7 * len(TEXTS) / size))
    # Which texts a rank sends depends on their lengths.
    assert sum(sent for _, sent, _, _ in results) / size == pytest.approx(others * (keys + 5 * tokens / size), rel=0.1)
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert costs.disk <= stored <= costs.disk + 1.1 * 8 * len(TEXTS) + 400 * len(list(tmp_path.rglob("*.safetensors")))


PAGES = [
    IndexConfig(dtype=VectorDtype.fp16),
    IndexConfig(token_pooling=2),
    IndexConfig(dtype=VectorDtype.fp16, scan_dtype=ScanDtype.int8),
    IndexConfig(first_stage=4, first_stage_pooling=8),
]


def index_of_pages(world: World, config: IndexConfig) -> tuple[int, int]:
    """Bytes of the vectors of 17 tokens for each document, and of those that a search reads."""
    index = ShardedIndex(first_added_order(len(TEXTS)), world, config, MaxSim(mean=False))
    local = torch.arange(len(TEXTS))[world.rank :: world.size]
    values = torch.randn(17 * len(local), MODEL["hidden_size"], generator=torch.Generator().manual_seed(world.rank))
    part = index.stored_part(Part(values, np.full(len(local), 17)))
    index.add(EncodedShard(part, local))
    store: Any = index._documents
    store._seal()
    held = read = sum(tile.rows.values.nbytes for tile in store._tiles)
    if config.scan_dtype is not None:
        read = sum(copy.codes.nbytes + copy.scales.nbytes + copy.residuals.nbytes for copy in store._copies)
    if config.first_stage is not None:
        pooled: Any = index._first_stage._documents  # type: ignore[union-attr]
        pooled._seal()
        read = sum(tile.rows.values.nbytes for tile in pooled._tiles)
    return held, read


@pytest.mark.parametrize("config", PAGES, ids=lambda config: config.search_identity)
def test_memory_of_vectors_of_tokens_is_that_of_ranks(ranks, config):
    for size in (1, 3):
        costs = planned(size, config, vectors=(5, 17))
        held, read = (sum(values) for values in zip(*ranks(size, index_of_pages, config), strict=True))
        has_copy = config.scan_dtype is not None or config.first_stage is not None
        assert costs.memory.host_index * size == held + read * has_copy
        assert costs.disk == held
        on_gpu = planned(size, config, vectors=(5, 17), gpu=True)
        assert (on_gpu.memory.index * size, on_gpu.memory.host_index * size) == (read, held * has_copy)


def test_memory_of_a_plan():
    """Of the arrays over all documents while a plan is made, and afterwards."""
    # Until Python 3.12.9, tracemalloc can crash a process whose other threads allocate memory while it stops (CPython
    # issue 128679); a rank that other tests have used has such threads.
    pool = RankPool()
    try:
        ((peak, kept, count),) = pool.run(1, memory_of_a_plan)
    finally:
        pool.stop()
    assert 0.6 * PLANNING_BYTES < peak / count < 1.05 * PLANNING_BYTES
    assert 0.7 * PLAN_BYTES < kept / count < 1.05 * PLAN_BYTES


def memory_of_a_plan(world: World) -> tuple[float, float, int]:
    encoder: SentenceEncoder = sentence_encoder(world)
    texts = [f"{text(number, 2)} {number}" for number in range(40_000)]
    plan_encoding(PromptedTexts(texts[:100]), encoder.tokenizer, None, 4096, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding_plan, "_TEXTS_PER_CALL", 256)
        tracemalloc.start()
        plan = plan_encoding(PromptedTexts(texts), encoder.tokenizer, None, 4096, world)
        kept, peak = tracemalloc.get_traced_memory()
    assert plan.tokenized is not None
    tokens = plan.tokenized.ids.nbytes + plan.tokenized.flags.nbytes
    return peak - tokens, kept - tokens, len(texts)


def test_the_copy_is_on_the_gpu_if_it_fits_into_half_of_it():
    for config, free, on_device in (
        (IndexConfig(), 1.2, False),
        (IndexConfig(scan_dtype=ScanDtype.int8), 1.2, True),
        (IndexConfig(scan_dtype=ScanDtype.int8), 0.3, False),
        (IndexConfig(), 8.0, True),
        (IndexConfig(place=VectorPlacement.host), 8.0, False),
    ):
        vectors = 4 * MODEL["hidden_size"] * len(TEXTS)
        model = planned(1, config, gpu=True).memory.parameters
        costs = planned(1, config, gpu=True, memory=int(model + free * vectors))
        assert costs.on_device is on_device
        assert (costs.memory.index > 0) is on_device


def test_more_ranks_need_less_time_and_memory():
    costs = [planned(size, IndexConfig(scan_dtype=ScanDtype.int8)) for size in (1, 2, 8)]
    for fewer, more in itertools.pairwise(costs):
        assert more.memory.host_index < fewer.memory.host_index
        assert more.traffic.encode_seconds < fewer.traffic.encode_seconds
