"""From a global batch to what this rank computes: chunks of tokens, and what the loss must know of this rank's rows.

B, M: queries and documents of this rank's rows; T: texts of the global batch.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.chunks import ChunkPlan, plan_chunks
from embedtrain.data.keys import text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import BatchTokens, GlobalBatch, Row, Tokens
from embedtrain.losses.types import FROM_ROWS, BatchInfo, Guide
from embedtrain.training.exchange import Exchange, plan_exchange


def batch_info_of(
    rows: Sequence[Row] | None,
    num_documents: Tensor,
    query_keys: Tensor,
    document_keys: Tensor,
    *,
    step: int,
    source: int,
    teacher_dimension: int | None,
) -> BatchInfo:
    """What the loss must know of B rows with M documents.

    Args:
        rows: None where they hold nothing but texts.
        num_documents: int64 [B], of each row.
        query_keys: int64 [B], see `text_keys`.
        document_keys: int64 [M].
        step: a number that is the same on every rank.
        source: see BatchInfo.
        teacher_dimension: of the vectors that rows hold, if they do: a rank without rows must know it too.
    """
    owners = torch.repeat_interleave(torch.arange(len(num_documents)), num_documents)
    held = [] if rows is None else list(rows)
    # Ids are a source's own: another's "7" is another document.
    ids = [name and f"{row.source} {name}" for row in held for name in row.ids or [""] * len(row.documents)]
    scores = [score for row in held for score in row.scores]
    labels = [row.label for row in held if row.label is not None]
    # A rank without rows cannot tell whether others' have scores or labels: it has an empty tensor of each.
    return BatchInfo(
        owners=owners,
        query_keys=query_keys,
        document_keys=document_keys,
        document_ids=_id_keys(ids, document_keys) if any(ids) else None,
        scores=torch.tensor(scores, dtype=torch.float32) if len(scores) == len(owners) else None,
        labels=torch.tensor(labels, dtype=torch.int64) if len(labels) == len(query_keys) else None,
        guides={} if teacher_dimension is None else {FROM_ROWS: _teacher(held, teacher_dimension)},
        seed=step,
        source=source,
    )


def _id_keys(ids: Sequence[str], keys: Tensor) -> Tensor:
    """The key of each id; of a document without one the key of its text."""
    has = torch.tensor([bool(name) for name in ids])
    # A prefix that no text begins with: an id must not look like the text that reads the same.
    return torch.where(has, text_keys([f"\0id {name}" for name in ids]), keys)


def _teacher(rows: Sequence[Row], width: int) -> Guide:
    """The vectors that came with the rows."""
    queries = [np.asarray(row.vectors[0], dtype=np.float32) for row in rows]
    documents = [np.asarray(vector, dtype=np.float32) for row in rows for vector in row.vectors[1:]]
    made = (np.stack(part) if part else np.empty((0, width), dtype=np.float32) for part in (queries, documents))
    return Guide(*(torch.from_numpy(part) for part in made))


@dataclass(frozen=True, slots=True)
class GuideTokenizer:
    """Tokenises a rank's rows for one guide: its own vocabulary, length and prompts.

    Attributes:
        tokenizer: the guide's.
        query_prompt: put before queries, instead of the trained model's.
        document_prompt: likewise.
        chunk_tokens: tokens, padding included, of one forward pass.
    """

    tokenizer: TextTokenizer
    query_prompt: str
    document_prompt: str
    chunk_tokens: int

    def __call__(self, rows: Sequence[Row]) -> tuple[Tokens, ...]:
        """Chunks of all queries, then all documents, of these rows."""
        queries = [self.query_prompt + row.query for row in rows]
        documents = [self.document_prompt + text for row in rows for text in row.documents]
        prompts = [self.query_prompt] * len(queries) + [self.document_prompt] * len(documents)
        return tuple(self.tokenizer.chunks(queries + documents, self.chunk_tokens, prompts))


def pass_overhead(*, on_gpu: bool, sharded: bool) -> int:
    """What one more forward and backward pass costs besides its tokens, as so many tokens.

    On a CPU it reads all weights once more (all-MiniLM-L6-v2: about 32 tokens, measured), on a GPU its kernels have to
    be launched; sharded weights are gathered for it.
    """
    return (1024 if sharded else 512) if on_gpu else (64 if sharded else 32)


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """How texts are cut into chunks, one forward pass each.

    Attributes:
        chunk_tokens: tokens, padding included, that one may hold.
        activation_tokens: tokens whose graphs may be held together; default: `chunk_tokens`.
        pass_overhead_tokens: what one more pass costs, in tokens: more passes mean less padding.
    """

    chunk_tokens: int
    activation_tokens: int | None = None
    pass_overhead_tokens: int = 32

    def kept(self, sizes: Iterable[int]) -> int:
        """Of how many chunks, the first ones, the graphs may be held, given the tokens of each, padding included."""
        keep = self.chunk_tokens if self.activation_tokens is None else self.activation_tokens
        return sum(tokens <= keep for tokens in itertools.accumulate(sizes))


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's part of a global batch, tokenised.

    Attributes:
        step: counted from 0.
        chunks: the texts that this rank encodes, cut by length; `Tokens.rows` numbers them through.
        num_queries: B.
        batch_info: what the loss needs to know of this rank's rows.
        num_rows: rows of the whole global batch.
        kept: of how many chunks, the first ones, the graphs may be held in memory together; the same on all ranks.
        num_passes: chunks of the rank that has most.
        max_documents: documents of the longest row of all ranks.
        exchange: how vectors come to the ranks of their rows.
        guides: chunks of this rank's rows for other models, by path.
    """

    step: int
    chunks: tuple[Tokens, ...]
    num_queries: int
    batch_info: BatchInfo
    num_rows: int
    kept: int
    num_passes: int
    max_documents: int
    exchange: Exchange
    guides: Mapping[str, tuple[Tokens, ...]] = field(default_factory=dict)

    @property
    def lengths(self) -> torch.Tensor:
        """Int64 [N], tokens of each text that this rank encodes; to be read before the batch goes to a device."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk.lengths for chunk in self.chunks)])

    @property
    def real_tokens(self) -> int:
        """Tokens of the texts that this rank encodes."""
        return int(self.lengths.sum())

    @property
    def computed_tokens(self) -> int:
        """Tokens computed, padding included."""
        return sum(chunk.ids.numel() for chunk in self.chunks)

    def to(self, device: torch.device) -> "RankBatch":
        """The same batch with its tensors on `device`; this process does not wait for them."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "RankBatch":
        """The same in page-locked memory, from where a GPU fetches it while it computes."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RankBatch":
        return replace(
            self,
            chunks=tuple(chunk.each(change) for chunk in self.chunks),
            batch_info=self.batch_info.each(change),
            exchange=self.exchange.each(change),
            guides={path: tuple(chunk.each(change) for chunk in chunks) for path, chunks in self.guides.items()},
        )


def cut(
    batch: GlobalBatch,
    rank: int,
    size: int,
    tokenizer: TextTokenizer,
    cutting: ChunkOptions,
    *,
    guides: Mapping[str, GuideTokenizer] | None = None,
    teacher_dimension: int | None = None,
) -> RankBatch:
    """Rank `rank`'s part of `batch`: queries and documents share chunks, for one encoder serves both.

    All ranks know all lengths: texts are dealt so that every rank has as many chunks as any other and as much to
    compute, and vectors travel to the ranks of their rows. Of graphs that may not all be kept the longest texts' are:
    the most saved for the memory they take.

    Args:
        batch: the global batch.
        rank: this rank.
        size: number of ranks.
        tokenizer: bound to the model's length.
        cutting: how chunks are cut.
        guides: how the same rows are cut for other models.
        teacher_dimension: of the vectors that rows hold, if they do: a rank without rows must know it too.
    """
    tokens = batch.tokens
    assert tokens is not None, "the data is not tokenised"
    chunks, exchange, dealt = _dealt(tokens, rank, size, tokenizer, cutting)
    rows = batch.share(rank, size) if batch.beside or guides else None
    num_documents = tokens.num_documents[rank::size]
    keys = torch.from_numpy(tokens.keys[_ranks_of_rows(tokens, size) == rank])
    num_queries = len(num_documents)
    return RankBatch(
        step=batch.step,
        chunks=tuple(chunks),
        num_queries=num_queries,
        batch_info=batch_info_of(
            rows,
            torch.from_numpy(num_documents),
            keys[:num_queries],
            keys[num_queries:],
            step=batch.step,
            source=batch.source or 0,
            teacher_dimension=teacher_dimension,
        ),
        num_rows=len(batch.rows),
        kept=cutting.kept(dealt.max_tokens_per_chunk(tokens.lengths, packed=tokenizer.packed)),
        num_passes=dealt.num_chunks,
        max_documents=int(tokens.num_documents.max(initial=0)),
        exchange=exchange,
        guides={path: texts(rows or ()) for path, texts in (guides or {}).items()},
    )


def _dealt(
    tokens: BatchTokens, rank: int, size: int, tokenizer: TextTokenizer, cutting: ChunkOptions
) -> tuple[list[Tokens], Exchange, ChunkPlan]:
    """This rank's chunks, how vectors reach the ranks of their rows, and who encodes what."""
    dealt = plan_chunks(
        tokens.lengths, size, cutting.chunk_tokens, cutting.pass_overhead_tokens, packed=tokenizer.packed
    )
    parts = [part for part in dealt.chunks_of_rank(rank) if len(part)]
    encoded = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
    first, chunks = 0, []
    for part in parts:
        chunks.append(tokenizer.make_chunk(tokens.ids(part), tokens.lengths[part], range(first, first + len(part))))
        first += len(part)
    return chunks, plan_exchange(dealt.encoder_rank, _ranks_of_rows(tokens, size), rank, size, encoded), dealt


def _ranks_of_rows(tokens: BatchTokens, size: int) -> NDArray[np.int64]:
    """The rank that has the row of each text, int64 [T]; see GlobalBatch.share."""
    ranks = np.arange(len(tokens.num_documents)) % size
    return np.concatenate([ranks, np.repeat(ranks, tokens.num_documents)])
