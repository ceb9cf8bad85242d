"""One rank's part of a global batch: chunks of tokens to encode, and what the loss needs besides embeddings.

B, M: queries and documents of this rank's rows; T: texts of the global batch.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.chunks import ChunkPlan, plan_towers
from embedtrain.data.rows import Example, TextFormat, text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, ComparedTexts, EncoderInputs, GlobalBatch
from embedtrain.distributed.collectives import exchange_rows
from embedtrain.losses.encoded import row_indices
from embedtrain.losses.types import FROM_ROWS, BatchInfo, GlobalRows, Guide, Loss, Origin, RowSources, Sizes


@dataclass(frozen=True, slots=True)
class Exchange:
    """Which rows of encoded texts go to which rank; every rank knows it without communication.

    A text has one row or several, see `Part`.
    """

    send_order: Tensor  # int64 [n], the rows encoded here, sorted by the rank that their batch row is on
    num_sent: Sequence[int]  # [W], rows sent to each rank
    num_received: Sequence[int]  # [W], rows received from each rank
    received_rows: Tensor  # int64 [m], index among this rank's rows of each row received, in order of arrival
    sizes: NDArray[np.int64] | None  # rows of each text of this rank's batch rows, in their order; None: one each

    def to_row_owner(self, embeddings: Tensor) -> Tensor:
        """Rows [n, D] of the texts encoded here -> those of this rank's batch rows [m, D], without gradient.

        A collective.
        """
        received = exchange_rows(embeddings[self.send_order], self.num_sent, self.num_received)
        return torch.empty_like(received).index_copy_(0, self.received_rows, received)

    def to_encoder_rank(self, grads: Tensor) -> Tensor:
        """Gradients [m, D] of what `to_row_owner` returned -> those of the rows encoded here [n, D]. A collective."""
        received = exchange_rows(grads[self.received_rows], self.num_received, self.num_sent)
        return torch.empty_like(received).index_copy_(0, self.send_order, received)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Exchange":
        """The same exchange with `change` applied to its tensors."""
        return replace(self, send_order=change(self.send_order), received_rows=change(self.received_rows))


def plan_exchange(
    encoder_ranks: NDArray[np.int64],
    row_ranks: NDArray[np.int64],
    rank: int,
    size: int,
    encoded: NDArray[np.int64],
    sizes: NDArray[np.int64] | None = None,
) -> Exchange:
    """What rank `rank` of `size` sends and receives.

    Args:
        encoder_ranks: int64 [T], the rank that encodes each text of the global batch.
        row_ranks: int64 [T], the rank that has the batch row of each text.
        encoded: int64 [n], the texts that this rank encodes, in the order of its embeddings.
        sizes: int64 [T], the rows of each encoded text; None: one each.
    """
    destinations = row_ranks[encoded]
    send_order = np.lexsort((encoded, destinations))  # by rank, then by text: the order that the receiver expects
    local = np.flatnonzero(row_ranks == rank)
    origins = encoder_ranks[local]
    sent, received = (None, None) if sizes is None else (sizes[encoded], sizes[local])
    return Exchange(
        send_order=row_indices(torch.from_numpy(send_order), sent),
        num_sent=np.bincount(destinations, sent, minlength=size).astype(np.int64).tolist(),
        num_received=np.bincount(origins, received, minlength=size).astype(np.int64).tolist(),
        received_rows=row_indices(torch.from_numpy(np.argsort(origins, kind="stable")), received),
        sizes=received,
    )


@dataclass(frozen=True, slots=True)
class GuideTokenizer:
    """Tokenises a rank's rows for a guide model, with the guide's vocabulary, maximal length and prompts."""

    tokenizer: TextTokenizer
    text_format: TextFormat
    chunk_tokens: int

    def __call__(self, rows: Sequence[Example]) -> tuple[Chunk, ...]:
        """Chunks of all queries, then all documents, of these rows."""
        query_prompt, document_prompt = self.text_format.query_prompt, self.text_format.document_prompt
        queries = [query_prompt + row.query for row in rows]
        documents = [document_prompt + text for row in rows for text in row.documents.texts]
        prompts = [query_prompt] * len(queries) + [document_prompt] * len(documents)
        return tuple(self.tokenizer.chunks(queries + documents, self.chunk_tokens, prompts))


def pass_overhead(*, on_gpu: bool, sharded: bool) -> int:
    """The cost of one more forward and backward pass besides its tokens, in tokens.

    On a CPU a pass reads all weights (all-MiniLM-L6-v2: about 32 tokens, measured), on a GPU it launches kernels;
    sharded weights are gathered for every pass.
    """
    return (1024 if sharded else 512) if on_gpu else (64 if sharded else 32)


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """How texts are cut into chunks; each chunk is one forward pass."""

    chunk_tokens: int  # maximal tokens of a chunk, including padding
    activation_tokens: int | None = None  # maximal tokens whose graphs are kept together; None: `chunk_tokens`
    pass_overhead_tokens: int = 32  # cost of one more pass, in tokens; more passes need less padding

    def num_cached_graphs(self, sizes: Iterable[int]) -> int:
        """How many of the first chunks keep their graphs, given the tokens of each chunk including padding."""
        limit = self.chunk_tokens if self.activation_tokens is None else self.activation_tokens
        return sum(tokens <= limit for tokens in itertools.accumulate(sizes))


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of a global batch, tokenised."""

    step: int
    # The texts that this rank encodes, tower by tower and longest first; rows count through all chunks. A dummy stands
    # before chunks of another tower if this rank has fewer of its tower than others.
    chunks: tuple[Chunk, ...]
    num_queries: int  # embeddings of queries: B, or 0 if the encoder takes pairs
    batch_info: BatchInfo
    num_rows: int  # of the global batch
    num_cached_graphs: int  # how many of the first chunks keep their graphs in memory; the same on all ranks
    num_passes: int  # the largest number of chunks of any rank
    max_documents: int  # documents of the longest row of the global batch
    exchanges: tuple[Exchange, ...]  # of each part of the embeddings: sends its rows to the ranks of their batch rows
    guides: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)  # chunks for guide models, by path

    @property
    def lengths(self) -> torch.Tensor:
        """Int64 [N], tokens of each text that this rank encodes; read it before the batch is moved to a device."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk.lengths for chunk in self._chunks_of_texts)])

    def lengths_of(self, tower: int) -> torch.Tensor:
        """Those of the texts that a tower encodes."""
        chunks = (chunk for chunk in self._chunks_of_texts if chunk.tower == tower)
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk.lengths for chunk in chunks)])

    def patches_of(self, tower: int) -> torch.Tensor:
        """The patches of each picture, or tile, among the texts that a tower encodes."""
        pictures = [chunk.pictures for chunk in self._chunks_of_texts if chunk.tower == tower]
        patches = [count for of_chunk in pictures if of_chunk is not None for count in of_chunk.patches]
        return torch.tensor(patches, dtype=torch.int64)

    @property
    def real_tokens(self) -> int:
        """Tokens of the texts that this rank encodes."""
        return int(self.lengths.sum())

    @property
    def computed_tokens(self) -> int:
        """Tokens that this rank computes, including padding."""
        return sum(chunk.ids.numel() for chunk in self._chunks_of_texts)

    @property
    def _chunks_of_texts(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if not chunk.is_dummy]

    def to(self, device: torch.device) -> "RankBatch":
        """The same batch on `device`, without waiting for the copies."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "RankBatch":
        """The same batch in page-locked memory, from which a GPU copies while it computes."""
        return self._map_tensors(torch.Tensor.pin_memory)

    def prepared_for(self, loss: Loss, dimension: int) -> "RankBatch":
        """The same batch with what the host can compute for `loss` on embeddings of this dimension."""
        prepared = {**self.batch_info.prepared, **loss.prepare(self.batch_info, dimension)}
        return replace(self, batch_info=replace(self.batch_info, prepared=prepared))

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RankBatch":
        return replace(
            self,
            chunks=tuple(chunk.map_tensors(change) for chunk in self.chunks),
            batch_info=self.batch_info.map_tensors(change),
            exchanges=tuple(exchange.map_tensors(change) for exchange in self.exchanges),
            guides={path: tuple(chunk.map_tensors(change) for chunk in chunks) for path, chunks in self.guides.items()},
        )


def make_rank_batch(
    batch: GlobalBatch,
    rank: int,
    size: int,
    tokenizer: TextTokenizer,
    chunk_options: ChunkOptions,
    *,
    guides: Mapping[str, GuideTokenizer] | None = None,
    stored_guides: Mapping[str, Callable[[Sequence[Example]], Guide]] | None = None,
    teacher_dimension: int | None = None,
) -> RankBatch:
    """The part of `batch` that rank `rank` computes. Queries and documents share chunks if one tower encodes both.

    All ranks know all lengths, so texts are distributed such that every rank has the same number of chunks and about
    the same number of tokens; the embeddings are then sent to the ranks of their rows. If not all graphs fit in memory,
    those of the longest texts are kept, which saves the most computation.

    Args:
        batch: the global batch, tokenised.
        guides: tokenizers of guide models, by path.
        stored_guides: what reads the vectors of guides on disk, by path.
        teacher_dimension: dimension of the teacher's vectors in the rows, if there are any; also on ranks without rows.
    """
    tokens = batch.tokens
    assert tokens is not None, "the data is not tokenised"
    inputs = tokenizer.inputs(tokens)
    chunks, exchanges, plan = _encode_plan(inputs, rank, size, tokenizer, chunk_options)
    rows = batch.rows_of_rank(rank, size) if batch.has_loss_columns or guides or stored_guides else None
    compared = inputs.compared(tokens)
    global_rows = _global_rows(compared, inputs, batch.known_answers, rank, size)
    row_sources = None if batch.row_sources is None else RowSources.of(batch.row_sources, rank, size)
    has_ids = batch.has_ids
    if has_ids is None:
        has_ids = batch.has_loss_columns and any(any(row.documents.ids) for row in batch.rows)
    batch_info = _make_batch_info(
        rows,
        global_rows,
        has_ids=has_ids and len(compared.keys) == len(tokens.keys),  # an id is that of a whole document
        step=batch.step,
        source=batch.source or 0,
        teacher_dimension=teacher_dimension,
        row_sources=row_sources,
        num_negatives=None if batch.num_batch_negatives is None else batch.num_batch_negatives[rank::size],
    )
    stored = {path: read(rows or ()) for path, read in (stored_guides or {}).items()}
    return RankBatch(
        step=batch.step,
        chunks=tuple(chunks),
        num_queries=len(global_rows.local_rows) if inputs.num_queries else 0,
        batch_info=replace(batch_info, guides={**batch_info.guides, **stored}),
        num_rows=len(batch.rows),
        num_cached_graphs=chunk_options.num_cached_graphs(
            plan.max_tokens_per_chunk(inputs.costs, packed=tokenizer.packed)
        ),
        num_passes=plan.num_chunks,
        max_documents=int(compared.num_documents.max(initial=0)),
        exchanges=exchanges,
        guides={path: tokenize(rows or ()) for path, tokenize in (guides or {}).items()},
    )


def _global_rows(
    texts: ComparedTexts, inputs: EncoderInputs, known_answers: NDArray[np.int64], rank: int, size: int
) -> GlobalRows:
    """What the texts say about the rows of all ranks, those of rank 0 first."""
    # Row r is on rank r % size, as in `GlobalBatch.rows_of_rank`.
    num_rows, ranks = len(texts.num_documents), np.arange(len(texts.num_documents)) % size
    queries, documents = (np.argsort(part, kind="stable") for part in (ranks, np.repeat(ranks, texts.num_documents)))
    return GlobalRows(
        rank=rank,
        num_rows=[len(range(other, num_rows, size)) for other in range(size)],
        num_documents=texts.num_documents[queries].astype(np.int64),
        query_keys=texts.keys[:num_rows][queries],
        document_keys=texts.keys[num_rows:][documents],
        known_answers=known_answers,
        sizes=tuple(
            Sizes()
            if sizes is None
            else Sizes(sizes[: inputs.num_queries][queries], sizes[inputs.num_queries :][documents])
            for sizes in inputs.sizes
        ),
    )


def _make_batch_info(
    rows: Sequence[Example] | None,
    global_rows: GlobalRows,
    *,
    has_ids: bool,
    step: int,
    source: int,
    teacher_dimension: int | None,
    row_sources: RowSources | None,
    num_negatives: NDArray[np.int64] | None,
) -> BatchInfo:
    """What the loss needs besides the embeddings of this rank's rows; `rows` is None if they hold nothing but texts.

    `num_negatives` are the documents of other rows that each row has besides its own; their scores are 0.
    """
    local_rows, local_documents = (
        slice(r.start, r.stop) for r in (global_rows.local_rows, global_rows.local_documents)
    )
    query_keys = torch.from_numpy(global_rows.query_keys[local_rows])
    document_keys = torch.from_numpy(global_rows.document_keys[local_documents])
    owners = torch.from_numpy(np.repeat(np.arange(len(query_keys)), global_rows.local_num_documents))
    known_rows = [] if rows is None else list(rows)
    # Ids are compared within a source: "7" of another source is another document.
    ids, scores = list[str](), list[float]()
    counts = [0] * len(known_rows) if num_negatives is None else num_negatives.tolist()[: len(known_rows)]
    for row, count in zip(known_rows, counts, strict=True):
        own_ids = [name and f"{row.source} {name}" for name in row.documents.all_ids]
        ids += [*own_ids, *[""] * count]
        scores += [*row.documents.scores, *[0.0] * count] if row.documents.scores else []
    labels = [row.label for row in known_rows if row.label is not None]
    # A rank without rows cannot know whether other ranks have scores or labels: it has an empty tensor of each.
    return BatchInfo(
        owners=owners,
        query_keys=query_keys,
        document_keys=document_keys,
        document_ids=_id_keys(ids, document_keys) if has_ids else None,
        scores=torch.tensor(scores, dtype=torch.float32) if len(scores) == len(owners) else None,
        labels=torch.tensor(labels, dtype=torch.int64) if len(labels) == len(query_keys) else None,
        guides={} if teacher_dimension is None else {FROM_ROWS: _teacher_vectors(known_rows, teacher_dimension)},
        origin=Origin(batch=step, source=source),
        global_rows=global_rows,
        prepared={} if row_sources is None else {RowSources: row_sources},
    )


def _id_keys(ids: Sequence[str], keys: Tensor) -> Tensor:
    """The hash of each id, or of the text of a document without an id."""
    has_id = torch.tensor([bool(name) for name in ids], dtype=torch.bool)
    # No text begins with this prefix, so that an id never equals a text.
    return torch.where(has_id, torch.from_numpy(text_keys([f"\0id {name}" for name in ids])), keys)


def _teacher_vectors(rows: Sequence[Example], dimension: int) -> Guide:
    queries = [np.asarray(row.vectors[0], dtype=np.float32) for row in rows]
    documents = [np.asarray(vector, dtype=np.float32) for row in rows for vector in row.vectors[1:]]
    of_queries, of_documents = (
        torch.from_numpy(np.stack(vectors) if vectors else np.empty((0, dimension), dtype=np.float32))
        for vectors in (queries, documents)
    )
    return Guide(of_queries, of_documents)


def _encode_plan(
    inputs: EncoderInputs, rank: int, size: int, tokenizer: TextTokenizer, chunk_options: ChunkOptions
) -> tuple[list[Chunk], tuple[Exchange, ...], ChunkPlan]:
    """This rank's chunks, the exchange of each part of the embeddings, and which rank encodes which texts."""
    plan = plan_towers(
        inputs.costs,
        inputs.towers,
        size,
        chunk_options.chunk_tokens,
        chunk_options.pass_overhead_tokens,
        packed=tokenizer.packed,
        further=inputs.further,
    )
    parts = plan.chunks_of_rank(rank)
    encoded = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
    first, chunks = 0, list[Chunk]()
    none = [False] * plan.num_chunks
    have_further = none if inputs.further is None else plan.has_any(inputs.further.has_any)
    for number, (texts, has_further) in enumerate(zip(parts, have_further, strict=True)):
        if len(texts):
            chunk = tokenizer.make_chunk(inputs.tokens(texts), range(first, first + len(texts)))
            first += len(texts)
        elif plan.towers or has_further:  # a chunk of another tower, or without pictures, may follow
            chunk = tokenizer.dummies()[plan.towers[number] if plan.towers else 0]
        else:
            continue
        chunks.append(tokenizer.layout.with_further(chunk) if has_further else chunk)
    owners, texts = inputs.owners, inputs.texts_of(encoded)
    exchanges = tuple(
        plan_exchange(plan.encoder_rank[owners], inputs.rows[owners] % size, rank, size, texts, sizes)
        for sizes in inputs.sizes
    )
    return chunks, exchanges, plan
