"""Bytes that a rank sends in a step, and the seconds of a step: what is computed, and what of the network shows."""

from dataclasses import dataclass

from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.planning.flops import token_flops
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.workload import ClusterSpec, StepWorkload

_FP32 = 4
# Seconds that one hop of a collective takes besides its bytes.
_HOP_NODE, _HOP_NETWORK = 2e-6, 1e-5
# Bytes a second between a GPU and its host: PCIe 5, half of what it promises. And of Adam on a host's cores.
_HOST = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank sends in a step, in bytes, and what it takes in seconds.

    Attributes:
        gathers: all-gathers of weights.
        reduces: reduce-scatters of gradients.
        replicas: all-reduces of gradients over copies.
        vectors: of the loss, and of texts that are encoded elsewhere than on the rank of their row.
        seconds: of all these, at the stated bandwidths.
        shown: seconds of these that nothing is computed beside.
        compute: seconds of computing.
        host: seconds of the way to host memory and of its optimiser.
    """

    gathers: float
    reduces: float
    replicas: float
    vectors: float
    seconds: float
    shown: float
    compute: float
    host: float

    @property
    def bytes(self) -> float:
        """All that is sent."""
        return self.gathers + self.reduces + self.replicas + self.vectors

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.compute + self.shown + self.host


@dataclass(frozen=True, slots=True)
class _Link:
    """A group of ranks that send to each other in a ring, and its slowest link.

    A ring over whole nodes leaves and enters each of them through all of its adapters at once; one of a single rank a
    node has one adapter.
    """

    ranks: int
    in_node: int
    machines: ClusterSpec

    @property
    def share(self) -> float:
        return 1.0 - 1.0 / self.ranks

    def seconds(self, num_bytes: float, collectives: float) -> float:
        """Of so many bytes that one rank sends in so many collectives."""
        if self.ranks == 1:
            return 0.0
        nodes = -(-self.ranks // self.in_node)
        bandwidths = [self.machines.bandwidth_node] * (self.in_node > 1)
        bandwidths += [self.machines.bandwidth_network * self.in_node] * (nodes > 1)
        hops = (self.ranks - nodes) * _HOP_NODE + (nodes if nodes > 1 else 0) * _HOP_NETWORK
        return num_bytes / min(bandwidths) + collectives * hops


def step_traffic(
    facts: ModelSpec, layout: ParallelLayout, machines: ClusterSpec, work: StepWorkload, *, whole: bool
) -> Traffic:
    """What a step sends and how long it takes.

    Args:
        facts: the model.
        layout: how its weights lie.
        machines: where.
        work: what a step does.
        whole: whether whole gradients are kept between chunks.
    """
    passes = work.passes(machines.ranks)
    again = passes.chunks - passes.kept
    per_node = min(machines.per_node, machines.ranks)
    shards = _Link(layout.shard, min(layout.shard, per_node), machines)
    copies = _Link(layout.replicate, max(1, min(per_node // layout.shard, layout.replicate)), machines)
    everyone = _Link(machines.ranks, per_node, machines)
    each, groups = facts.compute_bytes, len(facts.blocks) + 1 + bool(facts.embedding.elements)

    forward, backward = _gathers(layout, passes.chunks, passes.kept, whole=whole)
    reductions = 1 if whole or layout.shard == 1 else passes.chunks * work.gradient_accumulation_steps
    times = work.gradient_accumulation_steps if not (whole and not layout.reshard_after_forward) else 1
    gathered = shards.share * each * facts.parameters
    reduced = shards.share * _FP32 * facts.trained
    replicated = 2.0 * copies.share * _FP32 * facts.trained / layout.shard
    vectors = _vectors(facts, everyone, work) * work.gradient_accumulation_steps

    tokens = passes.texts * work.tokens_per_text * work.gradient_accumulation_steps
    pass_forward, pass_backward = _flops(facts, work)
    more = pass_forward if layout.activation_checkpointing else 0.0
    of_forward = tokens * pass_forward * (passes.chunks + again) / passes.chunks / machines.flops
    of_backward = tokens * (pass_backward + more) / machines.flops

    seconds_forward = shards.seconds(gathered * forward * times, groups * forward * times)
    seconds_backward = shards.seconds(gathered * backward * times, groups * backward * times)
    seconds_backward += shards.seconds(reduced * reductions, groups * reductions)
    # Gradients travel to the copies once a step, beside its last backward pass.
    seconds_copies = copies.seconds(replicated, groups)
    last = of_backward / max(1, passes.chunks * work.gradient_accumulation_steps)
    seconds_vectors = everyone.seconds(vectors, 4.0 * work.gradient_accumulation_steps)
    shown = max(0.0, seconds_forward - of_forward) + seconds_vectors
    shown += max(0.0, seconds_backward - of_backward, seconds_copies - last)
    host = 0.0
    if layout.cpu_offload:
        host = (each * (forward + backward) * times + 4 * _FP32) * facts.parameters / layout.shard / _HOST
    return Traffic(
        gathers=gathered * (forward + backward) * times,
        reduces=reduced * reductions,
        replicas=replicated,
        vectors=vectors,
        seconds=seconds_forward + seconds_backward + seconds_copies + seconds_vectors,
        shown=shown,
        compute=of_forward + of_backward,
        host=host,
    )


def _gathers(layout: ParallelLayout, chunks: int, kept: int, *, whole: bool) -> tuple[int, int]:
    """How often all weights are gathered for forward and for backward passes of one global batch.

    With whole gradients weights stay gathered from a step's first backward pass to its last: until then every forward
    pass that gives them back needs them anew, afterwards only those that were given back since.
    """
    again = chunks - kept
    if layout.shard == 1:
        return 0, 0
    if layout.reshard_after_forward:
        return (chunks, min(1, kept) + again) if whole else (chunks + again, chunks)
    # The first pass's are still there for a chunk that is encoded again before any backward pass.
    return (1, 0) if whole else (1 + again - (kept == 0), max(0, kept - 1))


def _flops(facts: ModelSpec, work: StepWorkload) -> tuple[float, float]:
    """Of a token's forward and backward pass, as a plan knows it: with padding, all layers seeing all tokens."""
    multiplied = facts.parameters - facts.looked_up
    attention = 4.0 * len(facts.blocks) * work.tokens_per_text * facts.hidden
    return token_flops(multiplied, min(multiplied, facts.trained), attention)


def _vectors(facts: ModelSpec, everyone: _Link, work: StepWorkload) -> float:
    """Texts' vectors to the ranks of their rows and back, documents' to all ranks, and their gradients."""
    own = work.rows * work.texts_per_row / everyone.ranks
    candidates = work.rows * max(1, work.texts_per_row - 1)
    return _FP32 * facts.dimension * everyone.share * (2.0 * own + 2.0 * candidates)
