"""Memory of a training on given ranks: bytes of one rank by kind, at the phase with the highest total, and of a host.

Costs that are linear in the number of weights are computed, activations are measured (see `model_costs`). A step is
followed phase by phase, because the sum over kinds would add memory that is never held at the same time. FSDP2's own
buffers are those of torch 2.13: unsharded weights are copies in the compute type, also on a rank that holds the whole
model. The gradient of a group is unsharded, in that type, until the group's backward pass ends; then it is copied to
fp32 and reduced.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import matryoshka_layers_of
from embedtrain.config.losses import (
    DistillSimilaritiesConfig,
    Implementation,
    InfoNCEConfig,
    LossConfig,
    M3LossConfig,
    SigLIPConfig,
    SimilarityMSEConfig,
    XTRConfig,
)
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import (
    CheckpointConfig,
    CheckpointContents,
    GradientReduction,
    Recipe,
    TrainConfig,
    TrainSource,
)
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.losses.infonce import MAX_PLAIN_BYTES
from embedtrain.losses.ring import MAX_GATHERED_BYTES
from embedtrain.losses.score import BLOCK_CELLS_CPU, BLOCK_CELLS_GPU
from embedtrain.losses.softmax import TILE_CELLS
from embedtrain.planning.model_costs import ModelSpec

# Fraction of a rank's and of a host's memory that a plan may use: the rest is for the driver, the communication library
# and fragmentation of the allocator; on a host for the system and the cache of files.
USABLE = 0.9
# Orders of magnitude for ranks without a GPU: gloo, and a few cores. With the rates of a GPU, the estimate would see
# nothing but communication.
_CPU_RATES: dict[str, Any] = {
    "bandwidth_node": 2e9,
    "bandwidth_network": 1e9,
    "flops": 1e11,
    "bandwidth_memory": 1e10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The ranks and their links."""

    ranks: int
    per_node: int  # ranks
    memory: int  # bytes per rank
    gpu: bool = True
    host_memory: int | None = None  # bytes of a node, for all of its ranks; None: not limited
    # Defaults: an H100 with NVLink and a 400 Gb/s network adapter, and what published trainers reach in bf16
    # (llm-foundry: 399 to 459 TFLOP/s).
    bandwidth_node: float = 300e9  # bytes per second that a rank sends within its node
    bandwidth_network: float = 50e9  # bytes per second that a rank sends to other nodes
    flops: float = 400e12  # operations per second that a rank reaches
    bandwidth_memory: float = 3e12  # bytes per second that a rank reads and writes in copies

    @classmethod
    def of_ranks(cls, ranks: int, per_node: int, memory: int, *, gpu: bool, host_memory: int | None = None) -> Self:
        """Ranks with the default rates of their kind of device; those of a CPU have no memory besides `memory`."""
        rates: dict[str, Any] = {"host_memory": host_memory} if gpu else _CPU_RATES
        return cls(ranks=ranks, per_node=per_node, memory=memory, gpu=gpu, **rates)

    @property
    def usable(self) -> int:
        """Bytes per rank that a plan may use."""
        return int(USABLE * self.memory)

    @property
    def usable_on_host(self) -> float:
        """Bytes of a node that a plan may use, for all of its ranks."""
        return math.inf if self.host_memory is None else USABLE * self.host_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """The work of an optimizer step."""

    rows: int = TrainConfig.global_batch_size  # of a global batch
    texts_per_row: int = 2  # query, positive and hard negatives
    tokens_per_text: int = 512  # mean, padding included
    chunk_tokens: int = TrainConfig.chunk_tokens  # maximum of a forward pass on one rank
    activation_tokens: int | None = None  # maximum with cached graphs; None: `chunk_tokens`
    gradient_accumulation_steps: int = 1  # global batches per step
    loss: LossConfig = field(default_factory=InfoNCEConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    picture_cost: float = 1.0  # what a token counts in `chunk_tokens` and `activation_tokens`

    @property
    def cost_per_text(self) -> int:
        """What a text counts in `chunk_tokens`."""
        return math.ceil(self.tokens_per_text * self.picture_cost)

    @property
    def num_layers(self) -> int:
        """Layers of the encoder whose vectors are computed: the last, and `loss.matryoshka.layers`."""
        return 1 + len(matryoshka_layers_of(self.loss))

    @property
    def trained_layers(self) -> int:
        """Those of a batch, each with a loss of its own, and a divergence from the last one with `layer_kl`."""
        exits = self.loss.matryoshka.layers_per_step or self.num_layers - 1
        return 1 + exits * (1 + (self.loss.matryoshka.layer_kl > 0))

    @classmethod
    def of(cls, recipe: Recipe, *, tokens_per_text: int = 512, texts_per_row: int | None = None) -> "StepWorkload":
        """The workload of a recipe. A cross-encoder's texts are pairs, one for each document of a row.

        `texts_per_row`: query and documents; default, where the rows are not known: a query, a positive, and the
        negatives that sources of `data.train` ask for. The default of `negatives` counts for a cross-encoder only: it
        trains on rows with negatives, and most other rows have none.
        """
        train, pairs = recipe.train, load_kind(recipe.model.kind).scores_pairs
        if texts_per_row is None:
            default = int(TrainSource.negatives or 0)
            written = [source.negatives or 0 for source in recipe.data.train]
            texts_per_row = 2 + max((count for count in written if pairs or count != default), default=pairs * default)
        return cls(
            rows=train.global_batch_size,
            texts_per_row=max(1, texts_per_row - pairs) + recipe.data.batch_negatives,
            tokens_per_text=tokens_per_text,
            chunk_tokens=train.chunk_tokens,
            activation_tokens=train.activation_tokens,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            loss=recipe.loss,
            optim=recipe.optim,
            checkpoint=recipe.checkpoint,
        )

    def per_rank(self, ranks: int) -> "RankWorkload":
        """One rank's part of a global batch."""
        texts = -(-self.rows * self.texts_per_row // ranks)
        texts_per_chunk = max(1, self.chunk_tokens // self.cost_per_text)
        chunks = max(1, -(-texts // texts_per_chunk))
        # A text longer than a chunk is a chunk of its own.
        in_chunk = min(texts, texts_per_chunk)
        all_costs = texts * self.cost_per_text
        activation_tokens = self.chunk_tokens if self.activation_tokens is None else self.activation_tokens
        # The last chunk is smaller than the others where they do not divide the texts.
        cached = chunks if activation_tokens >= all_costs else activation_tokens // (in_chunk * self.cost_per_text)
        return RankWorkload(
            texts=texts,
            chunks=chunks,
            num_cached_graphs=min(chunks, cached),
            tokens=in_chunk * self.tokens_per_text,
            all_tokens=texts * self.tokens_per_text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorkload:
    """One rank's part of a global batch."""

    texts: int
    chunks: int  # each with one forward and backward pass
    num_cached_graphs: int  # chunks whose graphs are cached; the remaining ones are encoded twice
    tokens: int  # of the largest chunk
    all_tokens: int  # of all chunks


_FP32 = 4
# Bytes of host memory that a rank takes besides weights and copies: libraries of torch and CUDA, prepared batches. An
# allowance that has not been measured on GPUs.
_PROCESS = 3 * 2**30
# Maximum fraction of a rank's memory for unreduced fp32 gradients of the whole model between chunks.
_UNREDUCED_GRADIENTS_FRACTION = 0.1
# Fraction of memory that cached graphs may fill. Less than for a layout: a layout that does not fit fails at once, too
# many cached graphs only fail on the batch with the longest texts.
_CACHED_GRAPHS_FRACTION = 0.8

# The losses whose directions and whose implementation are options.
_WITH_DIRECTIONS = InfoNCEConfig | DistillSimilaritiesConfig
_OF_BATCH = _WITH_DIRECTIONS | XTRConfig | M3LossConfig | SigLIPConfig


class _ByKind:
    """Numbers of bytes, each a field."""

    __slots__ = ()

    @property
    def by_kind(self) -> dict[str, float]:
        """All kinds by name."""
        names = (kind.name for kind in fields(self) if kind.type is float)  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(_ByKind):
    """Bytes of one rank by kind."""

    parameters: float = 0.0  # trained weights in fp32, frozen ones in their own type, and buffers
    gradients: float = 0.0  # between passes, reduced or unreduced
    optimizer: float = 0.0  # its moments
    activations: float = 0.0  # of cached graphs and of the running pass
    loss: float = 0.0  # embeddings of this rank and of all ranks, their gradients, and scores
    gathered: float = 0.0  # unsharded weights in the compute type
    reducing: float = 0.0  # gradients on their way to be reduced
    pictures: float = 0.0  # pixels of the batch; on a CPU also those of the next ones
    phase: str = ""  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory(_ByKind):
    """Bytes of host memory by kind, of the ranks of a node that have GPUs."""

    weights: float = 0.0  # of CPU offload, page-locked
    gradients: float = 0.0  # the same
    optimizer: float = 0.0  # its moments with CPU offload
    checkpoint: float = 0.0  # copies that asynchronous saves are written from
    pictures: float = 0.0  # pixels of the batch and of the next ones, page-locked
    processes: float = 0.0  # libraries, tokens of prepared batches

    def fits(self, cluster: ClusterSpec) -> bool:
        """Whether a node has it; what processes take in any case excludes no layout."""
        return self.total <= max(cluster.usable_on_host, self.processes)


def reduces_once_per_step(option: GradientReduction, layout: ParallelLayout, trained: int, memory: int) -> bool:
    """Whether gradients are reduced once per step; then a rank holds unreduced gradients between chunks.

    With replicated weights a rank holds all gradients in any case. `trained` is the number of elements with a gradient,
    `memory` the bytes of the rank with the least memory.
    """
    if option is GradientReduction.auto:
        return layout.shard == 1 or _FP32 * trained <= _UNREDUCED_GRADIENTS_FRACTION * memory
    return option is GradientReduction.per_step


def step_memory(
    model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, work: StepWorkload, *, reduce_per_step: bool
) -> MemoryUse:
    """Peak memory of one rank in a step after the first; `reduce_per_step` as by `reduces_once_per_step`."""
    step = _Step(model, layout, cluster, work, reduce_per_step=reduce_per_step)
    return max(step.phases(), key=lambda use: use.total)


def host_memory(model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, work: StepWorkload) -> HostMemory:
    """Host memory of the node that needs the most, in training; nothing without GPUs, whose ranks have one memory.

    Pixels are those of pictures as long as the workload's items, in every text of a row.

    What loading, evaluation and export take for a while is not counted.
    """
    if not cluster.gpu:
        return HostMemory()
    per_node, trained = min(cluster.per_node, cluster.ranks), model.weights.trained
    state = _state_bytes(model, work.optim)
    saved = float(_FP32 * trained)
    if work.checkpoint.contents is CheckpointContents.all:
        saved += state
    elif work.optim.ema is not None:
        saved += _FP32 * trained
    # Of the replicas one saves, and all of its shards do. Copies share blocks without a part that is not used.
    writers = min(per_node, layout.shard) if work.checkpoint.stages else 0
    local = work.per_rank(cluster.ranks)
    weights = gradients = moments = 0.0
    if layout.cpu_offload:
        for shape, count in model.weights.shapes.items():
            pinned = count * _pinned_bytes(shape.shard_bytes(layout.shard))
            weights += pinned
            gradients += pinned * shape.trained
        moments = state / layout.shard
    return HostMemory(
        weights=per_node * weights,
        gradients=per_node * gradients,
        optimizer=per_node * moments,
        checkpoint=writers * saved / layout.shard,
        pictures=per_node
        * _prepared_batches(work)
        * local.chunks
        * _pinned_bytes(int(model.decoded_bytes * local.tokens)),
        processes=per_node * _PROCESS,
    )


def _prepared_batches(work: StepWorkload) -> int:
    """Batches in host memory: the one in use, and those that threads have prepared or prepare."""
    return 2 + 2 * work.gradient_accumulation_steps


def _pinned_bytes(size: int) -> int:
    """Bytes that torch takes for page-locked memory of this size: a power of two (torch 2.11 to 2.15)."""
    return 1 << max(0, size - 1).bit_length() if size else 0


def _state_bytes(model: ModelSpec, optim: OptimConfig) -> float:
    """Bytes of moments and of the average of all weights."""
    return sum(
        count * of.elements * optim.state_bytes(of.shape, in_block=of.in_block)
        for of, count in model.weights.shapes.items()
        if of.trained
    )


def encoding_memory(model: ModelSpec, layout: ParallelLayout, tokens: int) -> MemoryUse:
    """Peak memory of one rank that only encodes: weights, unsharded copies, and a forward pass of `tokens` tokens."""
    return MemoryUse(
        parameters=_parameters(model, layout),
        gathered=_gathered(model, layout),
        activations=model.activations(False).no_grad * tokens / model.weights.picture_cost,
        phase="encoding",
    )


def fit_activation_tokens(
    model: ModelSpec,
    layout: ParallelLayout,
    cluster: ClusterSpec,
    work: StepWorkload,
    *,
    reduce_per_step: bool,
    free: int,
) -> int:
    """`train.activation_tokens` of the recipe, else as many as fit in memory, at least `train.chunk_tokens`.

    Chunks with cached graphs are not encoded twice, which saves up to a quarter of the arithmetic of a step. The
    gradients are the same. `free` is the number of bytes that are still available on the rank's device.
    """
    maximum = work.per_rank(cluster.ranks).texts * work.cost_per_text
    if work.activation_tokens is not None or maximum <= work.chunk_tokens:
        return work.chunk_tokens if work.activation_tokens is None else work.activation_tokens
    available = _CACHED_GRAPHS_FRACTION * min(free, cluster.memory)
    one_chunk = replace(work, activation_tokens=work.chunk_tokens)
    tokens = work.chunk_tokens
    for spec in (model.bounded(), model):  # measured only if the upper bound does not suffice
        per_token = spec.activations(layout.activation_checkpointing).cached(len(spec.weights.blocks))
        used = step_memory(spec, layout, cluster, one_chunk, reduce_per_step=reduce_per_step).total
        tokens = work.chunk_tokens + max(0, int((available - used) / per_token * work.picture_cost))
        if tokens >= maximum:
            return maximum
    return tokens


class _Step:
    """The phases of a step."""

    def __init__(
        self,
        model: ModelSpec,
        layout: ParallelLayout,
        cluster: ClusterSpec,
        work: StepWorkload,
        *,
        reduce_per_step: bool,
    ) -> None:
        self.model, self.layout, self.work, self.reduce_per_step = model, layout, work, reduce_per_step
        self.activations = model.activations(layout.activation_checkpointing)
        self.local = work.per_rank(cluster.ranks)
        on_device = 0 if layout.cpu_offload else 1  # offloaded weights are in host memory unless they are in use
        trained = model.weights.trained
        self.reduced = _FP32 * trained / layout.shard * on_device
        unreduced = reduce_per_step or layout.shard == 1
        self.between = _FP32 * trained if unreduced else self.reduced  # gradients held between the passes of a step
        self.parameters = _parameters(model, layout) * on_device + model.weights.buffers * (1 - on_device)
        self.optimizer = _state_bytes(model, work.optim) / layout.shard * on_device
        self.loss = work.trained_layers * loss_memory(model, cluster, work, self.local.texts)
        vectors = work.num_layers * model.num_vectors(self.local.texts, work.texts_per_row)
        self.embeddings = 3.0 * _FP32 * vectors * model.dimension
        self.pictures = model.decoded_bytes * self.local.all_tokens * (1 if cluster.gpu else _prepared_batches(work))
        self.graph = self.activations.cached(len(model.weights.blocks)) * self.local.tokens

    def phases(self) -> Iterator[MemoryUse]:
        """The phases in which memory may peak."""
        local, accumulates = self.local, self.work.gradient_accumulation_steps > 1
        cached = local.num_cached_graphs
        yield self._use("the optimizer step", gradients=self.reduced)
        # From the second batch of a step on there are gradients already.
        gradients = self.between if accumulates else 0.0
        graphs = cached * self.graph
        gathered = _gathered(self.model, self.layout)
        before = graphs if cached < local.chunks else graphs - self.graph  # at the embedding lookup of the last chunk
        at_lookup = _gathered_at_lookup(self.model, self.layout)
        yield self._use("the embedding lookup", before, gradients=gradients, gathered=at_lookup)
        if cached < local.chunks:
            yield self._use("a later embedding lookup", gradients=self.between, gathered=at_lookup)
        yield self._use("the loss", graphs, gradients=gradients, gathered=gathered, loss=self.loss)
        if cached:
            total = graphs + self.activations.forward * local.tokens
            yield self._use("a forward pass", total, gradients=gradients, gathered=gathered, loss=self.embeddings)
        if cached < local.chunks:
            total = graphs + self.activations.no_grad * local.tokens
            yield self._use(
                "a forward pass without graph", total, gradients=gradients, gathered=gathered, loss=self.embeddings
            )
        for chunk in {0, 1, cached, local.chunks - 1} & set(range(local.chunks)):
            last_chunk = chunk == local.chunks - 1
            for first_batch in (True, False) if accumulates else (True,):
                for last_batch in (False, True) if accumulates else (True,):
                    first = chunk == 0 and first_batch
                    yield from self._backward(chunk, first=first, last=last_chunk and last_batch)

    def _backward(self, chunk: int, *, first: bool, last: bool) -> Iterator[MemoryUse]:
        """A backward pass at its start, after its first block, and at its end; `first`: there are no gradients yet."""
        weights, activations, local = self.model.weights, self.activations, self.local
        size, block = self.model.compute_bytes, weights.largest_block.trained
        graphs = max(1, local.num_cached_graphs - chunk) * self.graph
        gradients = 0.0 if first else self.between
        # Weights stay unsharded for the next pass.
        stays_gathered = self.reduce_per_step and not last and self.layout.shard > 1
        all_gathered = size * (weights.parameters - weights.embedding.elements)
        gathered = _gathered(self.model, self.layout)
        if 0 < chunk < local.num_cached_graphs and self.reduce_per_step:
            gathered = max(gathered, all_gathered)
        start = {"gathered": gathered, "gradients": gradients, "loss": self.embeddings}
        name = "the backward pass" if first else "a later backward pass"
        yield self._use(f"{name} begins", graphs + activations.backward * local.tokens, reducing=size * block, **start)
        # The gradient of a block is unsharded in the compute type, then in fp32 while the next block runs.
        if len(weights.blocks) > 1:
            remaining = graphs + (activations.backward - activations.block) * local.tokens
            yield self._use(name, remaining, reducing=(size + _FP32) * block, **start)
        # Those of root and embedding are complete only at the end.
        end = weights.root.trained + weights.embedding.trained
        reducing = size * end
        if self.reduce_per_step and last and not first:
            reducing = _FP32 * end
        if not self.reduce_per_step or last:
            reducing += _FP32 * max(weights.root.trained, weights.embedding.trained, block)
        yield self._use(
            f"{name} ends",
            graphs - self.graph + activations.rest * local.tokens,
            loss=self.embeddings,
            gathered=max(gathered, all_gathered) if stays_gathered else size * weights.root.elements,
            reducing=reducing,
            gradients=self.reduced if last else self.between,
        )

    def _use(self, phase: str, activations: float = 0.0, **kinds: float) -> MemoryUse:
        return MemoryUse(
            parameters=self.parameters,
            optimizer=self.optimizer,
            activations=activations,
            pictures=self.pictures,
            phase=phase,
            **kinds,
        )


def _parameters(model: ModelSpec, layout: ParallelLayout) -> float:
    weights = model.weights
    return (_FP32 * weights.trained + weights.frozen_bytes) / layout.shard + weights.buffers


def _gathered(model: ModelSpec, layout: ParallelLayout) -> float:
    """Unsharded weights: all, or with resharding those of the root, a block and the next one."""
    weights, size, largest = model.weights, model.compute_bytes, model.weights.largest_block.elements
    if _reshards(model, layout):
        return size * (weights.root.elements + min(2, len(weights.blocks)) * largest)
    return size * (weights.parameters + (largest if layout.shard > 1 else 0))


def _gathered_at_lookup(model: ModelSpec, layout: ParallelLayout) -> float:
    """Unsharded weights at the start of a forward pass: the embedding as it was gathered, and its copy."""
    if _reshards(model, layout):
        return model.compute_bytes * (model.weights.root.elements + 2 * model.weights.embedding.elements)
    return _gathered(model, layout)


def _reshards(model: ModelSpec, layout: ParallelLayout) -> bool:
    return layout.shard > 1 and layout.reshard_after_forward and bool(model.weights.blocks)


def loss_memory(model: ModelSpec, cluster: ClusterSpec, work: StepWorkload, texts: int) -> float:
    """Embeddings of this rank and of all, their gradients, and scores. Other losses are treated as InfoNCE.

    MaxSim has as many scores as the query has tokens before it adds them: the document's token that is closest to each.
    A teacher's vectors count as having the dimension of the model. `texts` are those of a rank.
    """
    candidates = work.rows * max(1, work.texts_per_row - 1)
    rows = -(-work.rows // cluster.ranks)
    directions = len(work.loss.directions) if isinstance(work.loss, _WITH_DIRECTIONS) else 1
    # Embeddings, their copies on the row's rank, normalised ones, and the gradients of each.
    embeddings = _FP32 * model.num_vectors(texts, work.texts_per_row) * model.dimension
    local = 6.0 * embeddings
    if has_tokens := model.vectors != (1, 1):  # the encoder has normalised them; the positives are copied
        local = 4.0 * embeddings
    gathered = 2.0 * _FP32 * candidates * model.vectors[1] * model.dimension
    if isinstance(work.loss, SimilarityMSEConfig):
        return local + 2.0 * 5.0 * _FP32 * model.dimension**2  # in float64: three sums, and the gradients of two
    if isinstance(work.loss, DistillSimilaritiesConfig):
        gathered *= 1.5  # the teacher's vectors have no gradient
    cells = rows * model.vectors[0] * candidates
    scores = _FP32 * cells * directions
    implementation = work.loss.implementation if isinstance(work.loss, _OF_BATCH) else Implementation.auto
    auto = implementation is Implementation.auto
    if implementation is Implementation.ring or (auto and gathered * (1 - 1 / cluster.ranks) > MAX_GATHERED_BYTES):
        tile = 2.0 * _FP32 * min(TILE_CELLS, cells / cluster.ranks)
        if has_tokens:  # documents of this rank and of another one, sorted by length, and gradients
            block = _block(model, cluster, rows, candidates / cluster.ranks)
            return 3.0 * embeddings + 3.0 * gathered / cluster.ranks + tile + block
        return local + 4.0 * gathered / cluster.ranks + tile
    block = 2.0 * _block(model, cluster, rows, candidates)  # and its gradient
    if implementation is Implementation.plain or (auto and scores <= MAX_PLAIN_BYTES):
        return local + gathered + 4.0 * scores + block
    return local + gathered + 2.0 * _FP32 * min(TILE_CELLS, cells) + block


def _block(model: ModelSpec, cluster: ClusterSpec, rows: int, candidates: float) -> float:
    """A block of products of vectors of tokens, of at least one document."""
    if model.vectors == (1, 1):
        return 0.0
    limit = BLOCK_CELLS_GPU if cluster.gpu else BLOCK_CELLS_CPU
    of_document = rows * model.vectors[0] * model.vectors[1]
    return float(_FP32 * min(max(limit, of_document), candidates * of_document))
