"""Exact top-k search over documents that are sharded over the ranks.

Shapes: Q queries, T of them at a time, N documents, n on this rank, D dimensions, K results kept, W ranks.

Scores are found in two stages. Matrix products in fp32 pick candidates; their rounding depends on the
shape of the tile and thus on the number of ranks. Each candidate's score is then computed anew on its own,
in float64 and in a fixed order of additions, and rounded to float32: a function of the two vectors alone.
The first stage's error is bounded, so where a document beyond the candidates could still belong to the
top K, all that could are looked at.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorDtype, VectorPlacement
from embedtrain.distributed.collectives import exchange_rows, gather_rows
from embedtrain.distributed.world import World
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import (
    NO_DOCUMENT,
    norms,
    pack_keys,
    pair_batch_size,
    pairwise_dot,
    top_keys,
    unpack_keys,
)

# Vectors of a tile: what is on the device at a time where vectors are kept on the host.
TILE = 16384
# Of the free memory of a GPU, the share that vectors may take before they are kept on the host.
_MAX_DEVICE_FRACTION = 0.5
_DTYPES = {VectorDtype.fp32: torch.float32, VectorDtype.bf16: torch.bfloat16}


class VectorTiles:
    """Vectors that are added block by block and read tile by tile, in the order in which they came.

    Args:
        config: as what they are kept, and where.
        device: where they are read.
        expected: how many vectors there will be; what `place=auto` decides by.
    """

    def __init__(self, config: IndexConfig, device: torch.device, expected: int) -> None:
        self._config, self._device, self._expected = config, device, expected
        self._dtype = dtype_of(config)
        self._tiles: list[Tensor] = []
        self._pending: list[Tensor] = []
        self._on_host: bool | None = None

    def __len__(self) -> int:
        return sum(len(tile) for tile in (*self._tiles, *self._pending))

    @property
    def dimension(self) -> int:
        """D; 0 before anything was added."""
        held = [*self._tiles, *self._pending]
        return held[0].shape[1] if held else 0

    def add(self, vectors: Tensor) -> Tensor:
        """Keep [m, D]; what they are from now on, on the device."""
        vectors = vectors.to(self._device, self._dtype)
        if self._on_host is None:
            self._on_host = self._keep_on_host(vectors.shape[1])
        self._pending.append(vectors)
        if sum(map(len, self._pending)) >= TILE:
            self._seal()
        return vectors

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """The number of each tile's first vector, and the tile as float32 on the device."""
        self._seal()
        start = 0
        for tile in self._tiles:
            yield start, tile.to(self._device, non_blocking=True).float()
            start += len(tile)

    def pick(self, rows: Tensor, at_a_time: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Vectors by their numbers, [P] on the device, in portions: which of the P they are, and float32 [p, D]."""
        self._seal()
        order = rows.argsort()
        edges = torch.tensor([0, *(len(tile) for tile in self._tiles)]).cumsum(0)
        cuts = torch.searchsorted(rows[order].cpu(), edges).tolist()
        for tile, edge, start, stop in zip(self._tiles, edges.tolist(), cuts, cuts[1:], strict=False):
            for of in torch.split(order[start:stop], at_a_time) if stop > start else ():
                wanted = (rows[of] - edge).to(tile.device)
                yield of, tile[wanted].to(self._device).float()

    def _seal(self) -> None:
        """Cut what was added into whole tiles; what is left over waits for more, or is the last."""
        if not self._pending:
            return
        last = [self._tiles.pop().to(self._device)] if self._tiles and len(self._tiles[-1]) < TILE else []
        for tile in torch.split(torch.cat([*last, *self._pending]), TILE):
            kept = tile.to("cpu") if self._on_host else tile.clone()
            self._tiles.append(kept.pin_memory() if self._on_host and self._device.type == "cuda" else kept)
        self._pending = []

    def _keep_on_host(self, dimension: int) -> bool:
        if self._config.place is not VectorPlacement.auto or self._device.type != "cuda":
            return self._config.place is VectorPlacement.host
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._expected * dimension * self._dtype.itemsize > _MAX_DEVICE_FRACTION * free


def dtype_of(config: IndexConfig) -> torch.dtype:
    """What vectors are kept as."""
    return _DTYPES[config.dtype]


QUERY_BATCH_SIZE = 512
# Queries that visit a tile before the next tile is fetched: vectors on the host travel once for all of them.
QUERIES_PER_SCAN = 8192
# Candidates kept beyond K, so that rounding hardly ever asks for the second look.
_EXTRA_CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best documents of each query, best first; K' = min(K, N).

    Attributes:
        scores: float32 [Q, K'], on the CPU.
        documents: int64 [Q, K'], numbers of documents, on the CPU.
    """

    scores: Tensor
    documents: Tensor


class ShardedIndex:
    """Documents that lie on the ranks where they were encoded, ready to be searched by inner product.

    Documents of equal scores come in a given order, so that a ranking is one thing, whatever the number of ranks,
    the tiles, or where vectors lie.

    Args:
        priorities: int64 [N], for each document its place among all in the order of ties, the first in a ranking having
            the highest; the same on every rank. `trec_order` makes it of ids.
        world: the ranks.
        config: as what vectors are kept, and where. Scores are those of the vectors as kept.
    """

    def __init__(self, priorities: Tensor, world: World, config: IndexConfig | None = None) -> None:
        self.world = world
        self.num_documents = len(priorities)
        self._priorities = priorities
        self._document_of_priority = torch.empty_like(priorities)
        self._document_of_priority[priorities] = torch.arange(len(priorities))
        self._vectors = VectorTiles(config or IndexConfig(), world.device, -(-len(priorities) // world.size))
        self._rows: list[Tensor] = []
        self._max_norm = 0.0

    def add(self, shard: EncodedShard) -> None:
        """Take in some of this rank's documents: their vectors, and their numbers, each on one rank once."""
        kept = self._vectors.add(shard.vectors)
        self._rows.append(shard.rows)
        if len(kept):
            self._max_norm = max(self._max_norm, norms(kept).max().item())

    def search(self, queries: Tensor, k: int) -> Ranking:
        """The K documents with the largest inner product. A collective: the same queries on every rank.

        Args:
            queries: float32 [Q, D].
            k: how many documents to keep, at least 1; all, where there are fewer.
        """
        k = min(k, self.num_documents)
        visits = [visit for visit in torch.split(queries, QUERIES_PER_SCAN) if len(visit)]
        found = [gather_rows(self._mine(visit, k), self._counts(len(visit))).cpu() for visit in visits]
        return self._ranking(torch.cat([torch.empty((0, k), dtype=torch.int64), *found]))

    def search_mine(self, queries: Tensor, k: int) -> tuple[range, Ranking]:
        """The same for this rank's share of the queries alone: which of the Q they are, and their ranking."""
        assert len(queries) <= QUERIES_PER_SCAN, "more queries than are searched at a time"
        k = min(k, self.num_documents)
        counts = self._counts(len(queries))
        first = sum(counts[: self.world.rank])
        mine = self._mine(queries, k) if len(queries) else torch.empty((0, k), dtype=torch.int64)
        return range(first, first + counts[self.world.rank]), self._ranking(mine.cpu())

    @torch.no_grad()
    def scores_of(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Scores of given documents, float32 [Q, M] on the CPU, as `search` would give them. A collective.

        Args:
            queries: float32 [Q, D], the same on every rank.
            documents: int64 [Q, M] on the CPU, numbers of documents, the same on every rank; -1 where there is none,
                whose score is minus infinity.
        """
        rows, numbers = self._document_numbers().sort()
        at = torch.searchsorted(rows, documents.flatten()).clamp(max=max(0, len(rows) - 1))
        here = (rows[at] == documents.flatten()).nonzero().flatten() if len(rows) else torch.empty(0, dtype=torch.int64)
        scores = torch.full((documents.numel(),), -torch.inf, device=self.world.device)
        if len(here):
            device, width = self.world.device, documents.shape[1]
            own = queries.to(device, torch.float32)
            scores[here.to(device)] = self._scores(own, (here // width).to(device), numbers[at[here]].to(device))
        dist.all_reduce(scores, op=dist.ReduceOp.MAX)
        return scores.view(documents.shape).cpu()

    def _ranking(self, keys: Tensor) -> Ranking:
        scores, priorities = unpack_keys(keys)
        return Ranking(scores, self._document_of_priority[priorities])

    def _counts(self, queries: int) -> list[int]:
        """How many of the queries each rank merges the results of: one run of queries after another."""
        size = self.world.size
        return [queries * (rank + 1) // size - queries * rank // size for rank in range(size)]

    @torch.no_grad()
    def _mine(self, queries: Tensor, k: int) -> Tensor:
        """Keys of the best `k` documents of all ranks for this rank's share of the queries, [t, k]."""
        assert k > 0, "a ranking holds at least one document"
        queries = queries.to(self.world.device, torch.float32)
        with _full_precision(self.world.device):
            here = self._search_shard(queries, k)
        counts = self._counts(len(queries))
        mine = counts[self.world.rank]
        came = exchange_rows(here, counts, [mine] * self.world.size)
        return top_keys(came.view(self.world.size, mine, k).transpose(0, 1).reshape(mine, self.world.size * k), k)

    def _search_shard(self, queries: Tensor, k: int) -> Tensor:
        """Keys of the best `k` documents of this rank, int64 [Q, k], best first; NOTHING where there are fewer."""
        found = torch.full((len(queries), k), NO_DOCUMENT, dtype=torch.int64, device=queries.device)
        num, tiles = len(self._vectors), torch.split(queries, QUERY_BATCH_SIZE)
        if not num:
            return found
        keep = min(k, num)
        for start, (tile, rough, candidates) in zip(
            range(0, len(queries), QUERY_BATCH_SIZE),
            self._candidates(tiles, min(k + _EXTRA_CANDIDATES, num)),
            strict=True,
        ):
            rows = torch.arange(len(tile), device=tile.device).repeat_interleave(candidates.shape[1])
            of_tile = top_keys(self._keys(tile, rows, candidates.flatten()).view(candidates.shape), keep)
            if candidates.shape[1] < num:
                # What was not kept scores at most the last one kept, give or take the error of both roundings.
                last = unpack_keys(of_tile[:, -1])[0].double()
                error = self._rounding_error(tile)
                unsure = (last <= rough.min(dim=1).values.double() + error).nonzero().flatten()
                if unsure.numel():
                    of_tile[unsure] = self._rescan(tile[unsure], keep, (last - error)[unsure])
            found[start : start + len(tile), :keep] = of_tile
        return found

    def _candidates(self, queries: Sequence[Tensor], keep: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each tile of queries [T, D]: itself, the `keep` largest fp32 scores, and their rows, both [T, keep]."""
        scores = [tile.new_empty((len(tile), 0)) for tile in queries]
        rows = [torch.empty((len(tile), 0), dtype=torch.int64, device=tile.device) for tile in queries]
        for start, vectors in self._vectors.tiles():
            for i, tile in enumerate(queries):
                found, numbers = (tile @ vectors.T).topk(min(keep, len(vectors)), dim=1, sorted=False)
                both = torch.cat([scores[i], found], dim=1)
                scores[i], kept = both.topk(min(keep, both.shape[1]), dim=1, sorted=False)
                rows[i] = torch.cat([rows[i], numbers + start], dim=1).gather(1, kept)
        return list(zip(queries, scores, rows, strict=True))

    def _rescan(self, queries: Tensor, k: int, least: Tensor) -> Tensor:
        """Keys of the best `k` among all documents whose fp32 score is `least` [T] or more, [T, k].

        Many documents with the same vector, or a model that gives every text nearly the same one, lead here.
        """
        found = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        for start, vectors in self._vectors.tiles():
            rough = (queries @ vectors.T).double()
            rows, columns = (rough >= least.unsqueeze(1)).nonzero(as_tuple=True)
            keys = torch.full_like(rough, NO_DOCUMENT, dtype=torch.int64)
            keys[rows, columns] = self._keys(queries, rows, columns + start)
            found = top_keys(torch.cat([found, keys], dim=1), k)
        return found

    def _keys(self, queries: Tensor, rows: Tensor, documents: Tensor) -> Tensor:
        """Keys of pairs (row of `queries`, row of this shard), [P]."""
        priorities = self._priorities[self._document_numbers()[documents.cpu()]].to(queries.device)
        return pack_keys(self._scores(queries, rows, documents), priorities)

    def _scores(self, queries: Tensor, rows: Tensor, documents: Tensor) -> Tensor:
        """Scores of pairs (row of `queries`, row of this shard), float32 [P]."""
        scores = torch.empty(len(rows), device=queries.device)
        for of, vectors in self._vectors.pick(documents, pair_batch_size(queries)):
            scores[of] = pairwise_dot(queries[rows[of]], vectors).float()
        return scores

    def _document_numbers(self) -> Tensor:
        """The numbers of this rank's documents, int64 [n] on the CPU."""
        if len(self._rows) != 1:
            self._rows = [torch.cat([torch.empty(0, dtype=torch.int64), *self._rows])]
        return self._rows[0]

    def _rounding_error(self, queries: Tensor) -> Tensor:
        """Bound, [T], on how far an fp32 score and a score rounded to float32 can lie apart.

        Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1: D u |q| |d| for the sum
        in any order, and a little for the rounding of the exact score.
        """
        unit = torch.finfo(torch.float32).eps / 2
        return (self._vectors.dimension + 8) * unit * self._max_norm * norms(queries)


def trec_order(ids: Sequence[str]) -> Tensor:
    """Places among equal scores as trec_eval orders them, by document id downwards: int64 [N].

    trec_eval compares bytes, and so does Arrow.
    """
    order = torch.from_numpy(pc.sort_indices(pa.array(ids, pa.large_string())).to_numpy().astype("int64"))
    priorities = torch.empty(len(ids), dtype=torch.int64)
    priorities[order] = torch.arange(len(ids))
    return priorities


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products in true fp32: neither TF32 nor a caller's autocast, which the bound on the error knows nothing of."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
