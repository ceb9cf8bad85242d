"""Distribution of the texts of a global batch over ranks and chunks, with little padding and equal work.

Texts are sorted by length and split into groups of W texts, one per rank. Every rank cuts its texts at the same
groups, so all ranks have the same number of chunks of nearly the same shapes, as the collectives of a sharded model
require. The loss is not affected: it receives embeddings in the order of the rows.

Items of some models have further costs besides tokens, such as patches of images, each with a maximum of a chunk. Those
that have any come first, so that at most one chunk of a batch holds them on some ranks only.

T: texts of the global batch; W: ranks; G: groups, ceil(T / W); K: further costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

# Candidate cuts. Up to this number of groups the cuts are optimal.
_CANDIDATES = 1024
_UNKNOWN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Which rank encodes which texts in which chunks."""

    texts: NDArray[np.int64]  # [G, W], the text of each group and rank; -1 in the last group for ranks without a text
    bounds: tuple[int, ...]  # the first group of each chunk, and G; only 0 if there are no texts
    towers: tuple[int, ...] = ()  # the tower of each chunk; empty: there is one

    @property
    def num_chunks(self) -> int:
        """Number of chunks of every rank."""
        return len(self.bounds) - 1

    def chunks_of_rank(self, rank: int) -> list[NDArray[np.int64]]:
        """The chunks of one rank: indices of texts, longest first.

        The last chunk of a tower is empty if it consists of the last group and that has no text for this rank.
        """
        column = self.texts[:, rank]
        chunks = [column[start:stop] for start, stop in pairwise(self.bounds)]
        return [chunk[chunk >= 0] for chunk in chunks]

    def has_any(self, has: NDArray[np.bool_]) -> list[bool]:
        """Whether each chunk has, on any rank, a text for which `has`, bool [T], is true."""
        found = (self.texts >= 0) & has[self.texts] if has.size else np.zeros(self.texts.shape, dtype=np.bool_)
        return [bool(found[start:stop].any()) for start, stop in pairwise(self.bounds)]

    def max_tokens_per_chunk(self, lengths: NDArray[np.int64], *, packed: bool) -> list[int]:
        """The largest number of tokens of each chunk on any rank, including padding, given the tokens of each text."""
        sizes = np.where(self.texts >= 0, lengths[self.texts], 0)
        chunks = [sizes[start:stop] for start, stop in pairwise(self.bounds)]
        return [int(chunk.sum(axis=0).max() if packed else chunk.max() * len(chunk)) for chunk in chunks]

    @property
    def encoder_rank(self) -> NDArray[np.int64]:
        """The rank that encodes each text: int64 [T]."""
        is_text = self.texts >= 0
        ranks = np.empty(int(is_text.sum()), dtype=np.int64)
        ranks[self.texts[is_text]] = np.broadcast_to(np.arange(self.texts.shape[1]), self.texts.shape)[is_text]
        return ranks


@dataclass(frozen=True, slots=True)
class FurtherCosts:
    """What texts cost besides tokens.

    Attributes:
        costs: int64 [T, K], of each text.
        limits: [K], the maximum of a chunk.
    """

    costs: NDArray[np.int64]
    limits: tuple[int, ...]

    def take(self, texts: NDArray[np.int64]) -> "FurtherCosts":
        """Those of some texts."""
        return FurtherCosts(self.costs[texts], self.limits)

    @property
    def has_any(self) -> NDArray[np.bool_]:
        """Whether a text has a further cost: bool [T]."""
        has_any: NDArray[np.bool_] = np.count_nonzero(self.costs, axis=1) > 0
        return has_any

    def first(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same texts, those with further costs first."""
        has_any = self.has_any[order]
        return np.concatenate([order[has_any], order[~has_any]])

    def reach(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last group at which a chunk from each group may end, int64 [G]; texts [G, W] have the order of `first`.

        A group counts as its largest text. A chunk ends where texts without further costs begin.
        """
        num_groups = len(texts)
        reach = np.full(num_groups, num_groups)
        for costs, limit in zip(self.costs.T, self.limits, strict=True):
            ends = np.concatenate([[0], np.cumsum(_largest(costs, texts))])
            reach = np.minimum(reach, np.searchsorted(ends, ends[:-1] + limit, side="right") - 1)
        groups = np.arange(num_groups)
        lacks_any = ((texts >= 0) & ~self.has_any[texts]).any(axis=1)
        border = int(np.append(np.flatnonzero(lacks_any), num_groups)[0])
        return np.maximum(groups + 1, np.where(groups < border, np.minimum(reach, border), reach))


def plan_towers(
    costs: NDArray[np.int64],
    towers: NDArray[np.int64] | None,
    size: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
    further: FurtherCosts | None = None,
) -> ChunkPlan:
    """`plan_chunks` of texts that several towers encode: each chunk has texts of one tower, the same on every rank.

    So a pass computes one tower, and how often each is computed depends on no rank. `towers` is int64 [T], the tower of
    each text; None: there is one. The tower with the longest text comes first.
    """
    if towers is None:
        return plan_chunks(costs, size, chunk_tokens, pass_overhead_tokens, packed=packed, further=further)
    texts = {int(tower): np.flatnonzero(towers == tower) for tower in np.unique(towers)}
    order = sorted(texts, key=lambda tower: (-int(costs[texts[tower]].max()), tower))
    plans = [
        plan_chunks(
            costs[of_tower],
            size,
            chunk_tokens,
            pass_overhead_tokens,
            packed=packed,
            further=None if further is None else further.take(of_tower),
        )
        for of_tower in (texts[tower] for tower in order)
    ]
    groups = [np.where(plan.texts < 0, -1, texts[t][plan.texts]) for t, plan in zip(order, plans, strict=True)]
    firsts = accumulate((len(group) for group in groups), initial=0)
    bounds = [first + bound for first, plan in zip(firsts, plans, strict=False) for bound in plan.bounds[:-1]]
    return ChunkPlan(
        np.concatenate([np.empty((0, size), dtype=np.int64), *groups]),
        (*bounds, sum(map(len, groups))),
        tuple(tower for tower, plan in zip(order, plans, strict=True) for _ in range(plan.num_chunks)),
    )


def plan_chunks(
    lengths: NDArray[np.int64] | Sequence[int],
    size: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
    further: FurtherCosts | None = None,
) -> ChunkPlan:
    """Distribute texts over ranks and cut the texts of each rank into chunks.

    The cuts minimise sum(rows x longest) + chunks x `pass_overhead_tokens` of a rank, with at most `chunk_tokens`
    tokens per chunk including padding; a longer text gets a chunk of its own. With very many groups the cuts are
    optimal among about a thousand candidates. In each chunk the longest text goes to the rank with the fewest tokens so
    far, which balances the ranks. Packed texts are cut into the smallest number of chunks, of about equal size.

    A pure function of its arguments, so every rank gets the same result without communication.

    Args:
        lengths: tokens of each text, [T].
        size: W.
        packed: whether a chunk has no padding; else it has rows x longest tokens.
        further: of each text besides its tokens; a text above a maximum gets a chunk of its own too.
    """
    text_lengths = np.asarray(lengths, dtype=np.int64)
    num_groups = -(-len(text_lengths) // size)
    order = np.full(num_groups * size, -1, dtype=np.int64)
    order[: len(text_lengths)] = _longest_first(text_lengths)
    if further is not None:
        order[: len(text_lengths)] = further.first(order[: len(text_lengths)])
    texts = order.reshape(num_groups, size)
    reach = np.full(num_groups, num_groups) if further is None else further.reach(texts)
    # Descending, but for the first group of texts without further costs, at which a chunk begins.
    longest = np.maximum(1, text_lengths[texts[:, 0]] if further is None else _largest(text_lengths, texts))
    if packed:
        bounds = _cut_evenly(longest, chunk_tokens, reach)
    else:
        reach = np.minimum(reach, np.arange(num_groups) + np.maximum(1, chunk_tokens // longest))
        bounds = _cut_cheaply(longest, reach, pass_overhead_tokens)
    return ChunkPlan(_assign_to_ranks(texts, text_lengths, bounds, packed=packed), tuple(bounds))


def _largest(costs: NDArray[np.int64], texts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest cost of each group: int64 [G]."""
    largest: NDArray[np.int64] = np.where(texts >= 0, costs[texts], 0).max(axis=1, initial=0)
    return largest


def _longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of texts by descending length; a stable sort."""
    max_length = int(lengths.max(initial=0))
    missing = max_length - lengths
    # NumPy sorts 16-bit integers by radix, which is ten times faster.
    return np.argsort(missing.astype(np.uint16) if max_length < 2**16 else missing, kind="stable").astype(np.int64)


def _cut_cheaply(longest: NDArray[np.int64], reach: NDArray[np.int64], pass_overhead_tokens: int) -> list[int]:
    """Bounds of chunks, given the longest text of each group and the last group at which a chunk from there may end."""
    if not len(longest):
        return [0]
    return _cheapest(_candidates(longest, reach), longest, reach, pass_overhead_tokens)


def _cut_evenly(longest: NDArray[np.int64], chunk_tokens: int, reach: NDArray[np.int64]) -> list[int]:
    """Bounds of few chunks of about equal size, at most `chunk_tokens` unless a single group is larger.

    A group counts as its longest text, which some rank encodes. `reach` is the last group at which a chunk from each
    group may end for other reasons.
    """
    ends = np.concatenate([[0], np.cumsum(longest)])
    bounds = [0]
    while bounds[-1] < len(longest):
        begin = ends[bounds[-1]]
        remaining = int(ends[-1] - begin)
        target = -(-remaining // max(1, -(-remaining // chunk_tokens)))
        # Up to the group that exceeds an equal part, if that still fits.
        stop = int(np.searchsorted(ends, begin + target))
        if ends[min(stop, len(longest))] - begin > chunk_tokens:
            stop -= 1
        bounds.append(min(len(longest), int(reach[bounds[-1]]), max(stop, bounds[-1] + 1)))
    return bounds


def _candidates(longest: NDArray[np.int64], reach: NDArray[np.int64]) -> NDArray[np.int64]:
    """Candidate cuts, ascending: every group if there are few, else a selection.

    A cut within a run of equal lengths is never better than one at its beginning, unless chunks are full. The cuts of
    full chunks are included, so that a solution exists.
    """
    num_groups = len(longest)
    if num_groups <= _CANDIDATES:
        return np.arange(num_groups + 1)
    ends = reach.tolist()
    full = [0]
    while full[-1] < num_groups:
        full.append(min(ends[full[-1]], num_groups))
    runs = np.flatnonzero(longest[1:] < longest[:-1]) + 1
    if len(runs) > _CANDIDATES:
        runs = runs[np.arange(_CANDIDATES) * len(runs) // _CANDIDATES]
    spread = np.arange(_CANDIDATES // 2) * num_groups // (_CANDIDATES // 2)
    return np.unique(np.concatenate([full, runs, spread]))


def _cheapest(
    candidates: NDArray[np.int64], longest: NDArray[np.int64], reach: NDArray[np.int64], pass_overhead_tokens: int
) -> list[int]:
    """The cuts of lowest cost among `candidates`, by dynamic programming."""
    last = len(candidates) - 1
    starts = candidates[:-1]
    stops = np.searchsorted(candidates, reach[starts], side="right")
    cost = np.full(last + 1, _UNKNOWN, dtype=np.int64)
    cost[0] = 0
    previous = np.zeros(last + 1, dtype=np.int64)
    steps = zip(starts.tolist(), longest[starts].tolist(), stops.tolist(), strict=True)
    for index, (start, length, stop) in enumerate(steps):
        new_cost = (candidates[index + 1 : stop] - start) * length + (int(cost[index]) + pass_overhead_tokens)
        is_better = new_cost < cost[index + 1 : stop]
        np.copyto(cost[index + 1 : stop], new_cost, where=is_better)
        previous[index + 1 : stop][is_better] = index
    path = [last]
    while path[-1]:
        path.append(int(previous[path[-1]]))
    return [int(candidates[index]) for index in reversed(path)]


def _assign_to_ranks(
    texts: NDArray[np.int64], lengths: NDArray[np.int64], bounds: Sequence[int], *, packed: bool
) -> NDArray[np.int64]:
    """The same groups with texts assigned to ranks: int64 [G, W].

    With padding a rank computes rows x its longest text, so only the first group of each chunk counts. The direction
    alternates between groups, which balances the real tokens.
    """
    out = np.empty_like(texts)
    load = np.zeros(texts.shape[1], dtype=np.int64)
    for start, stop in pairwise(bounds):
        ranks = np.argsort(load, kind="stable")
        out[start:stop:2, ranks] = texts[start:stop:2]
        out[start + 1 : stop : 2, ranks] = texts[start + 1 : stop : 2, ::-1]
        counted = out[start:stop] if packed else out[start : start + 1]
        tokens = np.where(counted >= 0, lengths[counted], 0).sum(axis=0)
        load += tokens if packed else (stop - start) * tokens
    return out
