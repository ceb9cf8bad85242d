"""Lexical scores: the sum, over the tokens that two texts share, of the product of their weights (Chen et al., 2024).

A text has rows (weight, id) of its tokens, at most one of each id with a weight above 0. Only ids of the anchors of a
tile matter: they are the columns of a table with a row per anchor, in which each candidate looks up its own.

c, t: anchors and candidates of a tile; R, S: their rows.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.losses.encoded import Part, to_device
from embedtrain.losses.score import Columns, Tile


def compare_lexical(queries: Part, documents: Part, owners: Tensor) -> Tensor:
    """The score of each document [M] and its query, whose indices are `owners` [M]; differentiable.

    The keys (query, id) of all rows are sorted, so that memory grows with the rows alone.
    """
    device = queries.values.device
    query_of = queries.per_row(torch.arange(len(queries), device=device))
    document_of = documents.per_row(torch.arange(len(documents), device=device))
    keys, order = (query_of * (1 << 32) + queries.values[:, 1].long()).sort()
    document_keys = owners[document_of] * (1 << 32) + documents.values[:, 1].long()
    if not len(keys):
        return documents.values.new_zeros(len(documents))
    first = torch.searchsorted(keys, document_keys).clamp(max=len(keys) - 1)
    # A text may have several rows of an id, of which one has a weight.
    groups = torch.searchsorted(keys, keys)
    weights = queries.values.new_zeros(len(keys)).index_add(0, groups, queries.values[order, 0])
    products = torch.where(keys[first] == document_keys, weights[first] * documents.values[:, 0], 0.0)
    scores: Tensor = products.new_zeros(len(documents)).index_add(0, document_of, products)
    return scores


class LexicalTile(Tile):
    """Lexical scores of anchors and candidates, differentiated by torch."""

    def __init__(self, anchors: Part, columns: Columns) -> None:
        assert isinstance(columns, Part)
        self.anchors, self.candidates = anchors, columns
        self._weights = anchors.values[:, 0].detach().requires_grad_()
        self._candidate_weights = columns.values[:, 0].detach().requires_grad_()

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Tile`."""
        if out is None:
            return self._scores(self.anchors.values[:, 0], self.candidates.values[:, 0]) * scale
        with torch.enable_grad():
            self._computed = self._scores(self._weights, self._candidate_weights)
        return torch.mul(self._computed.detach(), scale, out=out)

    def _scores(self, weights: Tensor, candidate_weights: Tensor) -> Tensor:
        anchors, candidates = self.anchors, self.candidates
        if not len(weights) or not len(candidate_weights):
            return weights.sum() * 0 + weights.new_zeros(len(anchors), len(candidates))
        ids = anchors.values[:, 1].long()
        ordered = ids.sort()[0]
        texts = anchors.per_row(torch.arange(len(anchors), device=ids.device))
        table = weights.new_zeros(len(ids), len(anchors))
        table = table.index_put((torch.searchsorted(ordered, ids), texts), weights, accumulate=True)
        document_ids = candidates.values[:, 1].long()
        rows = torch.searchsorted(ordered, document_ids).clamp(max=len(ordered) - 1)
        factors = torch.where(ordered[rows] == document_ids, candidate_weights, 0.0)
        assert candidates.sizes is not None
        offsets = to_device(np.cumsum(candidates.sizes) - candidates.sizes, ids.device)
        sums = F.embedding_bag(rows, table, offsets, mode="sum", per_sample_weights=factors)
        return sums.T

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `Tile`; `grads` are those of rows (weight, id)."""
        self._add(grads, self._weights, tile_grads * weights)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `Tile`."""
        self._add(grads, self._candidate_weights, tile_grads * weights)

    def _add(self, grads: Tensor, weights: Tensor, tile_grads: Tensor) -> None:
        (own,) = torch.autograd.grad(self._computed, weights, tile_grads, retain_graph=True)
        grads[:, 0] += own
