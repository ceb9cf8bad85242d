"""Comparison of texts with three representations: the weighted sum of their dense, lexical and multi-vector scores.

All documents are compared by the sum. The token vectors and their scores are those of a `TokenStore`, tile by tile; the
dense vectors and lexical weights, which are small beside them, are on the device.

Shapes: T queries, n documents, t of them in a tile, P pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorDtype
from embedtrain.config.m3 import HybridWeights, M3Settings
from embedtrain.errors import ConfigError
from embedtrain.inference.comparison import Comparison, DocumentStore, Tile, require_kept_in_memory
from embedtrain.inference.exact import norms, pair_batch_size, pairwise_dot, sum_of_halves
from embedtrain.inference.late_interaction import TokenStore
from embedtrain.inference.transfer import to_device
from embedtrain.losses.encoded import Part, concatenate
from embedtrain.losses.lexical import LexicalTile
from embedtrain.losses.m3_score import split_rows

# Comparisons of ids of two texts in one block.
_BLOCK_NUMEL = 1 << 22


class M3Comparison(Comparison):
    """The sum of the three scores; `view` has the name of one of them alone."""

    is_symmetric = False
    name = "cosine"  # sentence-transformers has no name for it

    def __init__(self, settings: M3Settings) -> None:
        self.settings = settings

    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The rows as they are; the encoder has normalised them."""
        assert dimension is None, "rejected for such models"
        return values

    @property
    def views(self) -> Mapping[str, Comparison]:
        """Each of the three scores alone."""
        names = HybridWeights._fields
        alone = {name: HybridWeights(*(float(name == field) for field in names)) for name in names}
        return {name: M3Comparison(replace(self.settings, weights=weights)) for name, weights in alone.items()}

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Scores of queries with documents."""
        store = self.store(IndexConfig(), second.values.device, len(second))
        store.add(second)
        pairs = torch.arange(len(first), device=first.values.device)
        return store.exact_scores(first, pairs, pairs).cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "M3Store":
        """A store of the three representations; a ConfigError unless it is in float32, which ids need."""
        if config.dtype is not VectorDtype.fp32:
            raise ConfigError(
                f"index.dtype={config.dtype.value}: a model of three representations (m3) needs fp32; leave it out"
            )
        require_kept_in_memory(config, "model of three representations (m3)")
        return M3Store(config, device, self.settings)


class _M3Tile(Tile):
    def __init__(self, tokens: Tile, dense: Tensor, lexical: Part, settings: M3Settings) -> None:
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
        self._tokens = TokenStore(config, device, mean=True)
        self._dense = [torch.empty(0, settings.dimension, device=device)]
        self._lexical = [Part(torch.empty(0, 2, device=device), np.empty(0, dtype=np.int64))]

    def __len__(self) -> int:
        return len(self._tokens)

    def viewed(self, comparison: Comparison) -> "M3Store":
        """The same documents, compared by another score."""
        assert isinstance(comparison, M3Comparison)
        store = M3Store.__new__(M3Store)
        store.__dict__ |= self.__dict__ | {"settings": comparison.settings}
        return store

    def add(self, documents: Part) -> None:
        """Add the rows of documents."""
        parts = split_rows(documents.with_values(documents.values.to(self._device)), self.settings)
        self._tokens.add(parts.tokens)
        self._dense.append(parts.dense.values.clone())
        self._lexical.append(parts.lexical.with_values(parts.lexical.values.clone()))

    def tiles(self) -> Iterator[tuple[int, Tile]]:
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
        left = _padded(queries, query_of[pairs], query_width)
        right = _padded(documents, document_of[pairs], document_width)
        is_equal = left[:, :, None, 1] == right[:, None, :, 1]
        matches = torch.where(is_equal, right[:, None, :, 0], 0.0).amax(dim=2)
        scores[pairs] = sum_of_halves(left[:, :, 0].double() * matches.double())
    return scores


def lexical_weights(part: Part) -> dict[int, float]:
    """The weights of one text, those above 0, by token id."""
    return {int(token): weight for weight, token in part.values.tolist() if weight > 0}


def _padded(part: Part, texts: Tensor, width: int) -> Tensor:
    """Rows (weight, id) of texts, [P, width, 2], with the weight 0 where a text is shorter."""
    sizes = part.sizes
    assert sizes is not None
    device = part.values.device
    starts, lengths = (to_device(torch.from_numpy(index), device)[texts] for index in (np.cumsum(sizes) - sizes, sizes))
    offsets = torch.arange(width, device=device)
    is_row = offsets < lengths.unsqueeze(1)
    rows: Tensor = part.values[torch.where(is_row, starts.unsqueeze(1) + offsets, starts.unsqueeze(1))]
    return rows * is_row.unsqueeze(2)
