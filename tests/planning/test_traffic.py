"""Planned all-gathers and reduce-scatters, compared with those of real ranks; and the duration of a step."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import SELECTIVE, Precision, Strategy
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.sharding import ParallelLayout, shard_encoder
from embedtrain.distributed.world import World
from embedtrain.losses.infonce import InfoNCE
from embedtrain.planning.memory import ClusterSpec, StepWorkload, step_memory
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.traffic import step_traffic
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.planning.models import LLAMA_3_8B, built, spec_of
from tests.small import batch, parallel, small_model, small_tokenizer


class CollectiveCounter(TorchDispatchMode):
    """All-gathers by the bytes of their results, and the bytes of the inputs of reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers, self.reduced = Counter[int](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d._allgather_base"):
            self.gathers[args[0].nbytes] += 1
        elif name.startswith("c10d._reduce_scatter_base"):
            self.reduced += args[1].nbytes
        return func(*args, **(kwargs or {}))


def count_collectives(
    world: World, activation_tokens: int, reshard: bool, reduce_per_step: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """All-gathers and reduce-scatters of a step, in multiples of the model: planned, and counted.

    All-gathers are counted of a block. The root is not resharded, and the loss gathers as well.
    """
    encoder, blocks = built(small_model("xlm-roberta").config)
    of_block = 4 * sum(parameter.numel() for parameter in blocks[0].parameters())
    model = model_spec(encoder, blocks, precision=Precision.fp32, tokens_per_text=16, gpu=False)
    layout = ParallelLayout(Strategy.fsdp, 1, world.size, "", reshard_after_forward=reshard)
    shard_encoder(encoder, blocks, layout, parallel(), world.device)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(0.01)
    build_optimizer(encoder, OptimConfig())
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    backward = Backward(
        encoder, InfoNCE(InfoNCEConfig()), world, seed=0, dummy=tokenizer.dummy(), reduce_per_step=reduce_per_step
    )
    local_batch = make_rank_batch(batch(24), world.rank, world.size, tokenizer, ChunkOptions(96, activation_tokens, 1))
    with CollectiveCounter() as counter:
        backward(local_batch)
    chunks, cached = len(local_batch.chunks), local_batch.num_cached_graphs
    # The same number of chunks, each with one text.
    work = StepWorkload(
        rows=chunks * world.size, texts_per_row=1, tokens_per_text=16, chunk_tokens=16, activation_tokens=16 * cached
    )
    planned = work.per_rank(world.size)
    assert (planned.chunks, planned.num_cached_graphs) == (chunks, cached)
    assert chunks >= 4
    cluster = ClusterSpec(ranks=world.size, per_node=world.size, memory=2**30, gpu=False)
    traffic = step_traffic(model, layout, cluster, work, reduce_per_step=reduce_per_step)
    size = 4 * model.weights.parameters
    sent = size * (1 - 1 / world.size)
    return (
        {"all_gather": traffic.all_gather / sent, "reduce_scatter": traffic.reduce_scatter / sent},
        {"all_gather": counter.gathers[of_block] / len(blocks), "reduce_scatter": counter.reduced / size},
    )


@pytest.mark.quick("0-True-False", "200-True-True", "1000000-False-True", "200-False-False")
@pytest.mark.parametrize("reduce_per_step", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("activation_tokens", [0, 200, 10**6])
def test_planned_collectives_equal_those_of_a_real_step(ranks, activation_tokens, reshard, reduce_per_step):
    for planned, counted in ranks(2, count_collectives, activation_tokens, reshard, reduce_per_step):
        assert planned["all_gather"] == pytest.approx(counted["all_gather"], rel=1e-6), (planned, counted)
        assert planned["reduce_scatter"] == pytest.approx(counted["reduce_scatter"], rel=0.1)


def test_links_between_nodes_cost_more():
    model, work = spec_of(LLAMA_3_8B), StepWorkload(rows=512, tokens_per_text=512)

    def seconds(ranks, replicate, shard, **bandwidths):
        cluster = ClusterSpec(ranks=ranks, per_node=8, memory=80 * 2**30, **bandwidths)
        layout = ParallelLayout(Strategy.hsdp, replicate, shard, "")
        return step_traffic(model, layout, cluster, work, reduce_per_step=False).communication

    assert seconds(16, 1, 16, bandwidth_network=5e9) > 2 * seconds(16, 1, 16, bandwidth_network=50e9)
    # Shards within nodes: weights never cross the network, gradients do, an eighth on each adapter.
    assert seconds(16, 2, 8, bandwidth_network=5e9) < seconds(16, 1, 16, bandwidth_network=5e9)
    assert seconds(8, 1, 8, bandwidth_network=5e9) == seconds(8, 1, 8, bandwidth_network=50e9)
    assert seconds(8, 1, 8, bandwidth_node=30e9) == pytest.approx(10 * seconds(8, 1, 8, bandwidth_node=300e9), rel=0.1)


def test_activation_checkpointing_adds_a_third():
    model, cluster = spec_of(LLAMA_3_8B), ClusterSpec(ranks=8, per_node=8, memory=80 * 2**30)
    work = StepWorkload(rows=128, tokens_per_text=512)
    plain, checkpointed = (
        step_traffic(
            model,
            ParallelLayout(Strategy.fsdp, 1, 8, "", activation_checkpointing=enabled),
            cluster,
            work,
            reduce_per_step=False,
        ).compute
        for enabled in (False, True)
    )
    assert checkpointed / plain == pytest.approx(4 / 3, rel=0.01)
    # Six FLOPs per weight and token, and attention.
    assert plain == pytest.approx(6 * 32 * 512 * (7.5e9 - 0.525e9) / cluster.flops, rel=0.05)


def test_selective_checkpointing_moves_memory_and_computes_no_product_again():
    model, work = spec_of(LLAMA_3_8B), StepWorkload(rows=128, tokens_per_text=512)

    def compute(which: bool | str, **rates: float) -> float:
        cluster = ClusterSpec(ranks=8, per_node=8, memory=80 * 2**30, **rates)
        layout = ParallelLayout(Strategy.fsdp, 1, 8, "", activation_checkpointing=which)
        return step_traffic(model, layout, cluster, work, reduce_per_step=False).compute

    assert compute(False) < compute(SELECTIVE) < compute(True)
    at_once = compute(SELECTIVE, bandwidth_memory=1e18)
    assert at_once == pytest.approx(compute(False), rel=1e-4)
    assert compute(SELECTIVE, bandwidth_memory=1.5e12) - at_once == pytest.approx(
        2 * (compute(SELECTIVE) - at_once), rel=1e-3
    )


def test_a_reduction_once_per_step_overlaps_with_the_last_chunk_only():
    model, cluster = spec_of(LLAMA_3_8B), ClusterSpec(ranks=8, per_node=8, memory=80 * 2**30, bandwidth_node=10e9)
    layout = ParallelLayout(Strategy.fsdp, 1, 8, "", reshard_after_forward=False)
    one, many = (
        step_traffic(
            model,
            layout,
            cluster,
            StepWorkload(rows=512, tokens_per_text=512, chunk_tokens=chunk_tokens, activation_tokens=10**9),
            reduce_per_step=True,
        )
        for chunk_tokens in (10**6, 4096)
    )
    assert one.compute == pytest.approx(many.compute)
    assert one.reduce_scatter == many.reduce_scatter
    # The weights' gradients in fp32 take longer than a sixteenth of the backward pass, which is two thirds of all.
    expected = many.reduce_scatter / cluster.bandwidth_node - many.compute * 2 / 3 / 16
    assert expected > 0
    assert many.exposed - one.exposed == pytest.approx(expected, rel=0.1)


def test_vectors_of_tokens_are_sent_and_compared():
    """32 vectors of a query and 180 of a document instead of one each."""
    dense = spec_of(small_model("bert").config, length=180)
    tokens = replace(dense, vectors=(32, 180))
    cluster = ClusterSpec(ranks=4, per_node=4, memory=2**36, gpu=True)
    work = StepWorkload(rows=64, texts_per_row=3, tokens_per_text=180)
    layout = ParallelLayout(Strategy.fsdp, 1, 4, "")
    of_dense, of_tokens = (step_traffic(spec, layout, cluster, work, reduce_per_step=True) for spec in (dense, tokens))
    rows, documents = 64, 128
    ratio = (rows / 4 * (32 + 2 * 180) + documents * 180) / (rows / 4 * 3 + documents)
    assert of_tokens.embeddings == pytest.approx(ratio * of_dense.embeddings)
    products = 2.0 * rows / 4 * 32 * documents * 180 * dense.dimension
    assert (of_tokens.compute - of_dense.compute) * cluster.flops == pytest.approx(products, rel=1e-6)
    use = step_memory(tokens, layout, cluster, work, reduce_per_step=True)
    # Vectors, copies at the ranks of their rows and gradients; products, of fewer cells than a block; all documents.
    local = 4 * rows / 4 * (32 + 2 * 180) * dense.dimension + 2 * rows / 4 * 32 * documents * 180
    scores = rows / 4 * 32 * documents
    expected = 4 * (local + 2 * documents * 180 * dense.dimension + 4 * scores)
    assert (use.phase, use.loss) == ("the loss", pytest.approx(expected))
