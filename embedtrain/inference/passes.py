"""How a set of texts is cut into forward passes: equal texts once, like lengths together, the same on every rank.

Shapes: n texts, U distinct ones, W ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.keys import text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World

# Texts tokenised at a time when only their lengths are wanted.
_BLOCK = 8192
# A set is cut into this many chunks where `chunk_tokens` alone would make fewer and larger ones: texts of a chunk are
# then of nearly one length, and there is enough to deal evenly. Below so many tokens a pass would only be slower.
_MIN_CHUNKS = 128
_MIN_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PromptedTexts:
    """Texts, and what of them as the model sees them is a prompt.

    Attributes:
        texts: n of them.
        prompt: put before each.
        existing_prompt: a prompt that the texts start with, or one per text; matters where prompts do not count.
    """

    texts: Sequence[str]
    prompt: str = ""
    existing_prompt: str | Sequence[str] = ""

    def with_prompt(self, rows: Sequence[int]) -> list[str]:
        """Some of them as the model sees them."""
        return [self.prompt + self.texts[row] for row in rows]

    def prompts(self, rows: Sequence[int]) -> list[str]:
        """What each of these begins with that is a prompt."""
        return [
            self.prompt + (self.existing_prompt if isinstance(self.existing_prompt, str) else self.existing_prompt[row])
            for row in rows
        ]

    def keys(self) -> NDArray[np.int64]:
        """int64 [n], equal where two have the same vector."""
        if isinstance(self.existing_prompt, str):
            return text_keys(self.texts).numpy()
        # A text and how much of it is a prompt.
        both = zip(self.texts, self.existing_prompt, strict=True)
        return text_keys([f"{len(existing_prompt)} {text}" for text, existing_prompt in both]).numpy()


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """The chunks of a set of texts; a function of the texts and their lengths, and of nothing else.

    Attributes:
        first: int64 [U], a text of each kind.
        copies: int64 [n], all texts, those of one kind together.
        starts: int64 [U + 1], where each kind's begin in `copies`.
        order: int64 [U], kinds from the longest to the shortest, so that memory runs out in the first chunk or never.
        cuts: where each chunk begins in `order`, and its end.
        limit: tokens, padding included, that a chunk holds at most (a longer text has a chunk of its own).
    """

    first: NDArray[np.int64]
    copies: NDArray[np.int64]
    starts: NDArray[np.int64]
    order: NDArray[np.int64]
    cuts: list[int]
    limit: int

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def chunk(self, number: int) -> NDArray[np.int64]:
        """The kinds of text in a chunk."""
        return self.order[self.cuts[number] : self.cuts[number + 1]]

    def expand(self, kinds: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """All texts of some kinds, int64 [m], and how many there are of each, both on the CPU."""
        counts = self.starts[kinds + 1] - self.starts[kinds]
        begins = np.repeat(self.starts[kinds] - np.concatenate([[0], counts.cumsum()[:-1]]), counts)
        rows = self.copies[begins + np.arange(counts.sum())] if len(kinds) else np.empty(0, dtype=np.int64)
        return torch.from_numpy(rows), torch.from_numpy(counts)


def plan_encoding(
    texts: PromptedTexts, tokenizer: TextTokenizer, max_length: int | None, chunk_tokens: int, world: World
) -> EncodingPlan:
    """Cut texts into chunks. A collective: each rank tokenises its share of them to know their lengths."""
    with world.fail_together("looking for equal texts"):
        keys = texts.keys()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    by_first = np.argsort(index)
    number = np.empty_like(by_first)
    number[by_first] = np.arange(len(by_first))
    kinds = number[inverse] if len(keys) else np.empty(0, dtype=np.int64)
    first = index[by_first]
    lengths = _lengths(texts, first, tokenizer, max_length, world)
    order = np.argsort(-lengths, kind="stable")
    limit = min(chunk_tokens, max(_MIN_CHUNK_TOKENS, int(lengths.sum()) // _MIN_CHUNKS))
    sizes = np.maximum(1, lengths[order])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    cuts = [0]
    while cuts[-1] < len(order):
        at = cuts[-1]
        if tokenizer.packed:
            stop = int(np.searchsorted(ends, ends[at] + limit, side="right")) - 1
        else:
            stop = at + limit // int(sizes[at])
        cuts.append(min(len(order), max(at + 1, stop)))
    starts = np.concatenate([[0], np.bincount(kinds, minlength=len(first)).cumsum()])
    return EncodingPlan(first, np.argsort(kinds, kind="stable"), starts.astype(np.int64), order, cuts, limit)


def _lengths(
    texts: PromptedTexts, rows: NDArray[np.int64], tokenizer: TextTokenizer, max_length: int | None, world: World
) -> NDArray[np.int64]:
    """The number of tokens of the texts `rows`, on every rank; each rank tokenises every W-th only."""
    share = rows[world.rank :: world.size].tolist()
    mine: list[int] = []
    with world.fail_together("tokenising"):
        for start in range(0, len(share), _BLOCK):
            some = texts.with_prompt(share[start : start + _BLOCK])
            mine += [len(ids) for ids in tokenizer.ids(some, max_length)]
    counts = [len(range(rank, len(rows), world.size)) for rank in range(world.size)]
    gathered = gather_rows(torch.tensor(mine, dtype=torch.int64, device=world.device), counts).cpu().numpy()
    lengths = np.empty(len(rows), dtype=np.int64)
    for rank, part in enumerate(np.split(gathered, np.cumsum(counts)[:-1])):
        lengths[rank :: world.size] = part
    return lengths
