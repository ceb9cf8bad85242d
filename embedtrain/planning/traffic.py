"""Traffic and duration of a training step: bytes that a rank sends, computation, and exposed communication."""

from dataclasses import dataclass

from embedtrain.config.losses import DistillSimilaritiesConfig, SimilarityMSEConfig
from embedtrain.config.recipe import SELECTIVE
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.planning.memory import ClusterSpec, StepWorkload
from embedtrain.planning.model_costs import ModelSpec

_FP32 = 4
# Latency of one hop of a collective, in seconds.
_HOP_NODE, _HOP_NETWORK = 2e-6, 1e-5
# Bytes per second between a GPU and its host: half of PCIe 5's nominal rate. Also of Adam on the host's cores.
HOST_BANDWIDTH = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes that a rank sends in a step, and the seconds of the step."""

    all_gather: float  # of weights, bytes
    reduce_scatter: float  # of gradients, bytes
    all_reduce: float  # of gradients over replicas, bytes
    embeddings: float  # bytes of the loss, and of texts encoded on another rank than that of their row
    communication: float  # seconds of all communication at the cluster's bandwidths
    exposed: float  # seconds of communication that do not overlap with computation
    compute: float  # seconds
    offload: float  # seconds of transfers to host memory and of the optimizer there

    @property
    def bytes(self) -> float:
        """Bytes of all communication."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.embeddings

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return self.compute + self.exposed + self.offload


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that communicate in a ring, and its slowest link.

    A ring over whole nodes uses all network adapters of a node at the same time. A ring with one rank per node uses
    one adapter.
    """

    ranks: int
    per_node: int
    cluster: ClusterSpec

    @property
    def fraction(self) -> float:
        """Fraction of the data that a rank sends in an all-gather or a reduce-scatter."""
        return 1.0 - 1.0 / self.ranks

    def seconds(self, num_bytes: float, collectives: float) -> float:
        """Duration of collectives in which a rank sends `num_bytes` in total."""
        if self.ranks == 1:
            return 0.0
        nodes = -(-self.ranks // self.per_node)
        bandwidths = [self.cluster.bandwidth_node] * (self.per_node > 1)
        bandwidths += [self.cluster.bandwidth_network * self.per_node] * (nodes > 1)
        hops = (self.ranks - nodes) * _HOP_NODE + (nodes if nodes > 1 else 0) * _HOP_NETWORK
        return num_bytes / min(bandwidths) + collectives * hops


def step_traffic(
    model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, work: StepWorkload, *, reduce_per_step: bool
) -> StepTraffic:
    """Traffic and duration of a step; `reduce_per_step` as by `reduces_once_per_step`."""
    weights, local, batches = model.weights, work.per_rank(cluster.ranks), work.gradient_accumulation_steps
    reencoded = local.chunks - local.num_cached_graphs
    per_node = min(cluster.per_node, cluster.ranks)
    shards = Ring(layout.shard, min(layout.shard, per_node), cluster)
    replicas = Ring(layout.replicate, max(1, min(per_node // layout.shard, layout.replicate)), cluster)
    everyone = Ring(cluster.ranks, per_node, cluster)
    size, groups = model.compute_bytes, len(weights.blocks) + 1 + bool(weights.embedding.elements)

    forward, backward = _num_gathers(layout, local.chunks, local.num_cached_graphs, reduce_per_step=reduce_per_step)
    reductions = 1 if reduce_per_step or layout.shard == 1 else local.chunks * batches
    repeats = batches if not (reduce_per_step and not layout.reshard_after_forward) else 1
    gathered = shards.fraction * size * weights.parameters
    reduced = shards.fraction * _FP32 * weights.trained
    replicated = 2.0 * replicas.fraction * _FP32 * weights.trained / layout.shard
    embeddings = _embeddings(model, everyone, work) * batches

    tokens = local.texts * work.tokens_per_text * batches
    forward_flops, backward_flops = padded_token_flops(model, work.tokens_per_text, work.texts_per_row)
    recomputed = forward_flops if layout.activation_checkpointing is True else 0.0
    scores_compute = batches * _scores_flops(model, work, cluster.ranks) / cluster.flops
    forward_compute = tokens * forward_flops * (local.chunks + reencoded) / local.chunks / cluster.flops
    forward_compute += scores_compute
    backward_compute = tokens * (backward_flops + recomputed) / cluster.flops
    if layout.activation_checkpointing == SELECTIVE:
        backward_compute += tokens * _recomputed_bytes(model) / cluster.bandwidth_memory

    forward_seconds = shards.seconds(gathered * forward * repeats, groups * forward * repeats)
    backward_seconds = shards.seconds(gathered * backward * repeats, groups * backward * repeats)
    reduce_seconds = shards.seconds(reduced, groups)  # of one reduction
    backward_seconds += reduce_seconds * reductions
    # A reduction overlaps with the backward pass of its chunk. Replicas reduce their gradients once per step, as do
    # shards with `reduce_per_step`: during the last backward pass.
    replica_seconds = replicas.seconds(replicated, groups)
    last_backward = backward_compute / max(1, local.chunks * batches)
    embedding_seconds = everyone.seconds(embeddings, 4.0 * batches)
    exposed = max(0.0, forward_seconds - forward_compute) + embedding_seconds
    exposed += max(0.0, backward_seconds - backward_compute, max(reduce_seconds, replica_seconds) - last_backward)
    offload = 0.0
    if layout.cpu_offload:
        per_parameter = size * (forward + backward) * repeats + 4 * _FP32
        offload = per_parameter * weights.parameters / layout.shard / HOST_BANDWIDTH
    return StepTraffic(
        all_gather=gathered * (forward + backward) * repeats,
        reduce_scatter=reduced * reductions,
        all_reduce=replicated,
        embeddings=embeddings,
        communication=forward_seconds + backward_seconds + replica_seconds + embedding_seconds,
        exposed=exposed,
        compute=forward_compute + backward_compute,
        offload=offload,
    )


def _num_gathers(layout: ParallelLayout, chunks: int, cached: int, *, reduce_per_step: bool) -> tuple[int, int]:
    """How often all weights are gathered for the forward and for the backward passes of a global batch.

    If gradients are reduced once per step, weights stay unsharded from the first backward pass of a step to the last.
    Before, each forward pass that reshards them needs an all-gather; after, only those resharded since.
    """
    reencoded = chunks - cached
    if layout.shard == 1:
        return 0, 0
    if layout.reshard_after_forward:
        # The first backward pass, or the encoding before it, gathers them once more than each chunk that is encoded
        # again: after its forward pass, its weights are resharded, and its backward pass gathers them.
        return (chunks, 1 + reencoded) if reduce_per_step else (chunks + reencoded, chunks)
    # The weights of the first pass are still there for a chunk that is encoded again before any backward pass.
    return (1, 0) if reduce_per_step else (1 + reencoded - (cached == 0), max(0, cached - 1))


def padded_token_flops(model: ModelSpec, tokens_per_text: int, texts_per_row: int) -> tuple[float, float]:
    """FLOPs of the forward and backward pass per token, with padding and full attention in all layers.

    The mean of the texts of a row, a query and its documents.
    """
    query, document = (of.of(tokens_per_text) for of in (model.weights.query, model.weights.document))
    forward, backward = (
        (of_query + (texts_per_row - 1) * of_document) / texts_per_row / tokens_per_text
        for of_query, of_document in zip(query, document, strict=True)
    )
    return forward, backward


def _recomputed_bytes(model: ModelSpec) -> float:
    """Bytes per token that selective recomputation moves: those that it does not keep, and about two for each."""
    saved, kept = model.activations(False).block, model.activations(SELECTIVE).block
    return 3.0 * len(model.weights.blocks) * max(0.0, saved - kept)


def _scores_flops(model: ModelSpec, work: StepWorkload, ranks: int) -> float:
    """FLOPs of MaxSim of a rank's queries and all documents; few of its products have a gradient.

    The inner products of one vector per text are too few to count.
    """
    if model.vectors == (1, 1):
        return 0.0
    rows, candidates = work.rows / ranks, work.rows * max(1, work.texts_per_row - 1)
    return 2.0 * rows * model.vectors[0] * candidates * model.vectors[1] * model.dimension


def _embeddings(model: ModelSpec, everyone: Ring, work: StepWorkload) -> float:
    """Bytes of embeddings to the ranks of their rows, of documents to all ranks, and of their gradients."""
    local = work.num_layers * model.num_vectors(work.rows * work.texts_per_row / everyone.ranks, work.texts_per_row)
    candidates = work.trained_layers * work.rows * max(1, work.texts_per_row - 1) * model.vectors[1]
    sent = 2.0 * local + 2.0 * candidates
    if isinstance(work.loss, SimilarityMSEConfig):  # sums in float64: three forward, two backward
        sent = 2.0 * local + 2.0 * 2.0 * 5.0 * model.dimension
    elif isinstance(work.loss, DistillSimilaritiesConfig):  # a teacher's vectors have no gradient
        sent += candidates
    return _FP32 * model.dimension * everyone.fraction * sent
