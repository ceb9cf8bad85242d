"""Vectors with a smaller copy that searches read, and a bound on the error of the copy for each document.

The copy of a document d has the vector d', rounded to bf16 or to int8 with a scale per document, and the length of the
residual d - d'. The score that a tile gives it is q d' + |q| |d - d'|, which by the Cauchy-Schwarz inequality is not
below the exact score q d, and above it by at most 2 |q| |d - d'|. The second term is one more dimension of the vectors.

Shapes: n documents, t of a tile, T queries, C candidates, D dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorPlacement
from embedtrain.inference.comparison import Tile
from embedtrain.inference.exact import norms
from embedtrain.inference.stored_vectors import to_int8
from embedtrain.inference.vector_store import VectorStore
from embedtrain.inference.vector_tiles import GrowingTensor, VectorTiles
from embedtrain.losses.encoded import Part

# Lengths are rounded up when they become float32.
_ROUND_UP = 1 + 2.0**-20


class ScannedStore(VectorStore):
    """Documents with a vector each, compared by inner product, and a copy of type `config.scan_dtype`."""

    def __init__(self, config: IndexConfig, device: torch.device, expected: int) -> None:
        assert config.scan_dtype is not None
        place = config.place
        # By default only the copy is on the device.
        super().__init__(replace(config, place=_HOST if place is _AUTO else place), device, expected)
        self._scan_dtype, self._device = config.scan_dtype, device
        dtype = torch.int8 if config.scan_dtype is ScanDtype.int8 else torch.bfloat16
        in_memory = replace(config, place=_AUTO if place is VectorPlacement.disk else place)
        self._copy = VectorTiles(in_memory, device, expected, dtype=dtype, decode=lambda codes: codes)
        # Float32 [n] on the device.
        self._residuals, self._scales = (GrowingTensor(expected, torch.float32, device) for _ in range(2))

    def add(self, documents: Part) -> None:
        """Add a vector per document."""
        vectors = self._vectors.add(documents.values).to(self._device)
        codes, scales = self._encode(vectors.float())
        self._copy.add(codes)
        decoded = codes.float() * scales.unsqueeze(1)
        residuals = (norms(vectors.float() - decoded) * _ROUND_UP).float()
        self._scales.append(scales)
        self._residuals.append(residuals)
        if len(vectors):
            self._max_norm = torch.maximum(self._max_norm, (norms(decoded) + residuals).max())

    def _encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The copy of vectors [n, D], and the factor of each, [n]."""
        if self._scan_dtype is ScanDtype.int8:
            return to_int8(vectors)
        return vectors.bfloat16(), vectors.new_ones(len(vectors))

    def tiles(self) -> Iterator[tuple[int, Tile]]:
        """The copies of all vectors, in the order in which they were added."""
        residuals, scales = self._residuals.rows, self._scales.rows
        for start, codes in self._copy.tiles():
            end = start + len(codes)
            vectors = torch.empty(len(codes), codes.shape[1] + 1, device=codes.device)
            torch.mul(codes, scales[start:end].unsqueeze(1), out=vectors[:, :-1])
            vectors[:, -1] = residuals[start:end]
            yield start, _ScannedTile(vectors)

    def rounding_error(self, queries: Part) -> Tensor:
        """As of `VectorStore`, for one more dimension."""
        return super().rounding_error(queries) * (1 + 2 / (self._vectors.dimension + 8))

    def deficit(self, queries: Part, documents: Tensor) -> Tensor:
        """Twice the error of the copy of each document, and the rounding."""
        residuals = self._residuals.rows[documents].double()
        return 2 * norms(queries.values).unsqueeze(1) * residuals + self.rounding_error(queries).unsqueeze(1)

    def candidate_limit(self, k: int) -> int:
        """See `scanned_candidates`."""
        return scanned_candidates(k)


_AUTO, _HOST = VectorPlacement.auto, VectorPlacement.host


@dataclass(frozen=True, slots=True)
class _ScannedTile(Tile):
    vectors: Tensor  # float32 [t, D + 1]: copies, and the lengths of the residuals

    def __len__(self) -> int:
        return len(self.vectors)

    def scores(self, queries: Part) -> Tensor:
        lengths = (norms(queries.values) * _ROUND_UP).float().unsqueeze(1)
        return torch.cat([queries.values, lengths], dim=1) @ self.vectors.T


def scanned_candidates(k: int) -> int:
    """Candidates for the best `k`: of vectors in random directions, two to five times `k` are."""
    return 5 * k + 256
