"""Documents with one vector each, compared by inner product or by a distance.

Shapes: T queries, t documents of a tile, P pairs, D dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.inference.comparison import DocumentStore, Tile
from embedtrain.inference.exact import norms, pair_batch_size, pairwise_dot, sum_of_halves
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


@dataclass(frozen=True, slots=True)
class _DistanceTile(Tile):
    vectors: Tensor  # float32 [t, D]
    p: int

    def __len__(self) -> int:
        return len(self.vectors)

    def scores(self, queries: Part) -> Tensor:
        # By a matrix product, |q|^2 - 2qd + |d|^2 would cancel between near vectors, and its bound would be useless.
        scores: Tensor = -torch.cdist(
            queries.values, self.vectors, p=float(self.p), compute_mode="donot_use_mm_for_euclid_dist"
        )
        return scores


class DistanceStore(VectorStore):
    """Documents with a vector each, compared by Euclidean (`p` 2) or Manhattan (`p` 1) distance, less than 0."""

    def __init__(self, config: IndexConfig, device: torch.device, expected: int, p: int) -> None:
        super().__init__(config, device, expected)
        self._p = p

    def tiles(self) -> Iterator[tuple[int, Tile]]:
        """All vectors, in the order in which they were added."""
        for start, vectors in self._vectors.tiles():
            yield start, _DistanceTile(vectors, self._p)

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Negative distances, computed in float64 in a fixed order of additions."""
        scores = torch.empty(len(rows), device=queries.values.device)
        for positions, vectors in self._vectors.pick(documents, pair_batch_size(queries.values)):
            scores[positions] = -pairwise_distance(queries.values[rows[positions]], vectors, self._p).float()
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """As of `VectorStore`: a sum of D terms, none below 0, so its error is relative to the distance.

        A Euclidean distance is at most |q| + |d|, and a Manhattan distance at most sqrt(D) times that.
        """
        unit = torch.finfo(torch.float32).eps / 2
        longest = (self._max_norm + norms(queries.values)) * self._vectors.dimension ** (1 / self._p - 1 / 2)
        error: Tensor = (self._vectors.dimension + 8) * unit * longest
        return error


def pairwise_distance(left: Tensor, right: Tensor, p: int) -> Tensor:
    """Euclidean (`p` 2) or Manhattan (`p` 1) distance of each pair of rows of two [P, D], float64 [P].

    Differences of float32 are rounded once in float64, and halves are added to halves, as in `pairwise_dot`.
    """
    differences = left.double() - right.double()
    if p == 1:
        return sum_of_halves(differences.abs())
    return sum_of_halves(differences.square()).sqrt()
