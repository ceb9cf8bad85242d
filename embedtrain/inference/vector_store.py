"""Documents with one vector each, compared by inner product.

Shapes: T queries, t documents of a tile, P pairs, D dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.inference.comparison import DocumentStore, Tile
from embedtrain.inference.exact import norms, pair_batch_size, pairwise_dot
from embedtrain.inference.vector_tiles import VectorTiles
from embedtrain.losses.encoded import Part


@dataclass(frozen=True, slots=True)
class _VectorTile(Tile):
    vectors: Tensor  # float32 [t, D]

    def __len__(self) -> int:
        return len(self.vectors)

    def scores(self, queries: Part) -> Tensor:
        return queries.values @ self.vectors.T


class VectorStore(DocumentStore):
    """Documents with a vector each, compared by inner product."""

    def __init__(self, config: IndexConfig, device: torch.device, expected: int) -> None:
        self._vectors = VectorTiles(config, device, expected)
        # Of the vectors; on the device, because reading it after each block would make the next one wait.
        self._max_norm = torch.zeros((), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, documents: Part) -> None:
        """Add a vector per document."""
        vectors = self._vectors.add(documents.values)
        if len(vectors):
            self._max_norm = torch.maximum(self._max_norm, norms(vectors).max())

    def tiles(self) -> Iterator[tuple[int, Tile]]:
        """All vectors, in the order in which they were added."""
        for start, vectors in self._vectors.tiles():
            yield start, _VectorTile(vectors)

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """The same as representations."""
        for start, vectors in self._vectors.tiles():
            yield torch.arange(start, start + len(vectors)), Part(vectors)

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Inner products, computed in float64 in a fixed order of additions."""
        scores = torch.empty(len(rows), device=queries.values.device)
        for positions, vectors in self._vectors.pick(documents, pair_batch_size(queries.values)):
            scores[positions] = pairwise_dot(queries.values[rows[positions]], vectors).float()
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1: D u |q| |d| for any order.

        A little more covers the rounding of the exact score.
        """
        unit = torch.finfo(torch.float32).eps / 2
        return (self._vectors.dimension + 8) * unit * self._max_norm * norms(queries.values)
