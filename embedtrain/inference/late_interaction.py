"""Comparison of texts with a vector per token: MaxSim in two stages, exact, without padding.

    s(q, d) = sum over rows a of q of max over rows b of d of <q_a, d_b>

A tile compares the rows of queries with those of documents in fp32; the documents are in runs of equal lengths, so that
the maximum is that of a view. The exact score needs the inner product of one pair of rows per row of the query: those
that are within the rounding error of the largest are computed again in float64, in a fixed order of additions.

Shapes: T queries with Q rows, t documents of a tile, P pairs, D dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.distributed.device import free_memory
from embedtrain.inference.comparison import Comparison, DocumentStore, Tile, require_kept_in_memory
from embedtrain.inference.exact import full_precision, pair_batch_size, pairwise_dot, sum_of_halves, unit_vectors
from embedtrain.inference.transfer import HostCopy, to_device
from embedtrain.inference.vector_tiles import MAX_DEVICE_FRACTION, dtype_of
from embedtrain.losses.encoded import Part, concatenate, row_indices

# Rows of a tile: as many are on the device at a time if vectors are kept on the host.
TILE_ROWS = 1 << 17
# Inner products, or numbers of gathered rows, in one block: on a CPU what fits its caches.
BLOCK_NUMEL_CPU, BLOCK_NUMEL_GPU = 1 << 19, 1 << 26

Indices = NDArray[np.int64]


class MaxSimComparison(Comparison):
    """MaxSim of unit vectors of tokens; with `mean`, divided by the rows of the query (MeanMaxSim)."""

    is_symmetric = False

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean
        self.name = "meanmaxsim" if mean else "maxsim"

    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """Unit vectors, so that shorter ones are cosines again."""
        return unit_vectors(values[:, :dimension])

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Scores of queries with documents."""
        texts = np.arange(len(first))
        documents = _Rows.of(self.prepared(second))
        return exact_maxsim(self.prepared(first), texts, documents, texts, mean=self.mean).cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "TokenStore":
        """A store of vectors of tokens."""
        require_kept_in_memory(config, "late-interaction model")
        return TokenStore(config, device, mean=self.mean)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of documents, in any order of documents."""

    values: Tensor  # [R, D]
    starts: Indices  # [t], the first row of each document
    sizes: Indices  # [t], its rows

    @classmethod
    def of(cls, part: Part) -> "_Rows":
        sizes = _sizes(part)
        return cls(part.values, np.cumsum(sizes) - sizes, sizes)


class _TokenTile(Tile):
    """Documents in the order of their lengths, which shows only in `rows`."""

    def __init__(self, rows: _Rows, order: Indices, *, mean: bool) -> None:
        self.rows, self.order, self.mean = rows, order, mean
        lengths, counts = np.unique(rows.sizes, return_counts=True)
        self._runs: Sequence[tuple[int, int]] = list(zip(counts.tolist(), lengths.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.rows.sizes)

    @classmethod
    def sorted(cls, part: Part, *, mean: bool) -> "_TokenTile":
        sizes = _sizes(part)
        order = np.argsort(sizes, kind="stable")
        values = part.values[to_device(row_indices(torch.from_numpy(order), sizes), part.values.device)]
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        return cls(_Rows(values, starts, sizes), order, mean=mean)

    def to(self, values: Tensor) -> "_TokenTile":
        """The same documents, whose rows are elsewhere or of another type."""
        return _TokenTile(_Rows(values, self.rows.starts, self.rows.sizes), self.order, mean=self.mean)

    def scores(self, queries: Part) -> Tensor:
        values, device = queries.values, queries.values.device
        best = values.new_empty(len(self), len(values))  # of sorted documents
        document = row = 0
        for number, length in self._runs:
            height = max(1, _block_numel(device) // max(1, len(values) * length))
            for start in range(0, number, height):
                count = min(height, number - start)
                products = self.rows.values[row : row + count * length] @ values.T
                torch.amax(products.view(count, length, -1), dim=1, out=best[document : document + count])
                document, row = document + count, row + count * length
        sums = _sums_of_queries(best, queries, mean=self.mean)
        order = to_device(torch.from_numpy(self.order), device)
        return torch.empty_like(sums).index_copy_(1, order, sums)


class TokenStore(DocumentStore):
    """Documents with a vector per token."""

    def __init__(self, config: IndexConfig, device: torch.device, *, mean: bool) -> None:
        self._config, self._device, self._mean = config, device, mean
        self._dtype = dtype_of(config)
        self._tiles: list[_TokenTile] = []  # of the data type and in the memory in which they are kept
        self._pending: list[Part] = []
        self._pending_rows = 0
        self._num_documents = self._dimension = 0
        self._device_bytes = 0.0  # that tiles may still take
        self._last_copy: HostCopy | None = None  # of a tile to the host; earlier ones are complete if this one is
        self._max_norm = torch.zeros((), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return self._num_documents

    def add(self, documents: Part) -> None:
        """Add the vectors of documents."""
        values = documents.values.to(self._device, self._dtype)
        if not self._dimension:
            self._dimension = values.shape[1]
            self._device_bytes = self._budget()
        if not len(documents):
            return
        self._pending.append(documents.with_values(values))
        self._pending_rows += len(values)
        self._num_documents += len(documents)
        self._max_norm = torch.maximum(self._max_norm, _norms(values).max())
        if self._pending_rows >= TILE_ROWS:
            self._seal()

    def tiles(self) -> Iterator[tuple[int, Tile]]:
        """All documents, in tiles of about `TILE_ROWS` vectors."""
        yield from self._tiles_on_device()

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """Their vectors, tile by tile, in the order of lengths."""
        for start, tile in self._tiles_on_device():
            yield torch.from_numpy(start + tile.order), Part(tile.rows.values, tile.rows.sizes[tile.order])

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """See `exact_maxsim`."""
        self._seal()
        if self._last_copy is not None:
            self._last_copy.wait()
        scores = torch.empty(len(rows), device=self._device)
        query_of, document_of = rows.cpu().numpy(), documents.cpu().numpy()
        order = np.argsort(document_of, kind="stable")
        edges = np.cumsum([0, *map(len, self._tiles)])
        cuts = np.searchsorted(document_of[order], edges)
        for tile, edge, start, stop in zip(self._tiles, edges.tolist(), cuts, cuts[1:], strict=False):
            if stop > start:
                pairs = order[start:stop]
                tile_scores = exact_maxsim(
                    queries, query_of[pairs], tile.rows, document_of[pairs] - edge, mean=self._mean
                )
                scores[to_device(torch.from_numpy(pairs), self._device)] = tile_scores
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """That of the inner products of rows, summed over the rows of the query, and that of the sum.

        For the inner products see `VectorStore`; a sum of n terms adds n u times the sum of their magnitudes.
        """
        unit = torch.finfo(torch.float32).eps / 2
        sizes = to_device(torch.from_numpy(_sizes(queries)), self._device).double()
        norms = _sums_of_queries(_norms(queries.values).unsqueeze(0), queries, mean=self._mean)[:, 0]
        return (self._dimension + 8 + sizes) * unit * self._max_norm * norms

    def _tiles_on_device(self) -> Iterator[tuple[int, _TokenTile]]:
        self._seal()
        start = 0
        for tile in self._tiles:
            yield start, tile.to(tile.rows.values.to(self._device, non_blocking=True).float())
            start += len(tile)

    def _seal(self) -> None:
        """Make a tile of the pending documents."""
        if not self._pending:
            return
        tile = _TokenTile.sorted(concatenate(self._pending), mean=self._mean)
        self._pending, self._pending_rows = [], 0
        self._device_bytes -= tile.rows.values.nbytes
        if self._device.type == "cuda" and self._device_bytes < 0:
            # Encoding continues during the copy; a scan reads it in the order of the device's operations.
            self._last_copy = HostCopy(tile.rows.values)
            tile = tile.to(self._last_copy.tensor)
        self._tiles.append(tile)

    def _budget(self) -> float:
        """Bytes of the device that tiles may take; the rest is kept on the host."""
        if self._device.type != "cuda" or self._config.place is VectorPlacement.host:
            return 0.0
        if self._config.place is VectorPlacement.device:
            return float("inf")
        return MAX_DEVICE_FRACTION * free_memory(self._device)


@torch.no_grad()
def exact_maxsim(queries: Part, query_of: Indices, documents: _Rows, document_of: Indices, *, mean: bool) -> Tensor:
    """MaxSim of pairs (query, document), [P] each: float32 [P] on the device of the queries, from float64.

    A function of the two texts alone: neither the other pairs nor the device nor the threads of a library change it.
    """
    device, dimension = queries.values.device, queries.values.shape[1]
    query_rows = _Rows.of(queries)
    scores = torch.empty(len(query_of), device=device)
    order = np.lexsort((query_rows.sizes[query_of], documents.sizes[document_of]))  # similar lengths together
    for pairs in _pair_blocks(query_rows.sizes[query_of], documents.sizes[document_of], order, dimension, device):
        # Zeros up to a power of two: sums of halves of rows and of zeros do not depend on the longest query of a block.
        longest = int(query_rows.sizes[query_of[pairs]].max())
        query_indices, is_row = _padded(query_rows, query_of[pairs], 1 << (longest - 1).bit_length())
        # A repeated row changes no maximum.
        document_indices, _ = _padded(documents, document_of[pairs], int(documents.sizes[document_of[pairs]].max()))
        left = queries.values[to_device(torch.from_numpy(query_indices), device)]
        right = _gather(documents.values, document_indices, device)
        with full_precision(device):
            sums = sum_of_halves(_exact_maxima(left, right, to_device(torch.from_numpy(is_row), device)))
        if mean:
            sums = sums / to_device(torch.from_numpy(query_rows.sizes[query_of[pairs]]), device)
        scores[to_device(torch.from_numpy(pairs), device)] = sums.float()
    return scores


def _exact_maxima(queries: Tensor, documents: Tensor, is_row: Tensor) -> Tensor:
    """The largest inner product of each row of a query, float64 [P, L]; 0 where `is_row`, bool [P, L], is false.

    `queries`, [P, L, D], and `documents`, [P, M, D], repeat a row of the text where it is shorter.
    """
    unit = torch.finfo(torch.float32).eps / 2
    products = torch.bmm(queries, documents.transpose(1, 2))
    bound = (queries.shape[2] + 8) * unit * queries.norm(dim=2) * documents.norm(dim=2).amax(dim=1, keepdim=True)
    # Both the largest product and the one that is really the largest may be off by the bound.
    is_close = products >= (products.amax(dim=2) - 2 * bound).unsqueeze(2)
    pair, row, column = (is_close & is_row.unsqueeze(2)).nonzero(as_tuple=True)
    exact = torch.cat(
        [
            pairwise_dot(queries[p, r], documents[p, c])
            for p, r, c in zip(
                *(torch.split(index, pair_batch_size(queries[0])) for index in (pair, row, column)), strict=True
            )
        ]
    )
    maxima = torch.where(is_row, -torch.inf, torch.zeros((), dtype=torch.float64, device=is_row.device))
    flat: Tensor = maxima.flatten().scatter_reduce(0, pair * is_row.shape[1] + row, exact, "amax")
    return flat.view(is_row.shape)


def _pair_blocks(
    query_sizes: Indices, document_sizes: Indices, order: Indices, width: int, device: torch.device
) -> Iterator[Indices]:
    """The pairs in `order`, cut where the padded products or rows of a block get too many."""
    limit, start, longest = _block_numel(device), 0, (0, 0)
    for index, pair in enumerate(order.tolist()):
        grown = max(longest[0], int(query_sizes[pair])), max(longest[1], int(document_sizes[pair]))
        if index > start and (index + 1 - start) * max(grown[0] * grown[1], max(grown) * width) > limit:
            yield order[start:index]
            start, grown = index, (int(query_sizes[pair]), int(document_sizes[pair]))
        longest = grown
    if len(order):
        yield order[start:]


def _padded(rows: _Rows, texts: Indices, width: int) -> tuple[Indices, NDArray[np.bool_]]:
    """The rows of texts, [P, width], with the first row again where a text is shorter, and where it is not."""
    starts, offsets = rows.starts[texts][:, None], np.arange(width)
    is_row = offsets < rows.sizes[texts][:, None]
    return np.where(is_row, starts + offsets, starts), is_row


def _gather(values: Tensor, indices: Indices, device: torch.device) -> Tensor:
    """Rows that may be kept on the host and in another type: float32 [P, M, D] on the device."""
    return values[to_device(torch.from_numpy(indices), values.device)].to(device).float()


def _sums_of_queries(values: Tensor, queries: Part, *, mean: bool) -> Tensor:
    """The sums over the rows of each query, or their means: [n, Q] to [T, n]."""
    sizes = _sizes(queries)
    if len(sizes) and (sizes == sizes[0]).all():  # expanded queries
        sums = values.view(len(values), len(sizes), -1).sum(dim=2).T.contiguous()
    else:
        texts = queries.per_row(torch.arange(len(sizes), device=values.device))
        sums = values.new_zeros(len(sizes), len(values)).index_add_(0, texts, values.T)
    return sums / to_device(torch.from_numpy(sizes), values.device).unsqueeze(1) if mean else sums


def _norms(values: Tensor) -> Tensor:
    """Upper bounds of the lengths of rows, float64 [R]."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32)
    return norms.double() * (1 + 1e-3)


def _sizes(part: Part) -> Indices:
    assert part.sizes is not None, "a text has a vector per token"
    return part.sizes


def _block_numel(device: torch.device) -> int:
    return BLOCK_NUMEL_CPU if device.type == "cpu" else BLOCK_NUMEL_GPU
