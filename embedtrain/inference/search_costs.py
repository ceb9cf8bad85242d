"""Memory, traffic and duration of an evaluation or of mining: documents are encoded, and searched exactly.

Memory counts what a rank holds at the same time; every rank has the plan of an encoding, over all documents. Durations
follow from rates: encoding from that of training, the search from that of products in fp32.

Of a late-interaction model, a document has a vector per token, of which an index may keep fewer (`token_pooling`), and
a search may read fewer yet (`first_stage`).

N documents, n on a rank; Q queries; k results of each; D dimensions.
"""

from dataclasses import asdict, dataclass, fields

from embedtrain.config.evaluation import IndexConfig, Unshard, VectorPlacement
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.inference.encode import CHUNKS_PER_BLOCK
from embedtrain.inference.encoding_plan import MAX_KEPT_TOKENS
from embedtrain.inference.index import MAX_QUERY_ROWS, PENDING_CANDIDATES, QUERIES_PER_SCAN, QUERY_BATCH_SIZE
from embedtrain.inference.store import (
    BLOCK_NUMEL_CPU,
    BLOCK_NUMEL_GPU,
    MAX_DEVICE_FRACTION,
    TILE,
    TILE_ROWS,
    dtype_of,
)
from embedtrain.inference.vectors import SCAN_DTYPES, scanned_candidates
from embedtrain.planning.memory import ClusterSpec, encoding_memory
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.traffic import HOST_BANDWIDTH, Ring

_FP32 = 4
_TOKEN = 5  # bytes of a token: its id and its flags
# Bytes of host memory for each document of all ranks: the plan of an encoding while it is made, and afterwards.
PLANNING_BYTES, PLAN_BYTES = 36, 20
# Of each document of this rank: its number and priority, sorted numbers for scores of pairs.
LOCAL_BYTES = 8 + 8 + 16
# Bytes per second of a local NVMe disk, and of a random read of a vector.
_DISK_BANDWIDTH, _PAGE = 2e9, 4096
# Candidates of the copy that are scored by the vectors themselves, in multiples of k.
_CANDIDATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchWorkload:
    """What is encoded and searched."""

    documents: int
    queries: int
    top_k: int  # documents of each query
    tokens_per_text: int  # of a document, mean, padding included
    tokens_per_query: int
    chunk_tokens: int  # of a forward pass on one rank
    unshard: Unshard
    index: IndexConfig
    search_flops: float  # operations per second that a rank reaches in products of queries and documents
    tokens_per_second: float  # that the cores of a rank tokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMemory:
    """Bytes of one rank by kind. Those with `host_` are in host memory, the others on the device."""

    parameters: float  # of the model
    gathered: float  # unsharded weights
    activations: float  # of a forward pass
    embeddings: float  # of a block of chunks, before they are added to the index
    index: float  # vectors or their copy
    buffers: float  # a tile, its scores, queries and candidates
    host_index: float  # vectors or their copy
    host_plan: float  # which text is encoded where, over all documents
    host_tokens: float  # of this rank's texts

    @property
    def by_kind(self) -> dict[str, float]:
        """All kinds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def device(self) -> float:
        """Bytes on the device: when it encodes, or when it searches."""
        encoding = self.gathered + self.activations + self.embeddings
        return self.parameters + self.index + max(encoding, self.buffers)

    @property
    def host(self) -> float:
        """Bytes in host memory, without what Python and the libraries take."""
        return self.host_index + self.host_plan + self.host_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTraffic:
    """Bytes that a rank sends, and seconds."""

    weights: float  # all-gathers of weights for forward passes
    texts: float  # hashes, lengths and tokens of documents
    queries: float  # their vectors, to all ranks
    results: float  # to the ranks that merge them, and from there to all
    tokenize_seconds: float  # before texts are encoded: the plan needs all lengths
    encode_seconds: float
    search_seconds: float

    @property
    def bytes(self) -> float:
        """Bytes of all."""
        return self.weights + self.texts + self.queries + self.results


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCosts:
    """What an evaluation or mining needs."""

    memory: SearchMemory
    traffic: SearchTraffic
    disk: float  # bytes of the stored vectors of all ranks
    on_device: bool  # whether what a search reads is on the device

    def as_json(self) -> dict[str, object]:
        """Plain values: bytes and seconds."""
        memory, traffic = self.memory, self.traffic
        return {
            "memory": {**memory.by_kind, "device": memory.device, "host": memory.host},
            "traffic": {**asdict(traffic), "bytes": traffic.bytes},
            "disk": self.disk,
            "on_device": self.on_device,
        }


def search_costs(model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, work: SearchWorkload) -> SearchCosts:
    """Memory, traffic and duration on one rank."""
    local = -(-work.documents // cluster.ranks)
    document = _Document.of(work.index, model)
    scanned = local * document.scanned_bytes
    encoding = encoding_memory(model, layout, work.chunk_tokens)
    place, has_copy = work.index.place, document.has_copy
    if place is VectorPlacement.auto or (has_copy and place is VectorPlacement.disk):
        on_device = cluster.gpu and scanned <= MAX_DEVICE_FRACTION * (cluster.memory - encoding.parameters)
    else:
        on_device = place is VectorPlacement.device
    on_host = 0.0 if on_device or (place is VectorPlacement.disk and not has_copy) else scanned
    if has_copy and place is not VectorPlacement.disk:
        on_host += local * document.bytes
    texts_per_chunk = max(1, work.chunk_tokens // work.tokens_per_text)
    memory = SearchMemory(
        parameters=encoding.parameters,
        gathered=encoding.gathered,
        activations=encoding.activations,
        embeddings=2.0 * _FP32 * model.dimension * model.vectors[1] * CHUNKS_PER_BLOCK * texts_per_chunk,
        index=scanned if on_device else 0.0,
        buffers=_buffers(model, work, document, gpu=cluster.gpu),
        host_index=on_host,
        host_plan=max(PLANNING_BYTES * work.documents, PLAN_BYTES * work.documents + LOCAL_BYTES * local),
        host_tokens=3.0 * _TOKEN * _kept_tokens(local, work),
    )
    return SearchCosts(
        memory=memory,
        traffic=_traffic(model, layout, cluster, work, scanned=scanned, on_device=on_device),
        disk=float(work.documents * document.bytes),
        on_device=on_device,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """What an index has of a document, in means."""

    bytes: float  # of its vectors
    scanned_bytes: float  # that every search reads: these, a copy of them, or pooled vectors
    scanned_vectors: float
    has_copy: bool  # whether these are others

    @classmethod
    def of(cls, index: IndexConfig, model: ModelSpec) -> "_Document":
        kept = _pooled(model.vectors[1], index.token_pooling)
        size = dtype_of(index).itemsize * model.dimension
        scanned, scanned_size = kept, float(size)
        if index.scan_dtype is not None:  # scales and residuals are float32
            scanned_size = SCAN_DTYPES[index.scan_dtype].itemsize * model.dimension + 2.0 * _FP32
        elif index.first_stage is not None:
            scanned = _pooled(kept, index.first_stage_pooling)
        return cls(
            bytes=kept * size,
            scanned_bytes=scanned * scanned_size,
            scanned_vectors=scanned,
            has_copy=index.scan_dtype is not None or index.first_stage is not None,
        )


def _pooled(vectors: float, factor: float) -> float:
    """The vectors that `token_pooling` keeps: the first, and one in `factor` of the others."""
    return 1 + (vectors - 1) / factor


def _kept_tokens(local: int, work: SearchWorkload) -> int:
    tokens = local * work.tokens_per_text
    return tokens if tokens <= MAX_KEPT_TOKENS else 0  # more are tokenized a second time


def _buffers(model: ModelSpec, work: SearchWorkload, document: _Document, *, gpu: bool) -> float:
    """Queries, their candidates, and a tile: its vectors in both types, and the products with a batch of queries.

    Of vectors of tokens, products are computed in blocks, of which the best of each document stay.
    """
    queries, rows = min(work.queries, QUERIES_PER_SCAN), min(work.queries, QUERY_BATCH_SIZE)
    limit = work.top_k + 32 if work.index.scan_dtype is None else scanned_candidates(work.top_k)
    candidates = queries * (limit + PENDING_CANDIDATES) * (_FP32 + 8)
    of_query, dimension = model.vectors[0], model.dimension
    vectors, products = TILE, float(rows * TILE)
    if model.vectors != (1, 1):
        rows = min(rows * of_query, max(of_query, MAX_QUERY_ROWS))
        vectors = TILE_ROWS
        products = (BLOCK_NUMEL_GPU if gpu else BLOCK_NUMEL_CPU) + rows * TILE_ROWS / document.scanned_vectors
    return 2 * _FP32 * (products + vectors * dimension) + _FP32 * queries * of_query * dimension + candidates


def _traffic(
    model: ModelSpec,
    layout: ParallelLayout,
    cluster: ClusterSpec,
    work: SearchWorkload,
    *,
    scanned: float,
    on_device: bool,
) -> SearchTraffic:
    per_node, ranks = min(cluster.per_node, cluster.ranks), cluster.ranks
    local = -(-work.documents // ranks)
    everyone = Ring(ranks, per_node, cluster)
    shards = Ring(layout.shard, min(layout.shard, per_node), cluster)
    tokens = (work.documents * work.tokens_per_text + work.queries * work.tokens_per_query) / ranks
    passes = 1.0 if work.unshard is Unshard.model else max(1.0, tokens / work.chunk_tokens)
    weights = shards.fraction * passes * model.compute_bytes * model.weights.parameters if layout.shard > 1 else 0.0
    texts = everyone.fraction * ((8 + 4) * work.documents + _TOKEN * _kept_tokens(local, work))
    queries = everyone.fraction * _FP32 * work.queries * model.vectors[0] * model.dimension
    results = everyone.fraction * 2 * 8 * work.queries * work.top_k
    if work.index.first_stage is not None:  # those of the first stage, and the scores of all that it has found
        found = min(work.documents, max(work.top_k, work.index.first_stage))
        results = everyone.fraction * 2 * (8 + _FP32) * work.queries * found

    flops = work.documents * model.weights.document.of(work.tokens_per_text)[0]
    flops += work.queries * model.weights.query.of(work.tokens_per_query)[0]
    compute = flops / ranks / cluster.flops
    # Tokens that are not kept are created again by a thread.
    again = 0.0 if _kept_tokens(local, work) else tokens / work.tokens_per_second
    gathers = shards.seconds(weights, passes * len(model.weights.groups))
    scans = -(-work.queries // QUERIES_PER_SCAN)
    document = _Document.of(work.index, model)
    reading = _reading_seconds(document, cluster, work, 0.0 if on_device else scans * scanned)
    pairs = work.queries * model.vectors[0] * local * document.scanned_vectors
    products = 2.0 * pairs * model.dimension / work.search_flops
    return SearchTraffic(
        weights=weights,
        texts=texts,
        queries=queries,
        results=results,
        tokenize_seconds=tokens / work.tokens_per_second + everyone.seconds(texts, 4),
        encode_seconds=max(compute, gathers, again),
        search_seconds=max(products, reading) + everyone.seconds(queries + results, 3.0 * scans),
    )


def _reading_seconds(document: _Document, cluster: ClusterSpec, work: SearchWorkload, scanned: float) -> float:
    """Seconds to read what is not on the device: `scanned` bytes in order, and single vectors of candidates."""
    is_mapped, has_copy = work.index.place is VectorPlacement.disk, document.has_copy
    bandwidth = _DISK_BANDWIDTH if is_mapped and not has_copy else HOST_BANDWIDTH
    seconds = scanned / bandwidth if cluster.gpu or bandwidth == _DISK_BANDWIDTH else 0.0
    if has_copy:
        found = _CANDIDATES * work.top_k if work.index.first_stage is None else work.index.first_stage
        candidates = min(work.documents, found) * work.queries / cluster.ranks
        seconds += candidates * (_PAGE / _DISK_BANDWIDTH if is_mapped else document.bytes / HOST_BANDWIDTH)
    return seconds
