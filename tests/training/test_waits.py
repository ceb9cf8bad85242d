"""Between a step's beginning and its end nothing is read from the device, so a GPU is never waited for."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.config.kind_settings import SparseActivation, SparsePooling
from embedtrain.config.losses import LOSSES as NAMES
from embedtrain.config.losses import (
    BatchTripletConfig,
    CandidateSet,
    DistillSimilaritiesConfig,
    Divergence,
    Hardness,
    InfoNCEConfig,
    ListNetConfig,
    LossConfig,
    MSEConfig,
    OrthogonalConfig,
    RankNetConfig,
    TripletMining,
)
from embedtrain.config.recipe import Pooling, Precision, Strategy
from embedtrain.data.rows import Documents
from embedtrain.data.types import GlobalBatch, Packing
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.batch_statistics import RowSpec
from embedtrain.losses.types import BatchInfo, Loss, LossOutput
from embedtrain.models.pooling import POOLING, PooledTokens
from embedtrain.models.sparse_head import TokenSpans, word_weights
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.pretend_cuda.device import collectives, host_reads
from tests.small import batch, parallel, small_model, small_tokenizer, tokenised
from tests.training.test_losses import LOSSES, WIDTH, load_tokenizer, loss_of, rows_for

# A value of a tensor becomes one of Python's, or a size depends on values.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")


ALL_LOSSES: dict[str, LossConfig] = LOSSES | {
    "infonce, duplicates stay": InfoNCEConfig(mask_duplicates=False),
    "infonce, hard": InfoNCEConfig(hardness=Hardness.hard, learn_temperature=True),
    "infonce, in batch": InfoNCEConfig(hardness=Hardness.in_batch),
    **{f"batch_triplet, {mining.value}": BatchTripletConfig(mining=mining) for mining in TripletMining},
    "distill_similarities": DistillSimilaritiesConfig(),
    **{
        f"distill_similarities by row, {divergence.value}": DistillSimilaritiesConfig(
            candidates=CandidateSet.row, divergence=divergence
        )
        for divergence in Divergence
    },
    "listnet": ListNetConfig(),
    "ranknet": RankNetConfig(),
    "mse": MSEConfig(),
    "orthogonal": OrthogonalConfig(),
}
# Those of some kinds of models only, in tests/pretend_cuda, and the loss of a user.
OTHERS = {"xtr", "m3", "custom"}


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(READS):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Sum(Loss):
    """Reads nothing itself."""

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        return LossOutput(queries.sum() + documents.square().sum())


def reads(
    world: World, activation_tokens: int, loss: Loss, precision: Precision, measured: bool = False
) -> tuple[dict[str, int], int]:
    model = small_model("xlm-roberta", dropout=0.1)
    loaded = load_model(model, parallel(Strategy.fsdp, precision=precision), world, seed=0, tokenizer=small_tokenizer())
    backward = Backward(
        loaded.encoder, loss.to(world.device), world, seed=0, dummy=loaded.tokenizer.dummy(), row_specs=[RowSpec()]
    )
    built = make_rank_batch(batch(9), world.rank, world.size, loaded.tokenizer, ChunkOptions(40, activation_tokens))
    on_gpu = world.device.type == "cuda"
    built = (built.pinned() if on_gpu else built).to(world.device)
    with Reads() as seen:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output, finite = backward(built, measured=measured)
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    assert finite
    assert ("uniformity" in output.metrics) == measured
    return dict(seen.counts), len(built.chunks)


@pytest.mark.quick("10000-False", "80-True")
@pytest.mark.parametrize(("activation_tokens", "measured"), [(0, False), (80, True), (10_000, False)])
def test_nothing_is_read_while_chunks_are_encoded(ranks, activation_tokens, measured):
    for actual, chunks in ranks(2, reads, activation_tokens, Sum(), Precision.fp32, measured):
        assert chunks > 2
        assert not actual


def rows_with_duplicates(config: LossConfig) -> GlobalBatch:
    """With equal queries and equal documents, and with ids."""
    rows = rows_for(config, 9)
    repeated = [*rows.rows[:7], rows.rows[0], rows.rows[1]]

    def with_ids(documents: Documents) -> Documents:
        return replace(documents, ids=tuple("ab"[len(text) % 2] for text in documents.texts))

    repeated = [replace(row, positives=with_ids(row.positives), negatives=with_ids(row.negatives)) for row in repeated]
    return tokenised(replace(rows, rows=tuple(repeated), tokens=None), load_tokenizer())


def read_by_losses(world: World) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """What each loss reads from the device, and its collectives."""
    counted = {}
    for name, config in ALL_LOSSES.items():
        rows, loss = rows_with_duplicates(config), loss_of(config).to(world.device)
        width = len(rows.rows[0].vectors[0]) if rows.rows[0].vectors else None
        built = make_rank_batch(
            rows, world.rank, world.size, load_tokenizer(), ChunkOptions(10_000), teacher_dimension=width
        )
        built = built.prepared_for(loss, WIDTH).pinned().to(world.device)
        documents = len(built.batch_info.owners)
        vectors = torch.randn(built.num_queries + documents, WIDTH, device=world.device, requires_grad=True)
        with host_reads() as reads, collectives() as calls:
            output = loss(vectors[: built.num_queries], vectors[built.num_queries :], built.batch_info)
            output.local_loss.backward()
        counted[name] = dict(reads), dict(calls)
    return counted


def test_no_loss_reads_from_the_device(cuda_ranks):
    """Nor do sizes and duplicates travel: the host of every rank knows the rows of the batch."""
    assert {config.name for config in ALL_LOSSES.values()} == NAMES.keys() - OTHERS
    for counted in cuda_ranks(2, read_by_losses):
        assert {name: reads for name, (reads, _) in counted.items() if reads} == {}
        # The documents, the sum of their gradients, and the ids of documents, which only the rank of a row reads.
        assert counted["infonce"][1] == {"cuda _allgather_base_": 2, "cuda _reduce_scatter_base_": 1}
        assert counted["infonce, duplicates stay"][1] == {"cuda _allgather_base_": 1, "cuda _reduce_scatter_base_": 1}


def read_by_heads(world: World) -> dict[str, dict[str, int]]:
    """What poolings and sparse heads read from the device, of packed and of padded texts."""
    lengths = (5, 3, 3)

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(world.device, non_blocking=True)

    packing = Packing.of(np.array(lengths), np.array(lengths)).map_tensors(on_device)
    mask = on_device((torch.arange(5) < torch.tensor(lengths)[:, None]).long())
    pooled = on_device(torch.ones(11, dtype=torch.int64).index_fill(0, torch.tensor([0, 5, 8]), 0))
    packed, padded, weight = (
        torch.randn(shape, device=world.device, requires_grad=True) for shape in ((11, 4), (3, 5, 4), (7, 4))
    )
    computed = {}
    for name in Pooling:
        for what, hidden, tokens in (
            ("packed", packed, PooledTokens(None, packing)),
            ("packed, without prompts", packed, PooledTokens(pooled, packing)),
            ("padded", padded, PooledTokens(mask)),
        ):
            computed[f"{name.value}, {what}"] = lambda n=name, h=hidden, t=tokens: POOLING[n].pool(h, t)
    for name in SparsePooling:
        for what, hidden, spans in (
            ("packed", packed, lambda: TokenSpans.of_packed(packing)),
            ("padded", padded.flatten(0, 1), lambda: TokenSpans.of_padded(mask)),
        ):
            computed[f"sparse {name.value}, {what}"] = lambda n=name, h=hidden, s=spans: word_weights(
                h, weight, None, s(), n, SparseActivation.log1p_relu
            )
    counted = {}
    for name, compute in computed.items():
        with host_reads() as reads:
            compute().sum().backward()
        counted[name] = dict(reads)
    return counted


def test_no_pooling_reads_from_the_device(cuda_ranks):
    (counted,) = cuda_ranks(1, read_by_heads)
    assert {name: reads for name, reads in counted.items() if reads} == {}


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu():
    """What torch itself calls a wait is an error meanwhile."""
    with joined_world() as world:
        assert world.device.type == "cuda"
        reads(world, 80, Sum(), Precision.bf16, measured=True)
