"""The best documents of one rank: approximate scores select candidates, which are scored exactly.

A document is a candidate if its approximate score, with all errors in its favour, reaches the K-th best exact score,
with all errors against it. If a query has more candidates than fit, its documents are read a second time.

Shapes: T queries, t documents of a tile, C candidates, K results, P pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.inference.exact import NO_DOCUMENT, pack_keys, top_keys, unpack_keys
from embedtrain.inference.store import DocumentStore
from embedtrain.losses.encoded import Part

QUERY_BATCH_SIZE = 512
# Of the queries of a batch, unless a single one has more.
MAX_QUERY_ROWS = 16384
# Neighbouring documents of a tile that are dismissed together if the best of them is no candidate.
_BLOCK = 64
# Candidates per query that are collected before the list is sorted, and its threshold raised.
PENDING_CANDIDATES = 128


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
