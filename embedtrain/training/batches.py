"""From a global batch to what this rank computes: chunks of tokens and what the loss must know.

B, M: queries and documents of this rank.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, Row, Tokens
from embedtrain.losses.types import LossInput

# A share is cut into about this many pieces: more save little padding, and under FSDP each gathers all weights.
_PIECES = 4
_LEAST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class RankBatch:
    """This rank's share of a global batch, tokenised.

    Attributes:
        step: counted from 0.
        chunks: B queries and M documents together, cut by length; `Tokens.rows` counts queries first.
        num_queries: B.
        known: what the loss needs to know of the rows.
        num_rows: rows of the whole global batch.
        fits: whether the graphs of all chunks fit into memory together, as far as `train.chunk_tokens` tells.
    """

    step: int
    chunks: tuple[Tokens, ...]
    num_queries: int
    known: LossInput
    num_rows: int
    fits: bool

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
        known = LossInput(
            self.known.positives.to(device), self.known.query_keys.to(device), self.known.document_keys.to(device)
        )
        chunks = tuple(chunk.to(device) for chunk in self.chunks)
        return RankBatch(self.step, chunks, self.num_queries, known, self.num_rows, self.fits)


def cut(
    batch: GlobalBatch, rank: int, size: int, tokenizer: TextTokenizer, chunk_tokens: int, least: int = _LEAST_TOKENS
) -> RankBatch:
    """Rank `rank`'s part of `batch`: queries and documents share chunks, for one encoder serves both.

    A share that fits into one forward pass is cut as well, into pieces of like length: their graphs are all
    kept, and hardly any padding is computed.

    Args:
        batch: the global batch.
        rank: this rank.
        size: number of ranks.
        tokenizer: bound to the model's length.
        chunk_tokens: tokens, padding included, whose graphs fit into memory.
        least: tokens below which a piece would only be slower.
    """
    rows = batch.share(rank, size)
    queries = [row.query for row in rows]
    documents = [text for row in rows for text in row.documents]
    ids = tokenizer.ids(queries + documents)
    real = sum(len(text) for text in ids)
    chunks = tokenizer.cut(ids, min(chunk_tokens, max(least, -(-real // _PIECES))))
    fits = sum(chunk.ids.numel() for chunk in chunks) <= chunk_tokens
    return RankBatch(
        step=batch.step,
        chunks=tuple(chunks if fits else tokenizer.cut(ids, chunk_tokens)),
        num_queries=len(queries),
        known=LossInput(_positives(rows), text_keys(queries), text_keys(documents)),
        num_rows=len(batch.rows),
        fits=fits,
    )


def text_keys(texts: Sequence[str]) -> torch.Tensor:
    """One 63-bit hash per text, int64, equal on every rank and in every process."""
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)


def _positives(rows: Sequence[Row]) -> torch.Tensor:
    """Where each row's positive stands among the rank's documents: it opens its row's documents."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.documents))
    return torch.tensor(starts[:-1], dtype=torch.int64)


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
        self.waited = 0.0  # seconds the last batch was waited for

    def __iter__(self) -> Iterator[RankBatch]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            queue: list[Future[RankBatch]] = []
            try:
                for step in range(self._start, self._stop):
                    while len(queue) <= self._ahead and step + len(queue) < self._stop:
                        queue.append(pool.submit(self._make, step + len(queue)))
                    began = time.perf_counter()
                    batch = queue.pop(0).result()
                    self.waited = time.perf_counter() - began
                    yield batch
            finally:
                for made in queue:
                    made.cancel()
