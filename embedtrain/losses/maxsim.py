"""MaxSim: each token of the query against the closest token of the document (Khattab and Zaharia, 2020, "ColBERT").

    s(q, d) = sum over rows a of q of max over rows b of d of <q_a, d_b>

Documents are compared in blocks of equal lengths, so the maximum needs no padding, and a padded token can never win it.
Of the inner products of two texts only one per row of the query has a gradient: a tile keeps which one it is.

c, t: queries and documents of a tile; Q, R: rows of these queries and documents; D: dimensions; P: pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import TOKEN_TEMPERATURE_BOUNDS
from embedtrain.losses.encoded import Encoded, Part, to_device
from embedtrain.losses.score import Columns, Tile, TiledScore
from embedtrain.losses.similarity import at_least_float32, rounding_tolerance

# Inner products of one block: 16 MiB of float32.
BLOCK_CELLS = 1 << 22


class MaxSim(TiledScore):
    """The score of late interaction.

    Args:
        mean: divide by the rows of the query (MeanMaxSim), so that scores of queries of any length are alike.
    """

    temperature_bounds = TOKEN_TEMPERATURE_BOUNDS

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean
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

    def tile(self, anchors: Part, columns: Columns) -> Tile:
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

    @staticmethod
    def _divisors(queries: Part) -> Tensor:
        assert queries.sizes is not None
        return to_device(queries.sizes, queries.values.device).to(queries.values.dtype)


@dataclass(frozen=True, slots=True)
class SortedDocuments:
    """t documents in the order of their lengths."""

    values: Tensor  # [R, D], of sorted documents
    order: Tensor  # int64 [t], the document of each sorted one
    runs: tuple[tuple[int, int], ...]  # (number of documents, rows of each), ascending

    def __len__(self) -> int:
        return len(self.order)

    def blocks(self, num_query_rows: int) -> Iterator[tuple[int, int, int]]:
        """Blocks of equal lengths: the first document, the number of documents, and the rows of each."""
        first = 0
        for number, length in self.runs:
            height = max(1, BLOCK_CELLS // max(1, num_query_rows * length))
            for start in range(0, number, height):
                yield first + start, min(height, number - start), length
            first += number

    def unsorted(self, values: Tensor) -> Tensor:
        """Columns [n, t] of sorted documents, in the order before sorting."""
        return torch.empty_like(values).index_copy_(1, self.order, values)


class MaxSimTile(Tile):
    """MaxSim of queries and documents, divided by `divisors` [c]."""

    def __init__(self, anchors: Part, columns: SortedDocuments, divisors: Tensor | None = None) -> None:
        self.anchors, self.columns, self.divisors = anchors, columns, divisors
        self.best_rows = torch.empty(0)  # int32 [Q, t], the row of each sorted document that is closest

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Tile`; differentiable once."""
        if out is not None:
            return torch.mul(self._sums(), scale, out=out)
        sums: Tensor = _Differentiable.apply(self.anchors.values, self.columns.values, self)  # type: ignore[no-untyped-call]
        return sums * scale

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `Tile`."""
        cells = self._cell_grads(tile_grads, weights)
        if cells.numel():  # torch rejects bags without content
            grads += F.embedding_bag(self.best_rows, self.columns.values, mode="sum", per_sample_weights=cells)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `Tile`."""
        cells, queries = self._cell_grads(tile_grads, weights), self.anchors.values
        row = 0
        for first, number, length in self.columns.blocks(len(queries)):
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
        for first, number, length in columns.blocks(len(queries)):
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
        tile: MaxSimTile = ctx.tile
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
        for start, end in _pair_blocks(query_sizes, document_sizes, queries.values.shape[1]):
            sizes = query_sizes[start:end], document_sizes[start:end]
            rows, real = _padded_rows(query_starts[start:end], sizes[0], device)
            columns, compared = _padded_rows(document_starts[start:end], sizes[1], device)
            products = torch.bmm(queries.values[rows], documents.values[columns].transpose(1, 2))
            position_of_best = products.masked_fill_(~compared.unsqueeze(1), -torch.inf).argmax(dim=2)
            # The host knows how many rows are real, so a sort selects them; a mask would wait for the device.
            order = (~real).flatten().to(torch.uint8).argsort(stable=True)[: int(sizes[0].sum())]
            best.append((position_of_best + columns[:, :1]).flatten()[order])
    indices = [to_device(index, device) for index in (pairs, query_starts[pairs] + position)]
    return _BestRows(indices[0], indices[1], torch.cat(best))


def _pair_blocks(
    query_sizes: NDArray[np.int64], document_sizes: NDArray[np.int64], width: int
) -> Iterator[tuple[int, int]]:
    """Consecutive pairs whose padded products and rows take at most `BLOCK_CELLS` numbers each."""
    start, longest = 0, (0, 0)
    for index, size in enumerate(zip(query_sizes.tolist(), document_sizes.tolist(), strict=True)):
        grown = max(longest[0], size[0]), max(longest[1], size[1])
        cells = (index + 1 - start) * max(grown[0] * grown[1], max(grown) * width)
        if index > start and cells > BLOCK_CELLS:
            yield start, index
            start, grown = index, size
        longest = grown
    if len(query_sizes) > start:
        yield start, len(query_sizes)


def _padded_rows(starts: NDArray[np.int64], sizes: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of texts, padded with their first one: [P, L], and which of them are real."""
    offsets = np.arange(sizes.max(initial=1))
    real = offsets < sizes[:, None]
    rows = np.where(real, starts[:, None] + offsets, starts[:, None])
    return to_device(rows, device), to_device(real, device)


def sorted_by_length(part: Part) -> SortedDocuments:
    """Documents as columns; differentiable."""
    assert part.sizes is not None
    order = np.argsort(part.sizes, kind="stable")
    device = part.values.device
    indices = to_device(order, device)
    lengths, counts = np.unique(part.sizes, return_counts=True)
    runs = tuple(zip(counts.tolist(), lengths.tolist(), strict=True))
    return SortedDocuments(part.take(indices, order).values, indices, runs)


def sum_by_text(values: Tensor, part: Part) -> Tensor:
    """Sums of the rows of each text: [R, n] to [N, n]."""
    texts = part.per_row(torch.arange(len(part), device=values.device))
    return values.new_zeros(len(part), values.shape[1]).index_add_(0, texts, values)
