"""MaxSim: each token of the query against the closest token of the document (Khattab and Zaharia, 2020, "ColBERT").

    s(q, d) = sum over rows a of q of max over rows b of d of <q_a, d_b>

Documents are compared in blocks of equal lengths, so the maximum needs no padding, and a padded token can never win it.
Of the inner products of two texts only one per row of the query has a gradient: a tile of training keeps which one it
is. A search compares in fp32 first; the exact score needs the inner product of one pair of rows per row of the query:
those that are within the rounding error of the largest are computed again in float64, in a fixed order of additions.

A search may first read a smaller copy of the rows. With the rows d_b' of the copy, the sum over a of the max over b of
<q_a, d_b'> + |q_a| |d_b - d_b'| is not below the score, and above it by at most twice the sum of |q_a| times the
largest |d_b - d_b'| of the document; see `inference/vectors.py`.

c, t: queries and documents of a tile; Q, R: rows of these queries and documents; D: dimensions; P: pairs; n, T:
documents of a rank and queries in a search.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.config.losses import TOKEN_TEMPERATURE_BOUNDS
from embedtrain.distributed.device import free_memory
from embedtrain.inference.exact import full_precision, pair_batch_size, pairwise_dot, sum_of_halves, unit_vectors
from embedtrain.inference.store import (
    BLOCK_NUMEL_CPU,
    BLOCK_NUMEL_GPU,
    MAX_DEVICE_FRACTION,
    TILE_ROWS,
    DocumentStore,
    DocumentTile,
    GrowingTensor,
    HostCopy,
    dtype_of,
    require_kept_in_memory,
)
from embedtrain.inference.vectors import RoundedVectors, scanned_candidates, with_length
from embedtrain.losses.encoded import Encoded, Part, concatenate, to_device
from embedtrain.losses.score import BLOCK_CELLS_CPU, BLOCK_CELLS_GPU, Columns, ScoreTile, TiledScore
from embedtrain.losses.similarity import at_least_float32, rounding_tolerance

Indices = NDArray[np.int64]


class MaxSim(TiledScore):
    """The score of late interaction.

    Args:
        mean: divide by the rows of the query (MeanMaxSim), so that scores of queries of any length are alike.
    """

    temperature_bounds = TOKEN_TEMPERATURE_BOUNDS
    kind = "late_interaction"
    pools_tokens = True

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean
        self.name = "meanmaxsim" if mean else "maxsim"
        self.default_temperature = 0.05 if mean else 1.0

    def prepare(self, encoded: Encoded) -> Part:
        """The rows as they are; the encoder has normalised them."""
        (part,) = encoded.parts
        return Part(at_least_float32(part.values), part.sizes)

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """MaxSim of each document and its query, [M]."""
        best = _best_rows(queries, documents, counts)
        values = (queries.values[best.query_rows] * documents.values[best.document_rows]).sum(dim=1)
        scores: Tensor = values.new_zeros(len(documents)).index_add(0, best.pairs, values)
        divisors = self._divisors(queries)[owners] if self.mean else scores.new_ones(())
        result: Tensor = scores / divisors
        return result

    def columns(self, candidates: Part) -> Columns:
        """The documents, sorted by length."""
        return sorted_by_length(candidates)

    def tile(self, anchors: Part, columns: Columns) -> ScoreTile:
        """Queries against documents."""
        assert isinstance(columns, SortedDocuments)
        return MaxSimTile(anchors, columns, self._divisors(anchors) if self.mean else None)

    def rounding(self, queries: Part, documents: Part) -> Tensor:
        """That of the rows' inner products, summed over the rows of the query."""
        norms = queries.values.norm(dim=1)
        sums = sum_by_text(norms.unsqueeze(1), queries).squeeze(1)
        longest = documents.values.norm(dim=1).amax() if len(documents.values) else norms.new_ones(())
        scale = self._divisors(queries) if self.mean else 1.0
        bound: Tensor = rounding_tolerance(queries.values) * sums * longest / scale
        return bound

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """Unit vectors, so that shorter ones are cosines again."""
        return unit_vectors(values[:, :dimension])

    def document_part(self, part: Part, token_pooling: float = 1.0) -> Part:
        """Unit vectors: all of them, or means of clusters of them."""
        return super().document_part(part if token_pooling == 1 else pooled_tokens(part, token_pooling))

    def exact(self, first: Part, second: Part) -> Tensor:
        """Scores of queries with documents."""
        texts = np.arange(len(first))
        documents = _Rows.of(self.search_part(second))
        return exact_maxsim(self.search_part(first), texts, documents, texts, mean=self.mean).cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "TokenVectorStore":
        """A store of vectors of tokens."""
        require_kept_in_memory(config, "late-interaction model")
        return TokenVectorStore(config, device, expected, mean=self.mean)

    @staticmethod
    def _divisors(queries: Part) -> Tensor:
        assert queries.sizes is not None
        return to_device(queries.sizes, queries.values.device).to(queries.values.dtype)


def pooled_tokens(part: Part, factor: float) -> Part:
    """The vectors of texts, of which each keeps about one in `factor`: the first, and means of clusters of the others.

    Clusters are those of Ward's linkage on cosine distances, on the CPU, by sentence-transformers, so a text has the
    same ones on any number of ranks.
    """
    from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

    assert part.sizes is not None
    pooling = HierarchicalTokenPooling(pool_factor=factor)
    values = unit_vectors(part.values).cpu()
    if not torch.isfinite(values).all():
        return part  # which the encoder reports
    pooled = [pooling.pool_one(text) for text in torch.split(values, part.sizes.tolist())]
    sizes = np.array([len(text) for text in pooled], dtype=np.int64)
    return Part(torch.cat([values[:0], *pooled]).to(part.values.device), sizes)


@dataclass(frozen=True, slots=True)
class SortedDocuments:
    """t documents in the order of their lengths."""

    values: Tensor  # [R, D], of sorted documents
    order: Tensor  # int64 [t], the document of each sorted one
    runs: tuple[tuple[int, int], ...]  # (number of documents, rows of each), ascending

    def __len__(self) -> int:
        return len(self.order)

    def blocks(self, num_query_rows: int, cells: int) -> Iterator[tuple[int, int, int]]:
        """Blocks of equal lengths: the first document, the number of documents, and the rows of each.

        A block has at most so many `cells`, or one document.
        """
        first = 0
        for number, length in self.runs:
            height = max(1, cells // max(1, num_query_rows * length))
            for start in range(0, number, height):
                yield first + start, min(height, number - start), length
            first += number

    def maxima(self, queries: Tensor, cells: int) -> Tensor:
        """The largest inner product of each sorted document with each row of queries [Q, D]: [t, Q]."""
        best = queries.new_empty(len(self), len(queries))
        row = 0
        for first, number, length in self.blocks(len(queries), cells):
            products = self.values[row : row + number * length] @ queries.T
            torch.amax(products.view(number, length, -1), dim=1, out=best[first : first + number])
            row += number * length
        return best

    def unsorted(self, values: Tensor) -> Tensor:
        """Columns [n, t] of sorted documents, in the order before sorting."""
        return torch.empty_like(values).index_copy_(1, self.order, values)


class MaxSimTile(ScoreTile):
    """MaxSim of queries and documents, divided by `divisors` [c]."""

    def __init__(self, anchors: Part, columns: SortedDocuments, divisors: Tensor | None = None) -> None:
        self.anchors, self.columns, self.divisors = anchors, columns, divisors
        self.best_rows = torch.empty(0)  # int32 [Q, t], the row of each sorted document that is closest

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """See `ScoreTile`; differentiable once."""
        if out is not None:
            return torch.mul(self._sums(), scale, out=out)
        sums: Tensor = _Differentiable.apply(self.anchors.values, self.columns.values, self)  # type: ignore[no-untyped-call]
        return sums * scale

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `ScoreTile`."""
        cells = self._cell_grads(tile_grads, weights)
        if cells.numel():  # torch rejects bags without content
            grads += F.embedding_bag(self.best_rows, self.columns.values, mode="sum", per_sample_weights=cells)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `ScoreTile`."""
        cells, queries = self._cell_grads(tile_grads, weights), self.anchors.values
        row = 0
        for first, number, length in self.columns.blocks(len(queries), _block_cells(queries.device)):
            block = cells.new_zeros(len(queries), number * length)
            rows = self.best_rows[:, first : first + number].long() - row
            block.scatter_(1, rows, cells[:, first : first + number])
            grads[row : row + number * length].addmm_(block.T, queries)
            row += number * length

    def _sums(self) -> Tensor:
        """[c, t], in the order of the documents before sorting."""
        sums = sum_by_text(self._best(), self.anchors)
        if self.divisors is not None:
            sums /= self.divisors.unsqueeze(1)
        return self.columns.unsorted(sums)

    def _best(self) -> Tensor:
        """The largest inner product of each row of the queries with each sorted document, [Q, t]."""
        queries, columns = self.anchors.values, self.columns
        best = queries.new_empty(len(queries), len(columns))
        self.best_rows = torch.empty(best.shape, dtype=torch.int32, device=best.device)
        row = 0
        for first, number, length in columns.blocks(len(queries), _block_cells(queries.device)):
            products = queries @ columns.values[row : row + number * length].T
            self._visit(products)
            block, position = products.view(len(queries), number, length).max(dim=2)
            starts = torch.arange(row, row + number * length, length, device=best.device)
            best[:, first : first + number] = block
            self.best_rows[:, first : first + number] = position + starts
            row += number * length
        return best

    def _visit(self, products: Tensor) -> None:
        """Called with the inner products of each block of documents, [Q, r]; they must not change."""

    def _cell_grads(self, tile_grads: Tensor, weights: Tensor) -> Tensor:
        """The gradient of each row's maxima, [Q, t], of sorted documents."""
        if self.divisors is not None:
            weights = weights / self.divisors.unsqueeze(1)
        rows = self.anchors.per_row(torch.arange(len(self.anchors), device=tile_grads.device))
        return (tile_grads * weights)[:, self.columns.order][rows]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, tile: MaxSimTile) -> Tensor:
        ctx.tile = tile
        return tile._sums()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # Nothing else holds the sorted rows, which take as much as their gradient in the order before.
        tile, ctx.tile = ctx.tile, None
        queries, documents = torch.zeros_like(tile.anchors.values), torch.zeros_like(tile.columns.values)
        weights = grads[0].new_ones(len(grads[0]), 1)
        tile.add_anchor_grads(queries, grads[0], weights)
        tile.add_candidate_grads(documents, grads[0], weights)
        return queries, documents, None


@dataclass(frozen=True, slots=True)
class _BestRows:
    """For each row of a pair's query, the row of its document that is closest; all int64 [sum of these rows]."""

    pairs: Tensor
    query_rows: Tensor
    document_rows: Tensor


def _best_rows(queries: Part, documents: Part, counts: NDArray[np.int64]) -> _BestRows:
    """Of each document and its query."""
    query_sizes, document_sizes = queries.sizes, documents.sizes
    assert query_sizes is not None
    assert document_sizes is not None
    device = queries.values.device
    query_starts = np.repeat(np.cumsum(query_sizes) - query_sizes, counts)
    document_starts, query_sizes = np.cumsum(document_sizes) - document_sizes, np.repeat(query_sizes, counts)
    pairs = np.repeat(np.arange(len(document_sizes)), query_sizes)
    position = np.arange(len(pairs)) - np.repeat(np.cumsum(query_sizes) - query_sizes, query_sizes)
    best = [torch.empty(0, dtype=torch.int64, device=device)]
    with torch.no_grad():
        limit = _block_cells(device)
        for start, end in _pair_blocks(query_sizes, document_sizes, queries.values.shape[1], limit):
            sizes = query_sizes[start:end], document_sizes[start:end]
            rows, real = _padded_on(query_starts[start:end], sizes[0], device)
            columns, compared = _padded_on(document_starts[start:end], sizes[1], device)
            products = torch.bmm(queries.values[rows], documents.values[columns].transpose(1, 2))
            position_of_best = products.masked_fill_(~compared.unsqueeze(1), -torch.inf).argmax(dim=2)
            # The host knows how many rows are real, so a sort selects them; a mask would wait for the device.
            order = (~real).flatten().to(torch.uint8).argsort(stable=True)[: int(sizes[0].sum())]
            best.append((position_of_best + columns[:, :1]).flatten()[order])
    indices = [to_device(index, device) for index in (pairs, query_starts[pairs] + position)]
    return _BestRows(indices[0], indices[1], torch.cat(best))


def _pair_blocks(query_sizes: Indices, document_sizes: Indices, width: int, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive pairs whose padded products and rows take at most `limit` numbers each."""
    start, longest = 0, (0, 0)
    for index, size in enumerate(zip(query_sizes.tolist(), document_sizes.tolist(), strict=True)):
        grown = max(longest[0], size[0]), max(longest[1], size[1])
        cells = (index + 1 - start) * max(grown[0] * grown[1], max(grown) * width)
        if index > start and cells > limit:
            yield start, index
            start, grown = index, size
        longest = grown
    if len(query_sizes) > start:
        yield start, len(query_sizes)


def _padded(starts: Indices, sizes: Indices, width: int) -> tuple[Indices, NDArray[np.bool_]]:
    """The rows of texts, [P, width], with the first row again where a text is shorter, and where it is not."""
    offsets = np.arange(width)
    real = offsets < sizes[:, None]
    return np.where(real, starts[:, None] + offsets, starts[:, None]), real


def _padded_on(starts: Indices, sizes: Indices, device: torch.device) -> tuple[Tensor, Tensor]:
    """`_padded` to the longest text, on the device."""
    rows, real = _padded(starts, sizes, int(sizes.max(initial=1)))
    return to_device(rows, device), to_device(real, device)


def sorted_by_length(part: Part) -> SortedDocuments:
    """Documents as columns; differentiable."""
    assert part.sizes is not None
    order = np.argsort(part.sizes, kind="stable")
    device = part.values.device
    indices = to_device(order, device)
    lengths, counts = np.unique(part.sizes, return_counts=True)
    runs = tuple(zip(counts.tolist(), lengths.tolist(), strict=True))
    is_sorted = bool((part.sizes[1:] >= part.sizes[:-1]).all())
    return SortedDocuments(part.values if is_sorted else part.take(indices, order).values, indices, runs)


def sum_by_text(values: Tensor, part: Part) -> Tensor:
    """Sums of the rows of each text: [R, n] to [N, n]."""
    texts = part.per_row(torch.arange(len(part), device=values.device))
    return values.new_zeros(len(part), values.shape[1]).index_add_(0, texts, values)


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

    def order(self) -> Indices:
        """The rows document by document: int64 [R]."""
        return np.repeat(self.starts - np.cumsum(self.sizes) + self.sizes, self.sizes) + np.arange(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class _TokenTile(DocumentTile):
    """Documents in the order of their lengths, which shows only in `columns`."""

    columns: SortedDocuments
    rows: _Rows  # the same, in the order in which they were added
    mean: bool
    has_residuals: bool = False  # as the last dimension of rows: they are of a copy

    def __len__(self) -> int:
        return len(self.columns)

    @classmethod
    def of(cls, part: Part, *, mean: bool) -> "_TokenTile":
        columns, sizes = sorted_by_length(part), _sizes(part)
        order, starts = np.argsort(sizes, kind="stable"), np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        return cls(columns, _Rows(columns.values, starts, sizes), mean)

    def to(self, values: Tensor) -> "_TokenTile":
        """The same documents, whose rows are elsewhere or of another type."""
        return replace(self, columns=replace(self.columns, values=values), rows=replace(self.rows, values=values))

    def scores(self, queries: Part) -> Tensor:
        rows = with_length(queries.values) if self.has_residuals else queries.values
        best = self.columns.maxima(rows, _block_numel(rows.device))
        return self.columns.unsorted(_sums_of_queries(best, queries, mean=self.mean))


class _Memory:
    """Tensors that are kept on the device while there is room, then on the host."""

    def __init__(self, place: VectorPlacement, device: torch.device) -> None:
        self._place, self._device = place, device
        self._room: float | None = None  # bytes of the device that may still be taken
        self._last_copy: HostCopy | None = None  # to the host; earlier ones are complete if this one is

    def keep(self, values: Tensor) -> Tensor:
        """The same numbers in the memory where they stay."""
        if self._device.type != "cuda":
            return values
        if self._room is None:
            self._room = self._budget()
        self._room -= values.nbytes
        if self._room >= 0:
            return values
        # Encoding continues during the copy; a scan reads it in the order of the device's operations.
        self._last_copy = HostCopy(values)
        return self._last_copy.tensor

    def wait(self) -> None:
        """Until the host may read what is kept there."""
        if self._last_copy is not None:
            self._last_copy.wait()

    def _budget(self) -> float:
        if self._place is VectorPlacement.auto:
            return MAX_DEVICE_FRACTION * free_memory(self._device)
        return float("inf") if self._place is VectorPlacement.device else 0.0


class TokenVectorStore(DocumentStore):
    """Documents with a vector per token, and with `config.scan_dtype` a smaller copy of these vectors."""

    def __init__(self, config: IndexConfig, device: torch.device, expected: int = 0, *, mean: bool) -> None:
        self._device, self._mean = device, mean
        self._dtype, self._scan_dtype = dtype_of(config), config.scan_dtype
        reads_less = config.scan_dtype is not None or config.first_stage is not None
        is_auto = config.place is VectorPlacement.auto
        # By default only what every search reads is on the device.
        self._memory = _Memory(VectorPlacement.host if reads_less and is_auto else config.place, device)
        self._copy_memory = _Memory(config.place, device)
        self._tiles: list[_TokenTile] = []  # of the data type and in the memory in which they are kept
        self._copies: list[RoundedVectors] = []  # of the rows of each tile, in its order
        # Of each document, on the device: the largest of its rows.
        self._residuals = GrowingTensor(expected, torch.float32, device)
        self._pending: list[Part] = []
        self._pending_rows = 0
        self._num_documents = self._dimension = 0
        self._max_norm = torch.zeros((), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return self._num_documents

    def add(self, documents: Part) -> None:
        """Add the vectors of documents."""
        values = documents.values.to(self._device, self._dtype)
        self._dimension = values.shape[1]
        if not len(documents):
            return
        self._pending.append(documents.with_values(values))
        self._pending_rows += len(values)
        self._num_documents += len(documents)
        self._max_norm = torch.maximum(self._max_norm, _norms(values).max())
        if self._pending_rows >= TILE_ROWS:
            self._seal()

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """All documents, in tiles of about `TILE_ROWS` vectors, or their copies."""
        if self._scan_dtype is None:
            yield from self._tiles_on_device()
            return
        self._seal()
        start = 0
        for tile, copy in zip(self._tiles, self._copies, strict=True):
            on_device = replace(copy, codes=copy.codes.to(self._device, non_blocking=True))
            yield start, replace(tile.to(on_device.rows()), has_residuals=True)
            start += len(tile)

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """Their vectors, tile by tile, in the order of lengths."""
        for start, tile in self._tiles_on_device():
            order = np.argsort(tile.rows.sizes, kind="stable")
            yield torch.from_numpy(start + order), Part(tile.rows.values, tile.rows.sizes[order])

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """See `exact_maxsim`."""
        self._seal()
        self._memory.wait()
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
                scores[to_device(pairs, self._device)] = tile_scores
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """That of the inner products of rows, summed over the rows of the query, and that of the sum.

        For the inner products see `VectorStore`; a sum of n terms adds n u times the sum of their magnitudes.
        """
        unit = torch.finfo(torch.float32).eps / 2
        sizes = to_device(_sizes(queries), self._device).double()
        # A copy has one more dimension.
        return (self._dimension + 9 + sizes) * unit * self._max_norm * self._query_norms(queries)

    def deficit(self, queries: Part, documents: Tensor) -> Tensor:
        """Of a copy, twice the largest error of the document's rows for each row of the query, and the rounding."""
        rounding = super().deficit(queries, documents)
        if self._scan_dtype is None:
            return rounding
        residuals = self._residuals.rows[documents].double()
        return 2 * self._query_norms(queries).unsqueeze(1) * residuals + rounding

    def candidate_limit(self, k: int) -> int:
        """See `scanned_candidates`."""
        return super().candidate_limit(k) if self._scan_dtype is None else scanned_candidates(k)

    def _query_norms(self, queries: Part) -> Tensor:
        """Sums, or means, of the lengths of the rows of queries: float64 [T]."""
        return _sums_of_queries(_norms(queries.values).unsqueeze(0), queries, mean=self._mean)[:, 0]

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
        tile = _TokenTile.of(concatenate(self._pending), mean=self._mean)
        self._pending, self._pending_rows = [], 0
        if self._scan_dtype is not None:
            copy = RoundedVectors.of(tile.rows.values.float(), self._scan_dtype)
            self._max_norm = torch.maximum(self._max_norm, copy.max_norm())
            documents = to_device(np.repeat(np.arange(len(tile)), tile.rows.sizes), self._device)
            of_rows = copy.residuals[to_device(tile.rows.order(), self._device)]
            self._residuals.append(of_rows.new_zeros(len(tile)).scatter_reduce(0, documents, of_rows, "amax"))
            self._copies.append(replace(copy, codes=self._copy_memory.keep(copy.codes)))
        self._tiles.append(tile.to(self._memory.keep(tile.rows.values)))


@torch.no_grad()
def exact_maxsim(queries: Part, query_of: Indices, documents: _Rows, document_of: Indices, *, mean: bool) -> Tensor:
    """MaxSim of pairs (query, document), [P] each: float32 [P] on the device of the queries, from float64.

    A function of the two texts alone: neither the other pairs nor the device nor the threads of a library change it.
    """
    device, dimension = queries.values.device, queries.values.shape[1]
    query_rows = _Rows.of(queries)
    scores = torch.empty(len(query_of), device=device)
    order = np.lexsort((query_rows.sizes[query_of], documents.sizes[document_of]))  # similar lengths together
    sizes = query_rows.sizes[query_of[order]], documents.sizes[document_of[order]]
    for start, end in _pair_blocks(*sizes, dimension, _block_numel(device)):
        pairs = order[start:end]
        # Zeros up to a power of two: sums of halves of rows and of zeros do not depend on the longest query of a block.
        longest = int(query_rows.sizes[query_of[pairs]].max())
        of_queries, of_documents = query_of[pairs], document_of[pairs]
        width = 1 << (longest - 1).bit_length()
        query_indices, is_row = _padded(query_rows.starts[of_queries], query_rows.sizes[of_queries], width)
        # A repeated row changes no maximum.
        lengths = documents.sizes[of_documents]
        document_indices, _ = _padded(documents.starts[of_documents], lengths, int(lengths.max()))
        left = queries.values[to_device(query_indices, device)]
        right = _gather(documents.values, document_indices, device)
        with full_precision(device):
            sums = sum_of_halves(_exact_maxima(left, right, to_device(is_row, device)))
        if mean:
            sums = sums / to_device(query_rows.sizes[query_of[pairs]], device)
        scores[to_device(pairs, device)] = sums.float()
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


def _gather(values: Tensor, indices: Indices, device: torch.device) -> Tensor:
    """Rows that may be kept on the host and in another type: float32 [P, M, D] on the device."""
    return values[to_device(indices, values.device)].to(device).float()


def _sums_of_queries(values: Tensor, queries: Part, *, mean: bool) -> Tensor:
    """The sums over the rows of each query, or their means: [n, Q] to [T, n]."""
    sizes = _sizes(queries)
    if len(sizes) and (sizes == sizes[0]).all():  # expanded queries
        sums = values.view(len(values), len(sizes), -1).sum(dim=2).T.contiguous()
    else:
        texts = queries.per_row(torch.arange(len(sizes), device=values.device))
        sums = values.new_zeros(len(sizes), len(values)).index_add_(0, texts, values.T)
    return sums / to_device(sizes, values.device).unsqueeze(1) if mean else sums


def _norms(values: Tensor) -> Tensor:
    """Upper bounds of the lengths of rows, float64 [R]."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32)
    return norms.double() * (1 + 1e-3)


def _sizes(part: Part) -> Indices:
    assert part.sizes is not None, "a text has a vector per token"
    return part.sizes


def _block_cells(device: torch.device) -> int:
    return BLOCK_CELLS_CPU if device.type == "cpu" else BLOCK_CELLS_GPU


def _block_numel(device: torch.device) -> int:
    return BLOCK_NUMEL_CPU if device.type == "cpu" else BLOCK_NUMEL_GPU
