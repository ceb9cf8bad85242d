"""How a set of texts is cut into forward passes: duplicates once, similar lengths together, the same on every rank.

Shapes: n texts, U distinct ones, W ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.text_format import text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World

# Texts per call of the tokenizer when only their lengths are needed.
_TEXTS_PER_CALL = 8192
# Chunks are made smaller than `chunk_tokens` until a set has this many: the texts of a chunk then have similar lengths,
# and the chunks can be distributed evenly. Below the minimum number of tokens, a pass would only get slower.
_MIN_CHUNKS = 128
_MIN_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PromptedTexts:
    """Texts and their prompts."""

    texts: Sequence[str]
    prompt: str = ""  # prepended to each
    # A prompt that all texts already start with, or one per text; matters if prompt tokens are excluded from pooling.
    existing_prompt: str | Sequence[str] = ""

    def with_prompt(self, rows: Sequence[int]) -> list[str]:
        """The texts `rows` as the model sees them."""
        return [self.prompt + self.texts[row] for row in rows]

    def prompts(self, rows: Sequence[int]) -> list[str]:
        """The whole prompt that each of the texts `rows` starts with."""
        existing = self.existing_prompt
        return [self.prompt + (existing if isinstance(existing, str) else existing[row]) for row in rows]

    def keys(self) -> NDArray[np.int64]:
        """int64 [n], equal for texts that have the same vector."""
        if isinstance(self.existing_prompt, str):
            return text_keys(self.texts).numpy()
        pairs = zip(self.texts, self.existing_prompt, strict=True)
        return text_keys([f"{len(prompt)} {text}" for text, prompt in pairs]).numpy()


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """The chunks of a set of texts; they depend on the texts and their lengths alone."""

    first: NDArray[np.int64]  # [U], the first occurrence of each distinct text
    occurrences: NDArray[np.int64]  # [n], the indices of all texts, grouped by distinct text
    starts: NDArray[np.int64]  # [U + 1], where the group of each distinct text begins in `occurrences`
    # [U], distinct texts from the longest to the shortest, so that a lack of memory shows in the first chunk or never.
    order: NDArray[np.int64]
    cuts: list[int]  # where each chunk begins in `order`, and the end of the last
    chunk_tokens: int  # maximum number of tokens of a chunk, including padding (a longer text has its own chunk)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def chunk(self, number: int) -> NDArray[np.int64]:
        """The distinct texts of a chunk."""
        return self.order[self.cuts[number] : self.cuts[number + 1]]

    def expand(self, distinct: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """All occurrences of distinct texts, int64 [m], and their number per distinct text; both on the CPU."""
        counts = self.starts[distinct + 1] - self.starts[distinct]
        begins = np.repeat(self.starts[distinct] - np.concatenate([[0], counts.cumsum()[:-1]]), counts)
        rows = self.occurrences[begins + np.arange(counts.sum())] if len(distinct) else np.empty(0, dtype=np.int64)
        return torch.from_numpy(rows), torch.from_numpy(counts)


def plan_encoding(
    texts: PromptedTexts, tokenizer: TextTokenizer, max_length: int | None, chunk_tokens: int, world: World
) -> EncodingPlan:
    """Cut texts into chunks. A collective: each rank tokenizes its part of the texts to get their lengths."""
    with world.fail_together("looking for equal texts"):
        keys = texts.keys()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    by_first = np.argsort(index)
    number = np.empty_like(by_first)
    number[by_first] = np.arange(len(by_first))
    distinct = number[inverse] if len(keys) else np.empty(0, dtype=np.int64)
    first = index[by_first]
    lengths = _token_counts(texts, first, tokenizer, max_length, world)
    order = np.argsort(-lengths, kind="stable")
    limit = min(chunk_tokens, max(_MIN_CHUNK_TOKENS, int(lengths.sum()) // _MIN_CHUNKS))
    sizes = np.maximum(1, lengths[order])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    cuts = [0]
    while cuts[-1] < len(order):
        start = cuts[-1]
        if tokenizer.packed:
            stop = int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1
        else:
            stop = start + limit // int(sizes[start])
        cuts.append(min(len(order), max(start + 1, stop)))
    starts = np.concatenate([[0], np.bincount(distinct, minlength=len(first)).cumsum()])
    return EncodingPlan(first, np.argsort(distinct, kind="stable"), starts.astype(np.int64), order, cuts, limit)


def _token_counts(
    texts: PromptedTexts, rows: NDArray[np.int64], tokenizer: TextTokenizer, max_length: int | None, world: World
) -> NDArray[np.int64]:
    """The number of tokens of the texts `rows`, on every rank; each rank tokenizes every W-th of them."""
    local_rows = rows[world.rank :: world.size].tolist()
    local_counts: list[int] = []
    with world.fail_together("tokenizing"):
        for start in range(0, len(local_rows), _TEXTS_PER_CALL):
            batch = texts.with_prompt(local_rows[start : start + _TEXTS_PER_CALL])
            local_counts += [len(ids) for ids in tokenizer.ids(batch, max_length)]
    rows_per_rank = [len(range(rank, len(rows), world.size)) for rank in range(world.size)]
    counts = torch.tensor(local_counts, dtype=torch.int64, device=world.device)
    gathered = gather_rows(counts, rows_per_rank).cpu().numpy()
    lengths = np.empty(len(rows), dtype=np.int64)
    for rank, rank_counts in enumerate(np.split(gathered, np.cumsum(rows_per_rank)[:-1])):
        lengths[rank :: world.size] = rank_counts
    return lengths
