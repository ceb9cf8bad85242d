"""Exact top-k search over documents that are sharded over the ranks.

Shapes: Q queries, T of them in a batch, N documents, n on this rank, t of a tile, C candidates, K results, P pairs, W
ranks.

Scores are computed in two stages. Matrix products in fp32, perhaps of a smaller copy of the vectors, select candidates;
their rounding depends on the shape of the tile and thus on the number of ranks. The score of each candidate is then
recomputed in float64, in a fixed order of additions, and rounded to float32: a function of the two texts alone. How two
texts are compared, and how documents are kept for it, is that of a `Score`. The error of the first stage is
bounded: a document is a candidate if its approximate score, with all errors in its favour, reaches the K-th best exact
score, with all errors against it. If a query has more candidates than fit, its documents are read a second time.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.distributed.collectives import exchange_rows, gather_rows
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.exact import NO_DOCUMENT, full_precision, pack_keys, top_keys, unpack_keys
from embedtrain.inference.store import DocumentStore, GrowingTensor, dtype_of
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.inference.vectors import Cosine
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import Score
from embedtrain.utils.formatting import format_count

# Queries that are compared with a tile before the next tile is copied to the device.
QUERIES_PER_SCAN = 8192
QUERY_BATCH_SIZE = 512
# Of the queries of a batch, unless a single one has more.
MAX_QUERY_ROWS = 16384
# Neighbouring documents of a tile that are dismissed together if the best of them is no candidate.
_BLOCK = 64
# Candidates per query that are collected before the list is sorted, and its threshold raised.
PENDING_CANDIDATES = 128


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best documents of each query, best first, on the CPU; K' = min(K, N)."""

    scores: Tensor  # float32 [Q, K']; int32 if the scores are integers
    documents: Tensor  # int64 [Q, K'], document numbers


class ShardedIndex:
    """Documents on the ranks that encoded them, searched by `score`.

    Ties have a fixed order, so that a ranking depends neither on the number of ranks nor on the tiles or the placement
    of vectors.

    `priorities` are a permutation, int64 [N], the same on every rank: of documents with equal scores, the one with the
    highest priority ranks first; see `trec_order` and `first_added_order`. Scores are those of the vectors in the data
    type of `config`; by default, of inner products.
    """

    def __init__(
        self,
        priorities: "Tensor | FirstAddedOrder",
        world: World,
        config: IndexConfig | None = None,
        score: Score | None = None,
    ) -> None:
        self.world = world
        self.score = score or Cosine()
        self.config = config or IndexConfig()
        require_poolable(self.score, self.config)
        self.num_documents = len(priorities)
        # Every rank has the priorities of all documents.
        self.priorities = self._document_of_priority = priorities
        if isinstance(priorities, Tensor):
            self.priorities = _compact(priorities)
            documents = torch.arange(len(priorities), dtype=self.priorities.dtype)
            self._document_of_priority = documents.scatter(0, priorities, documents)
        # Pooled vectors of the same documents, whose best are searched by all of their vectors.
        self._first_stage: ShardedIndex | None = None
        if self.config.first_stage is not None:
            pooled = replace(self.config, first_stage=None, token_pooling=self.config.first_stage_pooling)
            self._first_stage = ShardedIndex(priorities, world, pooled, self.score)
        self._documents = self.score.store(self.config, world.device, -(-len(priorities) // world.size))
        self._rows = GrowingTensor(-(-len(priorities) // world.size), torch.int64, torch.device("cpu"))
        self._local_priorities: Tensor | None = None  # set by the first search
        self._sorted_numbers: tuple[Tensor, Tensor] | None = None  # documents, and their numbers on this rank

    def add(self, shard: EncodedShard) -> None:
        """Add documents of this rank; `shard.rows` are their numbers. Each document is added on one rank, once."""
        if self._first_stage is not None:
            self._first_stage.add(EncodedShard(self._first_stage.stored_part(shard.part), shard.rows))
        self._documents.add(shard.part)
        self._rows.append(shard.rows)
        self._local_priorities = self._sorted_numbers = None

    def truncated(self, dimension: int) -> "ShardedIndex":
        """An index of the first dimensions of the same vectors, normalised again."""
        return self.converted(self.score, lambda vectors: self.score.search_rows(vectors, dimension))

    def converted(self, score: Score, transform: Callable[[Tensor], Tensor]) -> "ShardedIndex":
        """An index of the same documents with transformed vectors, which it compares by `score`.

        The transformed vectors are not on the disk.
        """
        config = self.config
        if config.place is VectorPlacement.disk:
            config = replace(config, place=VectorPlacement.auto)
        index = ShardedIndex(self.priorities, self.world, config, score)
        for shard in self.shards():
            index.add(EncodedShard(shard.part.with_values(transform(shard.part.values)), shard.rows))
        return index

    def of_rows(self, priorities: Tensor, score: Score, sizes: NDArray[np.int64]) -> "ShardedIndex":
        """An index whose documents are the vectors of these documents, one each, which `score` compares.

        `sizes`, int64 [N], are the vectors that each document has. They are not on the disk. A collective.

        Raises DataError on every rank if a document has fewer: it was cut.
        """
        index = ShardedIndex(priorities, self.world, replace(self.config, place=VectorPlacement.auto), score)
        firsts, cut = torch.from_numpy(np.cumsum(sizes) - sizes), 0
        for shard in self.shards():
            assert shard.part.sizes is not None
            of_texts = torch.from_numpy(shard.part.sizes)
            cut += int((shard.part.sizes < sizes[shard.rows.numpy()]).sum())
            before = (firsts[shard.rows] - of_texts.cumsum(0) + of_texts).repeat_interleave(of_texts)
            index.add(EncodedShard(Part(shard.part.values), before + torch.arange(len(before))))
        if cut := sum(self.world.gather(cut)):
            raise DataError(
                f"{format_count(cut, 'document')} of {len(sizes):,} are longer than the model reads, and lack the "
                "vectors of their last chunks: raise max_length, or split them"
            )
        return index

    def shards(self) -> Iterator[EncodedShard]:
        """This rank's documents, a block at a time, as float32 on the device."""
        rows = self._document_numbers()
        for numbers, part in self._documents.parts():
            yield EncodedShard(part, rows[numbers])

    def viewed(self, name: str) -> "ShardedIndex":
        """An index of the same documents that are compared by one of the views of the score."""
        index = copy.copy(self)
        index.score = self.score.views[name]
        index._documents = self._documents.viewed(index.score)
        return index

    def add_texts(
        self,
        encoder: SentenceEncoder,
        texts: Sequence[str],
        prompt: str = "",
        *,
        max_length: int | None = None,
        vector_cache: VectorCache | None = None,
        label: str = "encoding documents",
        existing_prompt: str = "",
    ) -> None:
        """Encode all N documents and add them as the score compares them: as unit vectors. A collective.

        Arguments and errors are those of `SentenceEncoder.encode_blocks`.
        """
        for block in encoder.encode_blocks(
            texts,
            prompt,
            max_length=max_length,
            vector_cache=vector_cache,
            mapped=self.config.place is VectorPlacement.disk,
            transform=self.stored_part,
            label=label,
            existing_prompt=existing_prompt,
        ):
            self.add(block)

    def stored_part(self, part: Part) -> Part:
        """What this index keeps of the vectors of documents."""
        return self.score.document_part(part, self.config.token_pooling).to(part.values.device, dtype_of(self.config))

    def search(self, queries: Part | Tensor, k: int) -> Ranking:
        """The K documents with the largest scores, at least 1; all documents if there are fewer. A collective.

        With a first stage, they are the best of the documents that it finds, `config.first_stage` or K if that is more.
        `queries` are those of Q texts, the same on every rank; a tensor, float32 [Q, D], has one row of each.
        """
        if self._first_stage is None:
            return self.search_all(queries, k)
        k, queries = min(k, self.num_documents), _as_part(queries)
        keys = [torch.empty((0, k), dtype=torch.int64)]
        for start in range(0, len(queries), QUERY_BATCH_SIZE):
            batch = queries.slice(start, min(start + QUERY_BATCH_SIZE, len(queries)))
            documents = self._found_first(batch, k)
            scores = self.scores_of(batch, documents)
            keys.append(top_keys(pack_keys(scores, self.priorities[documents].long()), k))
        return self._ranking(torch.cat(keys))

    def first_stage_recall(self, queries: Part | Tensor, k: int, depth: int) -> Tensor:
        """The fraction of the best K documents of each query that are among those found for a search of `depth` ones.

        Float64 [Q]. All documents are compared by all of their vectors. A collective.
        """
        best = self.search_all(queries, k).documents
        found = self._found_first(_as_part(queries), depth)
        return (best.unsqueeze(2) == found.unsqueeze(1)).any(dim=2).double().mean(dim=1)

    def _found_first(self, queries: Part, k: int) -> Tensor:
        """The documents that are searched for the best `k` of each query: int64 [Q, C]."""
        assert self._first_stage is not None
        assert self.config.first_stage is not None
        return self._first_stage.search_all(queries, max(k, self.config.first_stage)).documents

    def search_all(self, queries: Part | Tensor, k: int) -> Ranking:
        """The K documents with the largest scores among all, as `search` without a first stage. A collective."""
        k, queries = min(k, self.num_documents), _as_part(queries)
        keys = [torch.empty((0, k), dtype=torch.int64)]
        for start in range(0, len(queries), QUERIES_PER_SCAN):
            scan = queries.slice(start, min(start + QUERIES_PER_SCAN, len(queries)))
            keys.append(gather_rows(self._local_results(scan, k), self._query_counts(len(scan))).cpu())
        return self._ranking(torch.cat(keys))

    def _ranking(self, keys: Tensor) -> Ranking:
        scores, priorities = unpack_keys(keys, self._documents.score_dtype)
        return Ranking(scores, self._document_of_priority[priorities].long())

    @torch.no_grad()
    def scores_of(self, queries: Part | Tensor, documents: Tensor) -> Tensor:
        """Scores of `documents`, [Q, M] on the CPU, bit-identical to those of `search`. A collective.

        `queries` are those of `search`; `documents`, int64 [Q, M] numbers on the CPU, are the same on every rank, and
        the score of -1 is minus infinity, or the smallest integer.
        """
        if self._sorted_numbers is None:
            self._sorted_numbers = self._document_numbers().sort()
        rows, numbers = self._sorted_numbers
        at = torch.searchsorted(rows, documents.flatten()).clamp(max=max(0, len(rows) - 1))
        is_local = rows[at] == documents.flatten() if len(rows) else torch.empty(0, dtype=torch.bool)
        local = is_local.nonzero().flatten()
        dtype = self._documents.score_dtype
        lowest = torch.iinfo(dtype).min if self._documents.is_exact else -torch.inf
        scores = torch.full((documents.numel(),), lowest, dtype=dtype, device=self.world.device)
        if len(local):
            device, query_rows = self.world.device, local // documents.shape[1]
            local_scores = self._documents.exact_scores(
                _as_part(queries).to(device, torch.float32), query_rows.to(device), numbers[at[local]].to(device)
            )
            scores[local.to(device)] = local_scores
        dist.all_reduce(scores, op=dist.ReduceOp.MAX)
        return scores.view(documents.shape).cpu()

    @torch.no_grad()
    def count_above(self, queries: Part | Tensor, scores: Tensor) -> Tensor:
        """The number of documents whose score is above that of each query: int64 [Q] on the CPU. A collective.

        `queries` are those of `search`, and `scores` float32 [Q], the same on every rank. Counts are exact, for scores
        are compared as `search` returns them.
        """
        queries = _as_part(queries).to(self.world.device, torch.float32)
        scores = scores.to(self.world.device)
        counts = torch.zeros(len(queries), dtype=torch.int64, device=self.world.device)
        with full_precision(self.world.device):
            batches = list(query_batches(queries))
            for first, tile in self._documents.tiles():
                start = 0
                for batch in batches:
                    limits = scores[start : start + len(batch)].unsqueeze(1)
                    distance = tile.scores(batch).double() - limits.double()
                    numbers = torch.arange(first, first + len(tile), device=limits.device).unsqueeze(0)
                    is_above = distance > self._documents.deficit(batch, numbers)
                    above = is_above.sum(dim=1)
                    is_below = distance < -self._documents.rounding_error(batch).unsqueeze(1)
                    rows, columns = (~is_above & ~is_below).nonzero(as_tuple=True)
                    exact = self._documents.exact_scores(batch, rows, columns + first)
                    above.index_add_(0, rows, (exact > limits.squeeze(1)[rows]).long())
                    counts[start : start + len(batch)] += above
                    start += len(batch)
        dist.all_reduce(counts)
        return counts.cpu()

    def _query_counts(self, num_queries: int) -> list[int]:
        """The number of queries whose results each rank merges: consecutive ranges of queries."""
        size = self.world.size
        return [num_queries * (rank + 1) // size - num_queries * rank // size for rank in range(size)]

    @torch.no_grad()
    def _local_results(self, queries: Part, k: int) -> Tensor:
        """Keys of the best `k` documents of all ranks for the queries whose results this rank merges, [t, k]."""
        assert k > 0, "a ranking holds at least one document"
        queries = queries.to(self.world.device, torch.float32)
        with full_precision(self.world.device):
            shard_keys = ShardSearch(self._documents, self._device_priorities()).search(queries, k)
        counts = self._query_counts(len(queries))
        num_local = counts[self.world.rank]
        received = exchange_rows(shard_keys, counts, [num_local] * self.world.size)
        by_query = received.view(self.world.size, num_local, k).transpose(0, 1)
        return top_keys(by_query.reshape(num_local, self.world.size * k), k)

    def _device_priorities(self) -> Tensor:
        """Priorities of this rank's documents, integers [n] on the device."""
        if self._local_priorities is None:
            self._local_priorities = self.priorities[self._document_numbers()].to(self.world.device)
        return self._local_priorities

    def _document_numbers(self) -> Tensor:
        """The numbers of this rank's documents, int64 [n] on the CPU."""
        return self._rows.rows


def trec_order(ids: Sequence[str]) -> Tensor:
    """Priorities among equal scores as in trec_eval, by descending document id, compared as bytes: int64 [N]."""
    order = torch.from_numpy(pc.sort_indices(pa.array(ids, pa.large_string())).to_numpy().astype("int64"))
    priorities = torch.empty(len(ids), dtype=torch.int64)
    priorities[order] = torch.arange(len(ids))
    return priorities


class FirstAddedOrder:
    """The priorities N - 1, ..., 0, computed when they are looked up; they are their own inverse permutation."""

    def __init__(self, num_documents: int) -> None:
        self._num_documents = num_documents

    def __len__(self) -> int:
        return self._num_documents

    def __getitem__(self, documents: Tensor) -> Tensor:
        return self._num_documents - 1 - documents


def first_added_order(num_documents: int) -> FirstAddedOrder:
    """Priorities that rank the document with the lowest number first."""
    return FirstAddedOrder(num_documents)


def _compact(priorities: Tensor) -> Tensor:
    return priorities.int() if len(priorities) <= torch.iinfo(torch.int32).max else priorities


def require_poolable(score: Score, config: IndexConfig) -> None:
    """Raise ConfigError for `token_pooling` and `first_stage` where a document has one vector."""
    for name in ("token_pooling", "first_stage"):
        value = getattr(config, name)
        if value != getattr(IndexConfig, name) and not score.pools_tokens:
            raise ConfigError(
                f"index.{name}={value:g}: is for late-interaction models, whose documents have several vectors; leave "
                "it out"
            )


def _as_part(queries: Part | Tensor) -> Part:
    return queries if isinstance(queries, Part) else Part(queries)


@dataclass(frozen=True, slots=True)
class ShardSearch:
    """Searches the documents of a rank; `priorities`, integers [n] on the device, order equal scores."""

    documents: DocumentStore
    priorities: Tensor

    def search(self, queries: Part, k: int) -> Tensor:
        """Keys of the best `k` documents of this rank, int64 [T, k], best first; padded with NO_DOCUMENT."""
        num = len(self.documents)
        results = torch.full((len(queries), k), NO_DOCUMENT, dtype=torch.int64, device=self.priorities.device)
        if not num:
            return results
        if self.documents.is_exact:
            return self._search_exact(queries, k, results)
        num_results, start = min(k, num), 0
        for candidates in self._candidates(list(query_batches(queries)), num_results):
            results[start : start + len(candidates.queries), :num_results] = self._best(candidates, num_results)
            start += len(candidates.queries)
        return results

    def _search_exact(self, queries: Part, k: int, results: Tensor) -> Tensor:
        """`search` for scores that are exact at once; ties are many, and all of them are compared."""
        for start, tile in self.documents.tiles():
            first = 0
            for batch in query_batches(queries):
                keys = pack_keys(tile.scores(batch), self.priorities[start : start + len(tile)])
                end = first + len(batch)
                results[first:end] = top_keys(torch.cat([results[first:end], keys], dim=1), k)
                first = end
        return results

    def _candidates(self, queries: Sequence[Part], k: int) -> list["_Candidates"]:
        """The candidates of each batch of queries; the documents are read once for all batches."""
        candidates = [_Candidates(self.documents, batch, k) for batch in queries]
        for start, tile in self.documents.tiles():
            for of_batch in candidates:
                of_batch.add(start, tile.scores(of_batch.queries))
        return candidates

    def _best(self, candidates: "_Candidates", k: int) -> Tensor:
        """Keys of the best `k` documents, [T, k]."""
        scores, documents = candidates.sorted()
        rows, columns = candidates.possible(scores, documents).nonzero(as_tuple=True)
        keys = torch.full_like(documents, NO_DOCUMENT)
        keys[rows, columns] = self._keys(candidates.queries, rows, documents[rows, columns])
        keys = top_keys(keys, k)
        if scores.shape[1] == candidates.limit < len(self.documents):
            # The documents that did not fit score at most as much as the last candidate, give or take the error.
            last = unpack_keys(keys[:, -1])[0].double()
            unsure = (last <= scores[:, -1].double() + candidates.error).nonzero().flatten()
            if unsure.numel():
                rescanned = candidates.queries.take(unsure, unsure.cpu().numpy())
                keys[unsure] = self._rescan(rescanned, k, (last - candidates.error)[unsure])
        return keys

    def _rescan(self, queries: Part, k: int, min_scores: Tensor) -> Tensor:
        """Keys of the best `k` among all documents whose approximate score is at least `min_scores` [T]: [T, k].

        Needed for many documents with the same vector, or a model that gives every text nearly the same one.
        """
        results = torch.empty((len(queries), 0), dtype=torch.int64, device=self.priorities.device)
        for start, tile in self.documents.tiles():
            rows, columns = _at_least(tile.scores(queries), min_scores)
            keys = self._keys(queries, rows, columns + start)
            results = top_keys(torch.cat([results, _by_row(rows, keys, len(queries), NO_DOCUMENT)], dim=1), k)
        return results

    def _keys(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Keys of pairs (row of `queries`, document of this rank), [P]."""
        return pack_keys(self.documents.exact_scores(queries, rows, documents), self.priorities[documents])


class _Candidates:
    """The candidates of a batch of queries: those whose scores are not below a threshold that rises.

    Attributes:
        limit: candidates per query that are kept; a query with more is searched again.
        error: float64 [T], by which an exact score may exceed that of a tile.
    """

    def __init__(self, documents: DocumentStore, queries: Part, k: int) -> None:
        self.queries, self._documents, self._k = queries, documents, k
        self.limit = min(documents.candidate_limit(k), len(documents))
        self.error = documents.rounding_error(queries)
        device = queries.values.device
        self._scores = [torch.empty((len(queries), 0), device=device)]
        self._numbers = [torch.empty((len(queries), 0), dtype=torch.int64, device=device)]
        self._pending = 0
        self._threshold = torch.full((len(queries),), -torch.inf, dtype=torch.float64, device=device)

    def add(self, start: int, scores: Tensor) -> None:
        """The scores of a tile, [T, t]; `start` is the number of its first document."""
        if not self._numbers[0].shape[1]:
            scores, columns = scores.topk(min(self.limit, scores.shape[1]), dim=1, sorted=False)
            self._append(scores, columns + start)
            self._raise_threshold()
            return
        rows, columns = _at_least(scores, self._threshold)
        if len(rows):
            num_rows = len(self.queries)
            self._append(
                _by_row(rows, scores[rows, columns], num_rows, -torch.inf),
                _by_row(rows, columns + start, num_rows, 0),
            )
            if self._pending >= PENDING_CANDIDATES:
                self._raise_threshold()

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Scores, descending, and documents, [T, C]; the scores of padding are minus infinity. C is at most `limit`."""
        scores, numbers = torch.cat(self._scores, dim=1), torch.cat(self._numbers, dim=1)
        scores, order = scores.topk(min(self.limit, scores.shape[1]), dim=1)
        return scores, numbers.gather(1, order)

    def possible(self, scores: Tensor, documents: Tensor) -> Tensor:
        """Which candidates [T, C] may be among the best `k`: bool."""
        return (scores >= self._least(scores, documents).unsqueeze(1)) & (scores > -torch.inf)

    def _append(self, scores: Tensor, numbers: Tensor) -> None:
        self._scores.append(scores)
        self._numbers.append(numbers)
        self._pending += scores.shape[1]

    def _raise_threshold(self) -> None:
        scores, numbers = self.sorted()
        self._threshold = self._least(scores, numbers)
        if scores.shape[1] == self.limit:  # what is below the last one does not fit
            self._threshold = torch.maximum(self._threshold, scores[:, -1].double())
        self._scores, self._numbers, self._pending = [scores], [numbers], 0

    def _least(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """The least score with which a document may be among the best `k`, by these candidates: float64 [T]."""
        if scores.shape[1] < self._k:
            return torch.full_like(self.error, -torch.inf)
        lowest = scores.double() - self._documents.deficit(self.queries, numbers)
        return lowest.topk(self._k, dim=1, sorted=False).values.amin(dim=1) - self.error


def _at_least(scores: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, ascending, and columns of the scores [T, t] that are not below the minimum [T] of their row."""
    # Rounded down: a score in fp32 is at least the minimum if it is at least this.
    bound = torch.nextafter(minimum.float(), minimum.new_tensor(-torch.inf, dtype=torch.float32)).unsqueeze(1)
    if remainder := scores.shape[1] % _BLOCK:
        scores = F.pad(scores, (0, _BLOCK - remainder), value=-torch.inf)
    blocks = scores.unflatten(1, (-1, _BLOCK))
    rows, numbers = (blocks.amax(dim=2) >= bound).nonzero(as_tuple=True)
    in_block = blocks[rows, numbers]
    chosen, within = ((in_block >= bound[rows]) & (in_block > -torch.inf)).nonzero(as_tuple=True)
    return rows[chosen], numbers[chosen] * _BLOCK + within


def _by_row(rows: Tensor, values: Tensor, num_rows: int, padding: float) -> Tensor:
    """Values [P] of ascending rows as [num_rows, m], padded; m is the largest number of values of a row."""
    counts = torch.bincount(rows, minlength=num_rows)
    positions = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    table = values.new_full((num_rows, int(counts.max()) if num_rows else 0), padding)
    table[rows, positions] = values
    return table


def query_batches(queries: Part) -> Iterator[Part]:
    """Consecutive queries that are compared at a time."""
    sizes = np.ones(len(queries), dtype=np.int64) if queries.sizes is None else queries.sizes
    ends = np.concatenate([[0], sizes.cumsum()])
    start = 0
    while start < len(queries):
        fits = int(np.searchsorted(ends, ends[start] + MAX_QUERY_ROWS, side="right")) - 1
        stop = min(len(queries), max(start + 1, min(fits, start + QUERY_BATCH_SIZE)))
        yield queries.slice(start, stop)
        start = stop
