"""The score of two texts with three representations (BGE-M3): the weighted sum of three scores.

Dense vectors and vectors of tokens have inner products and MaxSim. Lexical scores are the sum, over the tokens that two
texts share, of the product of their weights (Chen et al., 2024). A text has the weights and ids of its tokens, at most
one of each id with a weight above 0. Only ids of the anchors of a tile matter: they are the columns of a table with a
row per anchor, in which each candidate looks up its own.

An index compares documents by the sum. Token vectors and their scores are those of a `TokenVectorStore`, tile by tile;
dense vectors and lexical weights, which are small beside them, are on the device.

c, t: anchors and candidates of a tile; R, S: rows of texts; M: documents; N: texts; T: queries of a search; P: pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorDtype
from embedtrain.config.kind_settings import HybridWeights, M3Settings
from embedtrain.config.losses import Similarity
from embedtrain.errors import ConfigError
from embedtrain.inference.exact import norms, pair_batch_size, pairwise_dot, sum_of_halves
from embedtrain.inference.store import DocumentStore, DocumentTile, require_no_copy
from embedtrain.kinds.late_interaction.score import MaxSim, TokenVectorStore
from embedtrain.losses.encoded import Encoded, Part, concatenate, to_device
from embedtrain.losses.score import (
    LEXICAL_WEIGHTS,
    SENTENCE_EMBEDDING,
    TOKEN_EMBEDDINGS,
    Columns,
    Score,
    ScoreTile,
    VectorScore,
)
from embedtrain.losses.similarity import at_least_float32

# Comparisons of ids of two texts in one block of a search.
_BLOCK_NUMEL = 1 << 22
DENSE, TOKENS = VectorScore(Similarity.dot), MaxSim(mean=True)


class Parts(NamedTuple):
    """The three representations of texts, from the rows of an `M3Encoder`."""

    dense: Part
    lexical: Part  # weights [R, 1] of all tokens, with their ids
    tokens: Part  # vectors of all tokens but the first of each text

    def slice(self, start: int, end: int) -> "Parts":
        """The texts from `start` to `end`."""
        return Parts(*(part.slice(start, end) for part in self))


def split_rows(part: Part, settings: M3Settings) -> Parts:
    """The representations; differentiable."""
    sizes = part.sizes
    assert sizes is not None, "a text has a row per token"
    starts = np.cumsum(sizes) - sizes
    others = np.ones(int(sizes.sum()), dtype=bool)
    others[starts] = False
    first, rest = (to_device(index, part.values.device) for index in (starts, np.flatnonzero(others)))
    return Parts(
        Part(part.values[first, : settings.dimension]),
        Part(part.values[:, -1:], sizes, part.ids),
        Part(part.values[rest, : settings.token_dimension], sizes - 1),
    )


class M3Score(Score):
    """The weighted sum of the three scores; views are each of them alone."""

    kind = "m3"
    name = "cosine"  # sentence-transformers has no name for it

    def __init__(self, settings: M3Settings) -> None:
        self.settings = settings

    def prepare(self, encoded: Encoded) -> Part:
        """The rows as they are."""
        (part,) = encoded.parts
        return part.with_values(at_least_float32(part.values))

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """The score of each document and its query, [M]."""
        first, second = split_rows(queries, self.settings), split_rows(documents, self.settings)
        return weighted_sum(self.settings.weights, compare_parts(first, second, owners, counts))

    def outputs(self, part: Part) -> dict[str, Part]:
        """The three representations."""
        parts = split_rows(part, self.settings)
        return {SENTENCE_EMBEDDING: parts.dense, TOKEN_EMBEDDINGS: parts.tokens, LEXICAL_WEIGHTS: parts.lexical}

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The rows as they are; the encoder has normalised them."""
        assert dimension is None, "rejected for such models"
        return values

    @property
    def views(self) -> Mapping[str, Score]:
        """Each of the three scores alone."""
        names = HybridWeights._fields
        alone = {name: HybridWeights(*(float(name == field) for field in names)) for name in names}
        return {name: M3Score(replace(self.settings, weights=weights)) for name, weights in alone.items()}

    def exact(self, first: Part, second: Part) -> Tensor:
        """Scores of queries with documents."""
        store = self.store(IndexConfig(), second.values.device, len(second))
        store.add(second)
        pairs = torch.arange(len(first), device=first.values.device)
        return store.exact_scores(first, pairs, pairs).cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "M3Store":
        """A store of the three representations; a ConfigError unless it is in float32, as lexical weights are."""
        if config.dtype is not VectorDtype.fp32:
            raise ConfigError(
                f"index.dtype={config.dtype.value}: a model of three representations (m3) needs fp32; leave it out"
            )
        require_no_copy(config, "model of three representations (m3)")
        return M3Store(config, device, self.settings)


def compare_parts(queries: Parts, documents: Parts, owners: Tensor, counts: NDArray[np.int64]) -> list[Tensor]:
    """The three scores of each document and its query, [M] each; see `Score.compare`."""
    return [
        DENSE.compare(queries.dense, documents.dense, owners, counts),
        compare_lexical(queries.lexical, documents.lexical, owners),
        TOKENS.compare(queries.tokens, documents.tokens, owners, counts),
    ]


def weighted_sum(weights: Sequence[float], scores: Sequence[Tensor]) -> Tensor:
    """Of scores of the same shape."""
    return torch.stack([weight * score for weight, score in zip(weights, scores, strict=True)]).sum(dim=0)


def compare_lexical(queries: Part, documents: Part, owners: Tensor) -> Tensor:
    """The score of each document [M] and its query, whose indices are `owners` [M]; differentiable.

    The keys (query, id) of all rows are sorted, so that memory grows with the rows alone.
    """
    assert queries.ids is not None
    assert documents.ids is not None
    device = queries.values.device
    query_of = queries.per_row(torch.arange(len(queries), device=device))
    document_of = documents.per_row(torch.arange(len(documents), device=device))
    keys, order = (query_of * (1 << 32) + queries.ids).sort()
    document_keys = owners[document_of] * (1 << 32) + documents.ids
    if not len(keys):
        return documents.values.new_zeros(len(documents))
    first = torch.searchsorted(keys, document_keys).clamp(max=len(keys) - 1)
    # A text may have several rows of an id, of which one has a weight.
    groups = torch.searchsorted(keys, keys)
    weights = queries.values.new_zeros(len(keys)).index_add(0, groups, queries.values[order, 0])
    products = torch.where(keys[first] == document_keys, weights[first] * documents.values[:, 0], 0.0)
    scores: Tensor = products.new_zeros(len(documents)).index_add(0, document_of, products)
    return scores


class LexicalTile(ScoreTile):
    """Lexical scores of anchors and candidates, differentiated by torch."""

    def __init__(self, anchors: Part, columns: Columns) -> None:
        assert isinstance(columns, Part)
        self.anchors, self.candidates = anchors, columns
        self._weights = anchors.values[:, 0].detach().requires_grad_()
        self._candidate_weights = columns.values[:, 0].detach().requires_grad_()

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """See `ScoreTile`."""
        if out is None:
            return self._scores(self.anchors.values[:, 0], self.candidates.values[:, 0]) * scale
        with torch.enable_grad():
            self._computed = self._scores(self._weights, self._candidate_weights)
        return torch.mul(self._computed.detach(), scale, out=out)

    def _scores(self, weights: Tensor, candidate_weights: Tensor) -> Tensor:
        anchors, candidates = self.anchors, self.candidates
        if not len(weights) or not len(candidate_weights):
            return weights.sum() * 0 + weights.new_zeros(len(anchors), len(candidates))
        ids, document_ids = anchors.ids, candidates.ids
        assert ids is not None
        assert document_ids is not None
        ordered = ids.sort()[0]
        texts = anchors.per_row(torch.arange(len(anchors), device=ids.device))
        table = weights.new_zeros(len(ids), len(anchors))
        table = table.index_put((torch.searchsorted(ordered, ids), texts), weights, accumulate=True)
        rows = torch.searchsorted(ordered, document_ids).clamp(max=len(ordered) - 1)
        factors = torch.where(ordered[rows] == document_ids, candidate_weights, 0.0)
        assert candidates.sizes is not None
        offsets = to_device(np.cumsum(candidates.sizes) - candidates.sizes, ids.device)
        sums = F.embedding_bag(rows, table, offsets, mode="sum", per_sample_weights=factors)
        return sums.T

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `ScoreTile`."""
        self._add(grads, self._weights, tile_grads * weights)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """See `ScoreTile`."""
        self._add(grads, self._candidate_weights, tile_grads * weights)

    def _add(self, grads: Tensor, weights: Tensor, tile_grads: Tensor) -> None:
        (own,) = torch.autograd.grad(self._computed, weights, tile_grads, retain_graph=True)
        grads[:, 0] += own


class _M3Tile(DocumentTile):
    def __init__(self, tokens: DocumentTile, dense: Tensor, lexical: Part, settings: M3Settings) -> None:
        self.tokens, self.dense, self.lexical, self.settings = tokens, dense, lexical, settings

    def __len__(self) -> int:
        return len(self.dense)

    def scores(self, queries: Part) -> Tensor:
        parts, weights = split_rows(queries, self.settings), self.settings.weights
        scores = parts.dense.values.new_zeros(len(queries), len(self))
        if weights.multi_vector:
            scores += weights.multi_vector * self.tokens.scores(parts.tokens)
        if weights.dense:
            scores += weights.dense * (parts.dense.values @ self.dense.T)
        if weights.lexical:
            scores += weights.lexical * LexicalTile(parts.lexical, self.lexical).scores(scores.new_ones(1))
        return scores


class M3Store(DocumentStore):
    """Documents with three representations."""

    def __init__(self, config: IndexConfig, device: torch.device, settings: M3Settings) -> None:
        self.settings = settings
        self._device = device
        self._tokens = TokenVectorStore(config, device, mean=True)
        self._dense = [torch.empty(0, settings.dimension, device=device)]
        no_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._lexical = [Part(torch.empty(0, 1, device=device), np.empty(0, dtype=np.int64), no_ids)]

    def __len__(self) -> int:
        return len(self._tokens)

    def viewed(self, score: Score) -> "M3Store":
        """The same documents, compared by another score."""
        assert isinstance(score, M3Score)
        store = M3Store.__new__(M3Store)
        store.__dict__ |= self.__dict__ | {"settings": score.settings}
        return store

    def add(self, documents: Part) -> None:
        """Add the rows of documents."""
        parts = split_rows(documents.to(self._device), self.settings)
        self._tokens.add(parts.tokens)
        self._dense.append(parts.dense.values.clone())
        self._lexical.append(parts.lexical.with_values(parts.lexical.values.clone()))

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """All documents, in the tiles of their token vectors."""
        dense, lexical = self._joined()
        for start, tile in self._tokens.tiles():
            end = start + len(tile)
            yield start, _M3Tile(tile, dense[start:end], lexical.slice(start, end), self.settings)

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """Only an index of vectors of one kind is truncated, and options to truncate others are rejected."""
        raise NotImplementedError("vectors of three representations are not truncated")

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """The weighted sum of the three scores of each pair, which are functions of the two texts alone."""
        parts, weights = split_rows(queries, self.settings), self.settings.weights
        dense, lexical = self._joined()
        scores = torch.zeros(len(rows), dtype=torch.float64, device=self._device)
        for chosen in (
            torch.arange(len(rows), device=self._device).split(pair_batch_size(dense)) if weights.dense else ()
        ):
            products = pairwise_dot(parts.dense.values[rows[chosen]], dense[documents[chosen]])
            scores[chosen] += weights.dense * products
        if weights.lexical:
            scores += weights.lexical * _exact_lexical(parts.lexical, rows, lexical, documents)
        if weights.multi_vector:
            scores += weights.multi_vector * self._tokens.exact_scores(parts.tokens, rows, documents).double()
        return scores.float()

    def rounding_error(self, queries: Part) -> Tensor:
        """The weighted sum of the errors of the three scores; each also covers the rounding of this sum.

        For vectors see `VectorStore`. A lexical score has at most as many terms as the query has tokens.
        """
        unit = torch.finfo(torch.float32).eps / 2
        parts, weights = split_rows(queries, self.settings), self.settings.weights
        dense, lexical = self._joined()
        lengths = norms(parts.dense.values) * (norms(dense).max() if len(dense) else 1.0)
        sums = torch.zeros(len(queries), dtype=torch.float64, device=self._device)
        texts = parts.lexical.per_row(torch.arange(len(queries), device=self._device))
        sums.index_add_(0, texts, parts.lexical.values[:, 0].double())
        largest = lexical.values[:, 0].max().double() if len(lexical.values) else 1.0
        terms = parts.lexical.max_size + 16
        error: Tensor = (
            weights.dense * (dense.shape[1] + 16) * unit * lengths
            + weights.lexical * terms * unit * sums * largest
            + weights.multi_vector * 2 * self._tokens.rounding_error(parts.tokens)
        )
        return error

    def _joined(self) -> tuple[Tensor, Part]:
        """The dense vectors and the lexical weights of all documents."""
        if len(self._dense) > 1:
            self._dense[:] = [torch.cat(self._dense)]
            self._lexical[:] = [concatenate(self._lexical)]
        return self._dense[0], self._lexical[0]


@torch.no_grad()
def _exact_lexical(queries: Part, query_of: Tensor, documents: Part, document_of: Tensor) -> Tensor:
    """Lexical scores of pairs (query, document), [P] each: float64 [P].

    An id of the query has at most one weight above 0 in the document, so only the sum over the query's rows rounds.
    """
    scores = torch.zeros(len(query_of), dtype=torch.float64, device=queries.values.device)
    if not len(query_of):
        return scores
    # Zeros up to a power of two: a sum of halves of weights and zeros does not depend on the longest query.
    query_width, document_width = 1 << (queries.max_size - 1).bit_length(), documents.max_size
    height = max(1, _BLOCK_NUMEL // (query_width * document_width))
    for pairs in torch.arange(len(query_of), device=scores.device).split(height):
        left, left_ids = _padded(queries, query_of[pairs], query_width)
        right, right_ids = _padded(documents, document_of[pairs], document_width)
        is_equal = left_ids.unsqueeze(2) == right_ids.unsqueeze(1)
        matches = torch.where(is_equal, right.unsqueeze(1), 0.0).amax(dim=2)
        scores[pairs] = sum_of_halves(left.double() * matches.double())
    return scores


def _padded(part: Part, texts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of texts, [P, width] each, with the weight 0 where a text is shorter."""
    sizes, ids = part.sizes, part.ids
    assert sizes is not None
    assert ids is not None
    device = part.values.device
    starts, lengths = (to_device(index, device)[texts] for index in (np.cumsum(sizes) - sizes, sizes))
    offsets = torch.arange(width, device=device)
    is_row = offsets < lengths.unsqueeze(1)
    rows = torch.where(is_row, starts.unsqueeze(1) + offsets, starts.unsqueeze(1))
    return part.values[rows, 0] * is_row, ids[rows]
