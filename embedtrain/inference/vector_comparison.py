"""Comparison of vectors, one per text: by cosine, inner product, or a distance, as in sentence-transformers."""

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.errors import ConfigError
from embedtrain.inference.comparison import Comparison
from embedtrain.inference.exact import cosines, pair_batch_size, pairwise_dot, unit_vectors
from embedtrain.inference.scanned import ScannedStore
from embedtrain.inference.vector_store import DistanceStore, VectorStore, pairwise_distance
from embedtrain.losses.encoded import Part


class DotProduct(Comparison):
    """Inner product of two vectors."""

    name = VectorSimilarity.dot.value
    is_symmetric = True

    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The vectors, or their first dimensions, as they are."""
        return values[:, :dimension].float()

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Inner products."""
        parts = (torch.split(part.values, pair_batch_size(part.values)) for part in (first, second))
        return torch.cat([pairwise_dot(*pair) for pair in zip(*parts, strict=True)]).float().cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of vectors."""
        store = VectorStore if config.scan_dtype is None else ScannedStore
        return store(config, device, expected)


class Cosine(DotProduct):
    """Cosine of two vectors; an index computes inner products of what `prepare` returns."""

    name = VectorSimilarity.cosine.value

    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """Unit vectors."""
        return unit_vectors(values[:, :dimension])

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Cosines; 0 for a zero vector."""
        # In float32, the cosine of two equal texts is exactly 1, so that they tie.
        return cosines(first.values, second.values).float().cpu()


class NegativeDistance(DotProduct):
    """Euclidean (`p` 2) or Manhattan (`p` 1) distance of two vectors, less than 0: near texts score high."""

    def __init__(self, p: int) -> None:
        self.p = p
        self.name = (VectorSimilarity.euclidean if p == 2 else VectorSimilarity.manhattan).value

    def similarities(self, first: Part, second: Part) -> Tensor:
        """Negative distances."""
        parts = (torch.split(part.values, pair_batch_size(part.values)) for part in (first, second))
        return (
            torch.cat([-pairwise_distance(left, right, self.p) for left, right in zip(*parts, strict=True)])
            .float()
            .cpu()
        )

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of vectors; a ConfigError for a copy of them, whose error is bounded for inner products alone."""
        if config.scan_dtype is not None:
            raise ConfigError(
                f"index.scan_dtype={config.scan_dtype.value}: the model compares vectors by their {self.name} "
                "distance, which is searched without a copy; leave it out"
            )
        return DistanceStore(config, device, expected, self.p)


def vector_comparison(similarity: VectorSimilarity) -> Comparison:
    """How the vectors of a model with this similarity are compared."""
    match similarity:
        case VectorSimilarity.cosine:
            return Cosine()
        case VectorSimilarity.dot:
            return DotProduct()
        case VectorSimilarity.euclidean | VectorSimilarity.manhattan:
            return NegativeDistance(2 if similarity is VectorSimilarity.euclidean else 1)
