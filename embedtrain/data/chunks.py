"""The texts of a global batch dealt to ranks and cut into chunks: hardly any padding, and no rank waits for another.

All texts are sorted by length and taken in groups of as many texts as there are ranks, one for each. Every rank cuts
its texts at the same groups, so all have the same number of chunks of nearly the same shapes, which is what the
collectives of a sharded model ask for. The loss does not know of it: it sees vectors in the rows' order.

T: texts of the global batch; W: ranks; G: groups, ceil(T / W).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Places at which it may be cut. Up to so many groups the cut is the best there is.
_CANDIDATES = 1024
_UNKNOWN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Which rank encodes which texts, in which chunks.

    Attributes:
        texts: int64 [G, W], the text that each rank has of each group; -1 in the last group for ranks without one.
        bounds: where chunks begin and the last one ends, in groups: 0, ..., G; just 0 where there are no texts.
    """

    texts: NDArray[np.int64]
    bounds: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        """Chunks of each rank."""
        return len(self.bounds) - 1

    def chunks_of_rank(self, rank: int) -> list[NDArray[np.int64]]:
        """The chunks of one rank, as many as any other's: text numbers, the longest texts first.

        The last chunk has no texts where it is the last group alone and that has none for this rank.
        """
        column = self.texts[:, rank]
        chunks = [column[start:stop] for start, stop in pairwise(self.bounds)]
        return [chunk[chunk >= 0] for chunk in chunks]

    def max_tokens_per_chunk(self, lengths: NDArray[np.int64], *, packed: bool) -> list[int]:
        """What each chunk has on the rank where it has most, padding included, given the tokens of each text."""
        sizes = np.where(self.texts >= 0, lengths[self.texts], 0)
        chunks = [sizes[start:stop] for start, stop in pairwise(self.bounds)]
        return [int(one.sum(axis=0).max() if packed else one.max() * len(one)) for one in chunks]

    @property
    def encoder_rank(self) -> NDArray[np.int64]:
        """The rank that encodes each text: int64 [T]."""
        dealt = self.texts >= 0
        out = np.empty(int(dealt.sum()), dtype=np.int64)
        out[self.texts[dealt]] = np.broadcast_to(np.arange(self.texts.shape[1]), self.texts.shape)[dealt]
        return out


def plan_chunks(
    lengths: NDArray[np.int64] | Sequence[int],
    size: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
) -> ChunkPlan:
    """Deal texts to ranks and cut each rank's into chunks.

    The cuts make sum(rows x longest) + chunks x `pass_overhead_tokens` of a rank as small as can be, with at most
    `chunk_tokens` tokens, padding included, in a chunk; a text longer than that gets a chunk of its own. With very
    many groups the cuts are the best among some thousand places. In each chunk the longest text goes to the rank
    with the fewest tokens so far, so that all compute alike. Packed texts are cut into as few chunks as can be, of
    about equal size: nothing is gained by more.

    A function of its arguments alone, so every rank finds the same without a word to the others.

    Args:
        lengths: tokens of each text, [T].
        size: W.
        chunk_tokens: tokens of one forward pass, padding included.
        pass_overhead_tokens: what one more forward pass costs, in tokens that could be computed meanwhile.
        packed: whether a chunk takes as many tokens as its texts have; else rows x longest.
    """
    found = np.asarray(lengths, dtype=np.int64)
    num_groups = -(-len(found) // size)
    order = np.full(num_groups * size, -1, dtype=np.int64)
    order[: len(found)] = _longest_first(found)
    texts = order.reshape(num_groups, size)
    longest = np.maximum(1, found[texts[:, 0]])
    if packed:
        bounds = _even(longest, chunk_tokens)
    else:
        reach = np.arange(num_groups) + np.maximum(1, chunk_tokens // longest)
        bounds = _cut(longest, reach, pass_overhead_tokens)
    return ChunkPlan(_balanced(texts, found, bounds, packed=packed), tuple(bounds))


def _longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of texts by descending length, equal ones in their order."""
    most = int(lengths.max(initial=0))
    short = most - lengths
    # NumPy sorts 16-bit integers by radix: ten times faster.
    return np.argsort(short.astype(np.uint16) if most < 2**16 else short, kind="stable").astype(np.int64)


def _cut(longest: NDArray[np.int64], reach: NDArray[np.int64], pass_overhead_tokens: int) -> list[int]:
    """Where to cut groups, given the longest text of each and the last group at which a chunk from there may end."""
    if not len(longest):
        return [0]
    return _cheapest(_candidates(longest, reach), longest, reach, pass_overhead_tokens)


def _even(longest: NDArray[np.int64], chunk_tokens: int) -> list[int]:
    """Where to cut groups into few chunks of about as many tokens, none above `chunk_tokens` but a group alone.

    A group counts as its longest text: so much may fall to one rank.
    """
    ends = np.concatenate([[0], np.cumsum(longest)])
    bounds = [0]
    while bounds[-1] < len(longest):
        begin = ends[bounds[-1]]
        left = int(ends[-1] - begin)
        share = -(-left // max(1, -(-left // chunk_tokens)))
        # Up to the group that passes an equal share, where that still fits.
        place = int(np.searchsorted(ends, begin + share))
        if ends[min(place, len(longest))] - begin > chunk_tokens:
            place -= 1
        bounds.append(min(len(longest), max(place, bounds[-1] + 1)))
    return bounds


def _candidates(longest: NDArray[np.int64], reach: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places to cut at, ascending: every group if there are few, else those that matter.

    A cut within a run of equal lengths is never better than one at the run's beginning, unless chunks are full.
    Full chunks, each begun where the one before ends, are among the places: so there is a way through.
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
    places: NDArray[np.int64], longest: NDArray[np.int64], reach: NDArray[np.int64], pass_overhead_tokens: int
) -> list[int]:
    """The cheapest way from the first place to the last, by dynamic programming."""
    last = len(places) - 1
    starts = places[:-1]
    stops = np.searchsorted(places, reach[starts], side="right")
    cost = np.full(last + 1, _UNKNOWN, dtype=np.int64)
    cost[0] = 0
    came = np.zeros(last + 1, dtype=np.int64)
    steps = zip(starts.tolist(), longest[starts].tolist(), stops.tolist(), strict=True)
    for at, (start, length, stop) in enumerate(steps):
        through = (places[at + 1 : stop] - start) * length + (int(cost[at]) + pass_overhead_tokens)
        better = through < cost[at + 1 : stop]
        np.copyto(cost[at + 1 : stop], through, where=better)
        came[at + 1 : stop][better] = at
    path = [last]
    while path[-1]:
        path.append(int(came[path[-1]]))
    return [int(places[at]) for at in reversed(path)]


def _balanced(
    texts: NDArray[np.int64], lengths: NDArray[np.int64], bounds: Sequence[int], *, packed: bool
) -> NDArray[np.int64]:
    """The same groups with each one's texts in the ranks' columns: int64 [G, W].

    Padded, a rank computes rows x its longest text, so in each chunk the longest of the first group counts. The
    groups go back and forth, which keeps the real tokens even.
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
