"""How a set of texts is cut into forward passes: duplicates once, similar lengths together, the same on every rank.

Shapes: n texts, U distinct ones, W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.chunks import FurtherCosts
from embedtrain.data.rows import text_key
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Pair, TextRole, Tokens, gather_ranges
from embedtrain.distributed.collectives import exchange_rows, gather_rows
from embedtrain.distributed.world import World

_TEXTS_PER_CALL = 8192  # of the tokenizer
# Tokens that a rank keeps in host memory between planning and encoding, 5 bytes each; while ranks exchange them there
# are three copies. The texts of a larger set are tokenized a second time, chunk by chunk.
MAX_KEPT_TOKENS = 1 << 27
# Chunks are made smaller than `chunk_tokens` until a set has this many: the texts of a chunk then have similar lengths,
# and the chunks can be distributed evenly. Below the minimum number of tokens, a pass would only get slower.
_MIN_CHUNKS = 128
_MIN_CHUNK_TOKENS = 2048

# Every rank has arrays over all texts, so they take no more than they need.
Indices = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class PromptedTexts:
    """Texts and their prompts, or pairs of texts, which contain theirs."""

    texts: Sequence[str] | Sequence[Pair]
    prompt: str = ""  # prepended to each text
    # A prompt that all texts already start with, or one per text; matters if prompt tokens are excluded from pooling.
    existing_prompt: str | Sequence[str] = ""
    role: TextRole = TextRole.document  # matters to models that encode queries in another way

    def with_prompt(self, rows: Sequence[int]) -> list[Any]:
        """The texts or pairs `rows` as the model sees them."""
        selected = (self.texts[row] for row in rows)
        return [text if isinstance(text, Pair) else self.prompt + text for text in selected]

    def prompts(self, rows: Sequence[int]) -> list[str]:
        """The whole prompt that each of the texts `rows` starts with."""
        existing = self.existing_prompt
        return [self.prompt + (existing if isinstance(existing, str) else existing[row]) for row in rows]

    def keys(self, text_keys: NDArray[np.int64], world: World) -> NDArray[np.int64]:
        """int64 [n], equal for texts that have the same vector; `text_keys` are those of the method. A collective."""
        if isinstance(self.existing_prompt, str):
            return text_keys
        texts, prompts = self.texts, self.existing_prompt
        return _gather_keys(len(texts), lambda row: f"{len(prompts[row])} {texts[row]}", world)

    def text_keys(self, world: World) -> NDArray[np.int64]:
        """int64 [n], equal for equal texts or pairs. A collective: each rank reads a part of the texts."""
        texts = self.texts

        def written(row: int) -> str:
            text = texts[row]
            return repr(text) if isinstance(text, Pair) else text  # those of different pairs differ

        return _gather_keys(len(texts), written, world)


def _gather_keys(count: int, text_of: Callable[[int], str], world: World) -> NDArray[np.int64]:
    edges = [count * rank // world.size for rank in range(world.size + 1)]
    local: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    with world.fail_together("looking for equal texts"):
        rows = range(edges[world.rank], edges[world.rank + 1])
        local = np.fromiter((text_key(text_of(row)) for row in rows), dtype=np.int64, count=len(rows))
    keys: NDArray[np.int64] = (
        gather_rows(torch.from_numpy(local).to(world.device), np.diff(edges).tolist()).cpu().numpy()
    )
    return keys


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """The tokens of some of the distinct texts, in host memory."""

    ids: NDArray[np.int32]  # tokens of the texts that are in it
    flags: NDArray[np.uint8]  # of these
    offsets: NDArray[np.int32]  # [U], where each text begins in `ids`; undefined for texts that are not in it
    lengths: NDArray[np.int32]  # [U], tokens of all texts; a picture counts `SLOT`

    def take(self, distinct: NDArray[np.int64]) -> Tokens:
        """The tokens of texts."""
        parts = [Tokens.of([])]
        for start in range(0, len(distinct), _TEXTS_PER_CALL):  # bounds the memory of indices, 24 bytes per token
            part = distinct[start : start + _TEXTS_PER_CALL]
            starts, lengths = self.offsets[part].astype(np.int64), self.lengths[part].astype(np.int64)
            ids, flags = (gather_ranges(of, starts, lengths) for of in (self.ids, self.flags))
            parts.append(Tokens(ids, flags, lengths))
        return Tokens.concatenated(parts)


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """The chunks of a set of texts; they depend on the texts and their lengths alone."""

    first: Indices  # [U], the first occurrence of each distinct text
    occurrences: Indices  # [n], the indices of all texts, grouped by distinct text
    starts: Indices  # [U + 1], where the group of each distinct text begins in `occurrences`
    # [U], distinct texts from the longest to the shortest, so that a lack of memory shows in the first chunk or never.
    order: Indices
    cuts: list[int]  # where each chunk begins in `order`, and the end of the last
    chunk_tokens: int  # maximum number of tokens of a chunk, including padding (a longer text has its own chunk)
    tokenized: TokenizedTexts | None  # every W-th text, from text `rank` on; None, on every rank, for a large set
    towers: Sequence[int]  # of each chunk; of an empty set, the tower that would encode its texts
    have_further: Sequence[bool]  # whether texts of each chunk have further costs, such as pictures

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def chunk(self, number: int) -> NDArray[np.int64]:
        """The distinct texts of a chunk."""
        return self.order[self.cuts[number] : self.cuts[number + 1]].astype(np.int64)

    @property
    def kinds(self) -> list[tuple[int, bool]]:
        """What decides which modules compute a chunk: its tower, and whether its texts have further costs."""
        return list(zip(self.towers, self.have_further, strict=True))

    def dealt(self, chunks: Sequence[int], size: int) -> list[int]:
        """Chunks in the order in which `size` ranks take them in turn, so that they compute the same modules at a time.

        -1 stands for no chunk, where ranks have none left of a kind.
        """
        out: list[int] = []
        for kind in dict.fromkeys(self.kinds):
            out += [number for number in chunks if self.kinds[number] == kind]
            out += [-1] * (-len(out) % size)
        return out

    def expand(self, distinct: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.int64]]:
        """All occurrences of distinct texts, int64 [m] on the CPU, and the position in `distinct` of each, [m]."""
        starts = self.starts[distinct].astype(np.int64)
        counts = self.starts[distinct + 1] - starts
        begins = np.repeat(starts - (counts.cumsum() - counts), counts)
        rows = self.occurrences[begins + np.arange(counts.sum())].astype(np.int64)
        return torch.from_numpy(rows), np.repeat(np.arange(len(distinct)), counts)

    def exchange_tokens(self, chunks: Sequence[int], world: World) -> TokenizedTexts | None:
        """The tokens of this rank's chunks; None if they were not kept. A collective.

        Rank i % W encodes the i-th of `chunks`, in which -1 stands for no chunk.
        """
        if self.tokenized is None or world.size == 1:
            return self.tokenized
        lengths, order = self.tokenized.lengths, self.order
        encoder_rank = np.full(len(order), -1, dtype=np.int32)  # by text; -1: its vector is known already
        for index, number in enumerate(chunks):
            if number >= 0:
                encoder_rank[self.chunk(number)] = index % world.size

        def texts(tokenizer_rank: int, to_rank: int) -> NDArray[np.int64]:
            numbers: NDArray[np.int64] = np.arange(tokenizer_rank, len(order), world.size)
            selected: NDArray[np.int64] = numbers[encoder_rank[numbers] == to_rank]
            return selected

        sent = [texts(world.rank, rank) for rank in range(world.size)]
        received = [texts(rank, world.rank) for rank in range(world.size)]
        counts = [[int(lengths[numbers].sum()) for numbers in of] for of in (sent, received)]
        tokens = self.tokenized.take(np.concatenate(sent))
        ids, flags = (exchange_rows(torch.from_numpy(of), *counts).numpy() for of in (tokens.ids, tokens.flags))
        local = np.concatenate(received)
        offsets = np.zeros(len(order), dtype=np.int32)
        offsets[local] = np.cumsum(lengths[local]) - lengths[local]
        return TokenizedTexts(ids, flags, offsets, lengths)


def plan_encoding(
    texts: PromptedTexts,
    tokenizer: TextTokenizer,
    max_length: int | None,
    chunk_tokens: int,
    world: World,
    text_keys: NDArray[np.int64] | None = None,
) -> EncodingPlan:
    """Cut texts into chunks. A collective: each rank tokenizes its part of the texts.

    `text_keys` are those of the texts, if they are known.
    """
    keys = texts.keys(texts.text_keys(world) if text_keys is None else text_keys, world)
    first, occurrences, starts = _group_equal(keys)
    del keys, text_keys
    costs, tokenized = _tokenize(texts, first, tokenizer, max_length, world)
    lengths = costs.of_chunk
    order: Indices = np.argsort(-lengths, kind="stable").astype(first.dtype)
    reach: NDArray[np.int64] | None = None
    if tokenizer.layout.further_limits:
        further = FurtherCosts(costs.further.astype(np.int64), tokenizer.layout.further_limits)
        order = further.first(order)
    if costs.towers is not None:
        order = order[np.argsort(costs.towers[order], kind="stable")]
        reach = np.searchsorted(costs.towers[order], costs.towers[order], side="right")
    if tokenizer.layout.further_limits:
        limited = further.reach(order[:, None])
        reach = limited if reach is None else np.minimum(reach, limited)
    limit = min(chunk_tokens, max(_MIN_CHUNK_TOKENS, int(lengths.sum()) // _MIN_CHUNKS))
    sizes = np.maximum(1, lengths[order])
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    cuts = [0]
    while cuts[-1] < len(order):
        start = cuts[-1]
        if tokenizer.packed:
            stop = int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1
        else:
            stop = start + limit // int(sizes[start])
        cuts.append(min(len(order) if reach is None else int(reach[start]), max(start + 1, stop)))
    if costs.towers is None:
        towers = [_tower_of_role(tokenizer, texts.role)] * max(1, len(cuts) - 1)
    else:
        towers = costs.towers[order[cuts[:-1]]].tolist() or [0]
    have_further = [False] * len(towers)
    if tokenizer.layout.further_limits and len(order):
        have_further = further.has_any[order[cuts[:-1]]].tolist()  # those that have any share no chunk with others
    return EncodingPlan(first, occurrences, starts, order, cuts, limit, tokenized, towers, have_further)


def _tower_of_role(tokenizer: TextTokenizer, role: TextRole) -> int:
    """The tower that encodes texts of a role."""
    towers = tokenizer.layout.towers(np.array([role is TextRole.query]), lambda _: Tokens.of([]))
    return 0 if towers is None else int(towers[0])


@dataclass(frozen=True, slots=True)
class _Costs:
    """What U texts cost: `Layout.chunk_costs`, int32 [U], and `Layout.further_costs`, int32 [U, K].

    `cached` are the tokens that are kept of each, int32 [U]; `towers`, int32 [U], encode each text, where the role of
    the texts does not decide it.
    """

    of_chunk: NDArray[np.int32]
    cached: NDArray[np.int32]
    towers: NDArray[np.int32] | None
    further: NDArray[np.int32]


def _group_equal(keys: NDArray[np.int64]) -> tuple[Indices, Indices, Indices]:
    """`first`, `occurrences` and `starts` of an `EncodingPlan`."""
    dtype: Any = np.int32 if len(keys) < 2**31 else np.int64
    by_key = np.argsort(keys, kind="stable")
    in_order = keys[by_key]
    is_new = np.ones(len(keys), dtype=np.bool_)
    is_new[1:] = in_order[1:] != in_order[:-1]
    del in_order
    if is_new.all():
        numbers = np.arange(len(keys) + 1, dtype=dtype)
        return numbers[:-1], numbers[:-1], numbers
    begins = np.flatnonzero(is_new)
    counts = np.diff(begins, append=len(keys))
    # A group has its texts in order; groups are numbered in the order of their first texts.
    by_first = np.argsort(by_key[begins])
    begins, counts = begins[by_first], counts[by_first]
    starts = np.concatenate([[0], counts.cumsum()])
    indices = np.repeat(begins - starts[:-1], counts)
    indices += np.arange(len(keys))
    return by_key[begins].astype(dtype), by_key[indices].astype(dtype), starts.astype(dtype)


def _tokenize(
    texts: PromptedTexts, rows: Indices, tokenizer: TextTokenizer, max_length: int | None, world: World
) -> tuple[_Costs, TokenizedTexts | None]:
    """The costs of the texts `rows`, and the tokens of every W-th of them, which this rank tokenizes."""
    local_rows, layout = rows[world.rank :: world.size], tokenizer.layout
    # Pictures have other numbers of tokens than are kept, and towers of their own.
    num_columns = 3 if layout.reads_pictures else 1
    local_costs = torch.zeros((len(local_rows), num_columns + len(layout.further_limits)), dtype=torch.int32)
    ids, flags = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.uint8)]
    num_tokens = 0
    with world.fail_together("tokenizing"):
        for start in range(0, len(local_rows), _TEXTS_PER_CALL):
            batch = local_rows[start : start + _TEXTS_PER_CALL].tolist()
            tokens = tokenizer.tokens(texts.with_prompt(batch), max_length, texts.prompts(batch), texts.role)
            of_batch = slice(start, start + len(batch))
            local_costs[of_batch, 0] = torch.from_numpy(layout.chunk_costs(tokens))
            if layout.reads_pictures:
                towers = layout.towers(np.full(len(batch), texts.role is TextRole.query), tokens.take)
                local_costs[of_batch, 1] = torch.from_numpy(tokens.lengths)
                local_costs[of_batch, 2] = 0 if towers is None else torch.from_numpy(towers)
            if layout.further_limits:
                local_costs[of_batch, num_columns:] = torch.from_numpy(layout.further_costs(tokens))
            if num_tokens <= MAX_KEPT_TOKENS:
                ids.append(tokens.ids)
                flags.append(tokens.flags)
                num_tokens += len(tokens.ids)
    rows_per_rank = [len(range(rank, len(rows), world.size)) for rank in range(world.size)]
    gathered = gather_rows(local_costs.to(world.device), rows_per_rank).cpu().numpy()
    costs = np.empty((len(rows), local_costs.shape[1]), dtype=np.int32)
    for rank, rank_costs in enumerate(np.split(gathered, np.cumsum(rows_per_rank)[:-1])):
        costs[rank :: world.size] = rank_costs
    has_towers = layout.reads_pictures and layout.num_towers > 1
    cached = costs[:, 1 if layout.reads_pictures else 0]
    found = _Costs(costs[:, 0], cached, costs[:, 2] if has_towers else None, costs[:, num_columns:])
    if max(int(cached[rank :: world.size].sum()) for rank in range(world.size)) > MAX_KEPT_TOKENS:
        return found, None
    offsets = np.zeros(len(rows), dtype=np.int32)
    local_lengths = local_costs[:, 1 if layout.reads_pictures else 0]
    offsets[world.rank :: world.size] = (local_lengths.cumsum(0) - local_lengths).numpy()
    all_ids = np.concatenate(ids)
    ids.clear()  # before the flags are copied as well
    return found, TokenizedTexts(all_ids, np.concatenate(flags), offsets, cached)
