"""The score of weights of words: inner products over the words that both texts have; exact, on compressed rows.

An index keeps the words of each document with a weight above 0 in host memory. The exact score adds the products of a
document's words in their order in float64: a function of the two texts alone.

Shapes: T queries, t documents of a tile, P pairs, V words.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.config.losses import TOKEN_TEMPERATURE_BOUNDS, Similarity
from embedtrain.inference.exact import norms, pairwise_dot
from embedtrain.inference.store import DocumentStore, DocumentTile, require_no_copy
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import VectorScore

# Numbers of a block of documents, or of pairs, with all words: 64 MiB of float32.
BLOCK_NUMEL = 1 << 24
# Documents of a tile.
TILE_DOCUMENTS = 1 << 14


class WordScore(VectorScore):
    """The inner product of the weights of words. Scores of 10 to 40 are usual.

    Args:
        is_symmetric: whether queries are encoded as documents.
    """

    default_temperature = 1.0
    temperature_bounds = TOKEN_TEMPERATURE_BOUNDS
    name = "dot"
    max_chunks_per_block = 2  # a chunk of 16,384 tokens may have 1,000 texts, of 122 KB each before they are compressed

    def __init__(self, *, is_symmetric: bool = True) -> None:
        super().__init__(Similarity.dot)
        self.is_symmetric = is_symmetric

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The weights as they are."""
        return values[:, :dimension].float()

    def exact(self, first: Part, second: Part) -> Tensor:
        """Inner products."""
        return pairwise_dot(first.values, second.values).float().cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "WordStore":
        """A store of words and their weights."""
        require_no_copy(config, "sparse model")
        return WordStore(device)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The words of documents: compressed rows of a matrix [t, V]."""

    starts: NDArray[np.int64]  # [t + 1]
    words: NDArray[np.int32]
    weights: NDArray[np.float32]
    num_words: int  # V

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, values: Tensor) -> "_Rows":
        """Of weights [t, V]."""
        texts, words = values.nonzero(as_tuple=True)
        counts = torch.bincount(texts, minlength=len(values)).cpu().numpy()
        starts = np.concatenate([[0], np.cumsum(counts)])
        weights = values[texts, words].float().cpu().numpy()
        return cls(starts, words.int().cpu().numpy(), weights, values.shape[1])

    @classmethod
    def concatenate(cls, parts: list["_Rows"]) -> "_Rows":
        counts = np.concatenate([np.diff(part.starts) for part in parts])
        return cls(
            np.concatenate([[0], np.cumsum(counts)]),
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.weights for part in parts]),
            parts[0].num_words,
        )

    def slice(self, first: int, end: int) -> "_Rows":
        low, high = self.starts[first], self.starts[end]
        return _Rows(self.starts[first : end + 1] - low, self.words[low:high], self.weights[low:high], self.num_words)

    def take(self, rows: NDArray[np.int64]) -> "_Rows":
        """These documents, which may repeat."""
        counts = np.diff(self.starts)[rows]
        ends = np.cumsum(counts)
        cells = np.repeat(self.starts[:-1][rows] - (ends - counts), counts) + np.arange(counts.sum())
        return _Rows(np.concatenate([[0], ends]), self.words[cells], self.weights[cells], self.num_words)

    def texts(self) -> NDArray[np.int64]:
        """The document of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def dense(self, device: torch.device) -> Tensor:
        """[t, V]."""
        values = np.zeros((len(self), self.num_words), dtype=np.float32)
        values[self.texts(), self.words] = self.weights
        return torch.from_numpy(values).to(device)


class _WordTile(DocumentTile):
    def __init__(self, rows: _Rows, device: torch.device) -> None:
        self._rows = rows
        parts = (torch.from_numpy(part) for part in (rows.starts, rows.words.astype(np.int64), rows.weights))
        starts, words, weights = (part.to(device) for part in parts)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
            # torch 2.11 warns in spite of the argument.
            warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly", category=UserWarning)
            self._matrix = torch.sparse_csr_tensor(
                starts, words, weights, (len(rows), rows.num_words), check_invariants=False
            )

    def __len__(self) -> int:
        return len(self._rows)

    def scores(self, queries: Part) -> Tensor:
        products: Tensor = self._matrix @ queries.values.T
        return products.T.contiguous()


class WordStore(DocumentStore):
    """Documents with weights of words."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[_Rows] = []
        self._max_norm = 0.0
        self._max_words = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, documents: Part) -> None:
        """Add the weights of documents [n, V]."""
        height = max(1, BLOCK_NUMEL // max(1, documents.values.shape[1]))
        for values in documents.values.split(height):
            if len(values):
                rows = _Rows.of(values)
                self._parts.append(rows)
                self._max_norm = max(self._max_norm, float(norms(values).max()))
                self._max_words = max(self._max_words, int(np.diff(rows.starts).max()))

    def _all(self) -> _Rows | None:
        if len(self._parts) > 1:
            self._parts = [_Rows.concatenate(self._parts)]
        return self._parts[0] if self._parts else None

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """All documents, in the order in which they were added."""
        rows = self._all()
        for first in range(0, len(self), TILE_DOCUMENTS):
            assert rows is not None
            yield first, _WordTile(rows.slice(first, min(first + TILE_DOCUMENTS, len(self))), self._device)

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """The same as weights of all words, a block at a time."""
        rows = self._all()
        if rows is None:
            return
        height = max(1, BLOCK_NUMEL // rows.num_words)
        for first in range(0, len(rows), height):
            end = min(first + height, len(rows))
            yield torch.arange(first, end), Part(rows.slice(first, end).dense(self._device))

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Inner products in float64, added in the order of the document's words."""
        device, stored = queries.values.device, self._all()
        scores = torch.zeros(len(rows), device=device)
        if stored is None:
            return scores
        texts, numbers = rows.cpu(), documents.cpu().numpy()
        height = max(1, BLOCK_NUMEL // max(1, self._max_words))
        for first in range(0, len(numbers), height):
            pairs = stored.take(numbers[first : first + height])
            of_pair = pairs.texts()
            cells = texts[first : first + height][torch.from_numpy(of_pair)].to(device)
            weights = queries.values[cells, torch.from_numpy(pairs.words.astype(np.int64)).to(device)]
            products = weights.double().cpu().numpy() * pairs.weights.astype(np.float64)
            sums = np.bincount(of_pair, weights=products, minlength=len(pairs))
            scores[first : first + height] = torch.from_numpy(sums).float().to(device)
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """As of vectors with as many dimensions as the most words of a document: products of 0 add no error."""
        unit = torch.finfo(torch.float32).eps / 2
        return (self._max_words + 8) * unit * self._max_norm * norms(queries.values)
