"""From a global batch to what this rank computes: chunks of tokens and what the loss must know.

B, M: queries and documents of this rank.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, Row, Tokens
from embedtrain.losses.types import FROM_ROWS, Guide, LossInput

# A share is cut into about this many pieces: more save little padding, and under FSDP each gathers all weights.
_PIECES = 4
_LEAST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class GuideTexts:
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
        queries = [self.query_prompt + row.query[row.prompt_lengths[0] :] for row in rows]
        documents = [self.document_prompt + text[row.prompt_lengths[1] :] for row in rows for text in row.documents]
        return tuple(self.tokenizer.chunks(queries + documents, self.chunk_tokens))


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a global batch, tokenised.

    Attributes:
        step: counted from 0.
        chunks: B queries and M documents together, cut by length; `Tokens.rows` counts queries first.
        num_queries: B.
        known: what the loss needs to know of the rows.
        num_rows: rows of the whole global batch.
        kept: of how many chunks, the first ones, the graphs may be held in memory together.
        guides: chunks of the same texts for other models, by path.
    """

    step: int
    chunks: tuple[Tokens, ...]
    num_queries: int
    known: LossInput
    num_rows: int
    kept: int
    guides: Mapping[str, tuple[Tokens, ...]] = field(default_factory=dict)

    @property
    def real_tokens(self) -> int:
        """Tokens of this rank's texts."""
        return sum(chunk.num_real for chunk in self.chunks)

    @property
    def computed_tokens(self) -> int:
        """Tokens computed, padding included."""
        return sum(chunk.ids.numel() for chunk in self.chunks)

    def to(self, device: torch.device) -> "RankBatch":
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            chunks=tuple(chunk.to(device) for chunk in self.chunks),
            known=self.known.to(device),
            guides={path: tuple(chunk.to(device) for chunk in chunks) for path, chunks in self.guides.items()},
        )


def cut(
    batch: GlobalBatch,
    rank: int,
    size: int,
    tokenizer: TextTokenizer,
    chunk_tokens: int,
    keep_tokens: int | None = None,
    *,
    least: int = _LEAST_TOKENS,
    guides: Mapping[str, GuideTexts] | None = None,
    teacher_dimension: int | None = None,
) -> RankBatch:
    """Rank `rank`'s part of `batch`: queries and documents share chunks, for one encoder serves both.

    A share whose graphs may all be kept is cut as well, into pieces of like length, so that hardly any padding
    is computed. Of a larger one the longest texts are kept: the most saved for the memory they take.

    Args:
        batch: the global batch.
        rank: this rank.
        size: number of ranks.
        tokenizer: bound to the model's length.
        chunk_tokens: tokens, padding included, of one forward pass.
        keep_tokens: tokens whose graphs may be held together; default: `chunk_tokens`.
        least: tokens below which a piece would only be slower.
        guides: how the same rows are cut for other models.
        teacher_dimension: of the vectors that rows hold, if they do: a rank without rows must know it too.
    """
    rows = batch.share(rank, size)
    queries = [row.query for row in rows]
    documents = [text for row in rows for text in row.documents]
    ids = tokenizer.ids(queries + documents)
    real = sum(len(text) for text in ids)
    keep = chunk_tokens if keep_tokens is None else keep_tokens
    chunks = tokenizer.cut(ids, min(chunk_tokens, max(least, -(-real // _PIECES))))
    if sum(chunk.ids.numel() for chunk in chunks) > keep:
        chunks = tokenizer.cut(ids, chunk_tokens)
    held = itertools.accumulate(chunk.ids.numel() for chunk in chunks)
    return RankBatch(
        step=batch.step,
        chunks=tuple(chunks),
        num_queries=len(queries),
        known=_known(rows, queries, documents, batch.step, teacher_dimension),
        num_rows=len(batch.rows),
        kept=sum(tokens <= keep for tokens in held),
        guides={path: texts(rows) for path, texts in (guides or {}).items()},
    )


def text_keys(texts: Sequence[str]) -> torch.Tensor:
    """One 63-bit hash per text, int64, equal on every rank and in every process."""
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)


def _known(
    rows: Sequence[Row], queries: Sequence[str], documents: Sequence[str], step: int, teacher_dimension: int | None
) -> LossInput:
    keys = text_keys(documents)
    ids = [name for row in rows for name in row.ids or [""] * len(row.documents)]
    scores = [score for row in rows for score in row.scores]
    labels = [row.label for row in rows if row.label is not None]
    return LossInput(
        owners=torch.tensor([at for at, row in enumerate(rows) for _ in row.documents], dtype=torch.int64),
        query_keys=text_keys(queries),
        document_keys=keys,
        document_ids=_id_keys(ids, keys) if any(ids) else None,
        scores=torch.tensor(scores, dtype=torch.float32) if len(scores) == len(documents) else None,
        labels=torch.tensor(labels, dtype=torch.int64) if len(labels) == len(rows) else None,
        guides={} if teacher_dimension is None else {FROM_ROWS: _teacher(rows, teacher_dimension)},
        seed=step,
    )


def _id_keys(ids: Sequence[str], keys: torch.Tensor) -> torch.Tensor:
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


class Prefetcher:
    """Batches made ahead by a background thread; tokenisers release the interpreter while they work.

    Args:
        make: step -> this rank's batch of that step.
        start: first step.
        stop: step behind the last.
        ahead: how many batches are made before they are asked for.
    """

    def __init__(self, make: Callable[[int], RankBatch], start: int, stop: int, ahead: int = 2) -> None:
        self._make, self._start, self._stop, self._ahead = make, start, stop, ahead
        self._waited = 0.0

    def take_waited(self) -> float:
        """Seconds that batches were waited for since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Generator[RankBatch, None, None]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            queue: list[Future[RankBatch]] = []
            try:
                for step in range(self._start, self._stop):
                    while len(queue) <= self._ahead and step + len(queue) < self._stop:
                        queue.append(pool.submit(self._make, step + len(queue)))
                    began = time.perf_counter()
                    batch = queue.pop(0).result()
                    self._waited += time.perf_counter() - began
                    yield batch
            finally:
                for made in queue:
                    made.cancel()
