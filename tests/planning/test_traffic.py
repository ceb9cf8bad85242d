"""How often weights are gathered and gradients reduced: counted on real ranks, chunk by chunk; and what that costs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import OptimConfig, Precision, Strategy
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.distributed.sharding import shard_
from embedtrain.distributed.world import World
from embedtrain.losses.infonce import InfoNCE
from embedtrain.planning.model_costs import model_spec
from embedtrain.planning.traffic import step_traffic
from embedtrain.planning.workload import ClusterSpec, StepWorkload
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.planning.models import LLAMA_3_8B, built, facts
from tests.small import batch, parallel, small_model, small_tokenizer


class Counted(TorchDispatchMode):
    """Bytes of the collectives' results: all-gathers', and inputs of reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered, self.reduced = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d._allgather_base"):
            self.gathered += args[0].nbytes
        elif name.startswith("c10d._reduce_scatter_base"):
            self.reduced += args[1].nbytes
        return func(*args, **(kwargs or {}))


def counted(
    world: World, activation_tokens: int, reshard_after_forward: bool, whole: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """What a step sends, in elements of the model: planned, and counted."""
    encoder, blocks = built(small_model("xlm-roberta").config)
    found = model_spec(encoder, blocks, precision=Precision.fp32, tokens_per_text=16, gpu=False)
    layout = ParallelLayout(Strategy.fsdp, 1, world.size, "", reshard_after_forward=reshard_after_forward)
    shard_(encoder, blocks, layout, parallel(), world.device)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(0.01)
    build_optimizer(encoder, OptimConfig())
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    backward = Backward(
        encoder, InfoNCE(InfoNCEConfig()), world, seed=0, dummy=tokenizer.dummy(), reduce_per_step=whole
    )
    mine = make_rank_batch(batch(24), world.rank, world.size, tokenizer, ChunkOptions(96, activation_tokens, 1))
    with Counted() as seen:
        backward(mine)
    chunks = len(mine.chunks)
    # As many chunks, each of one text.
    work = StepWorkload(
        rows=chunks * world.size,
        texts_per_row=1,
        tokens_per_text=16,
        chunk_tokens=16,
        activation_tokens=16 * mine.num_cached_graphs,
    )
    passes = work.passes(world.size)
    assert (passes.chunks, passes.kept) == (chunks, mine.num_cached_graphs)
    assert chunks >= 4
    machines = ClusterSpec(ranks=world.size, per_node=world.size, memory=2**30, gpu=False)
    planned = step_traffic(found, layout, machines, work, whole=whole)
    each = 4 * found.parameters
    share = each * (1 - 1 / world.size)
    return (
        {"gathers": planned.gathers / share, "reduces": planned.reduces / share},
        {"gathers": seen.gathered / each, "reduces": seen.reduced / each},
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("activation_tokens", [0, 200, 10**6])
def test_gathers_and_reductions_are_those_of_a_real_step(ranks, activation_tokens, reshard_after_forward, whole):
    for planned, seen in ranks(2, counted, activation_tokens, reshard_after_forward, whole):
        # The root's weights, a fifth of this small model, are not given back as the blocks' are; the loss gathers some.
        assert planned["gathers"] == pytest.approx(seen["gathers"], rel=0.3), (planned, seen)
        assert planned["reduces"] == pytest.approx(seen["reduces"], rel=0.1)


def test_links_between_nodes_cost_more():
    found = facts(LLAMA_3_8B)
    work = StepWorkload(rows=512, tokens_per_text=512)

    def seconds(ranks, replicate, shard, **more):
        machines = ClusterSpec(ranks=ranks, per_node=8, memory=80 * 2**30, **more)
        return step_traffic(
            found, ParallelLayout(Strategy.hsdp, replicate, shard, ""), machines, work, whole=False
        ).seconds

    assert seconds(16, 1, 16, bandwidth_network=5e9) > 2 * seconds(16, 1, 16, bandwidth_network=50e9)
    # Copies inside nodes: weights never cross the network, gradients do, an eighth on each adapter.
    assert seconds(16, 2, 8, bandwidth_network=5e9) < seconds(16, 1, 16, bandwidth_network=5e9)
    assert seconds(8, 1, 8, bandwidth_network=5e9) == seconds(8, 1, 8, bandwidth_network=50e9)
    assert seconds(8, 1, 8, bandwidth_node=30e9) == pytest.approx(10 * seconds(8, 1, 8, bandwidth_node=300e9), rel=0.1)


def test_recomputing_costs_a_third():
    found, machines = facts(LLAMA_3_8B), ClusterSpec(ranks=8, per_node=8, memory=80 * 2**30)
    work = StepWorkload(rows=128, tokens_per_text=512)
    plain, again = (
        step_traffic(
            found, ParallelLayout(Strategy.fsdp, 1, 8, "", activation_checkpointing=on), machines, work, whole=False
        )
        for on in (False, True)
    )
    assert again.compute / plain.compute == pytest.approx(4 / 3, rel=0.01)
    # Six floating point operations a weight and token, and attention's.
    assert plain.compute == pytest.approx(6 * 32 * 512 * (7.5e9 - 0.525e9) / machines.flops, rel=0.05)
