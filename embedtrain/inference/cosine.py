"""Comparison of vectors, one per text: by cosine, which is the inner product of unit vectors."""

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.inference.comparison import Comparison
from embedtrain.inference.exact import cosines, unit_vectors
from embedtrain.inference.scanned import ScannedStore
from embedtrain.inference.vector_store import VectorStore
from embedtrain.losses.encoded import Part


class Cosine(Comparison):
    """Cosine of two vectors; an index computes inner products of what `prepare` returns."""

    name = "cosine"
    is_symmetric = True

    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """Unit vectors."""
        return unit_vectors(values[:, :dimension])

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Cosines; 0 for a zero vector."""
        # In float32, the cosine of two equal texts is exactly 1, so that they tie.
        return cosines(first.values, second.values).float().cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of vectors."""
        store = VectorStore if config.scan_dtype is None else ScannedStore
        return store(config, device, expected)
