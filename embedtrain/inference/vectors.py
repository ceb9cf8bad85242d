"""Scores of vectors, one per text, as in sentence-transformers: cosine, inner product or a distance; and their stores.

`ScannedStore` has a smaller copy of the vectors that searches read, and a bound on its error for each document. The
copy of a document d has the vector d', rounded to bf16, or with a scale per document to fp16 or int8, and the length of
the residual d - d'. The score that a tile gives it is q d' + |q| |d - d'|, which by the Cauchy-Schwarz inequality is
not below the exact score q d, and above it by at most 2 |q| |d - d'|. The second term is one more dimension of vectors.

Shapes: n documents, t of a tile, T queries, P pairs, C candidates, D dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorDtype, VectorPlacement
from embedtrain.config.losses import Similarity, VectorSimilarity
from embedtrain.errors import ConfigError
from embedtrain.inference.exact import cosines, norms, pair_batch_size, pairwise_dot, sum_of_halves, unit_vectors
from embedtrain.inference.store import DocumentStore, DocumentTile, GrowingTensor, VectorTiles
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import VectorScore


@dataclass(frozen=True, slots=True)
class _VectorTile(DocumentTile):
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

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
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
class _DistanceTile(DocumentTile):
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

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
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


@dataclass(frozen=True, slots=True)
class RoundedVectors:
    """A smaller copy of vectors: about their codes times their scale."""

    codes: Tensor  # [n, D], of the type of the copy
    scales: Tensor  # float32 [n]
    residuals: Tensor  # float32 [n], not less than the lengths of the errors

    @classmethod
    def of(cls, vectors: Tensor, dtype: ScanDtype) -> "RoundedVectors":
        """The copy of float32 vectors [n, D]."""
        scales = vectors.new_ones(len(vectors))
        if dtype is ScanDtype.int8:
            codes, scales = to_int8(vectors)
        elif dtype is ScanDtype.fp16:  # whose numbers end at 65,504
            scales = vectors.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
            codes = (vectors / scales.unsqueeze(1)).half()
        else:
            codes = vectors.bfloat16()
        residuals = (norms(vectors - codes.float() * scales.unsqueeze(1)) * _ROUND_UP).float()
        return cls(codes, scales, residuals)

    def rows(self) -> Tensor:
        """The vectors of the copy, and the residual as one more dimension: float32 [n, D + 1]."""
        rows = torch.empty(len(self.codes), self.codes.shape[1] + 1, device=self.codes.device)
        torch.mul(self.codes, self.scales.unsqueeze(1), out=rows[:, :-1])
        rows[:, -1] = self.residuals
        return rows

    def max_norm(self) -> Tensor:
        """Not less than the length of any vector, its copy and its row: float64."""
        decoded = self.codes.float() * self.scales.unsqueeze(1)
        return (norms(decoded) + self.residuals).max()


def with_length(queries: Tensor) -> Tensor:
    """Queries [T, D] and their length as one more dimension, for products with `RoundedVectors.rows`: [T, D + 1].

    Such a product is not below that of the vectors themselves, and above it by at most twice the product of the length
    and the residual.
    """
    lengths = (norms(queries) * _ROUND_UP).float().unsqueeze(1)
    return torch.cat([queries, lengths], dim=1)


def to_int8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [n, T], and the scale of each vector, float32 [n]: a vector is about its codes times its scale."""
    scales = vectors.abs().amax(dim=1).clamp(min=127 * torch.finfo(torch.float32).tiny) / 127
    return (vectors / scales.unsqueeze(1)).round().to(torch.int8), scales


SCAN_DTYPES = {ScanDtype.bf16: torch.bfloat16, ScanDtype.fp16: torch.float16, ScanDtype.int8: torch.int8}
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
        dtype = SCAN_DTYPES[config.scan_dtype]
        in_memory = replace(config, place=_AUTO if place is VectorPlacement.disk else place)
        self._copy = VectorTiles(in_memory, device, expected, dtype=dtype, decode=lambda codes: codes)
        # Float32 [n] on the device.
        self._residuals, self._scales = (GrowingTensor(expected, torch.float32, device) for _ in range(2))

    def add(self, documents: Part) -> None:
        """Add a vector per document."""
        vectors = self._vectors.add(documents.values).to(self._device)
        copy = RoundedVectors.of(vectors.float(), self._scan_dtype)
        self._copy.add(copy.codes)
        self._scales.append(copy.scales)
        self._residuals.append(copy.residuals)
        if len(vectors):
            self._max_norm = torch.maximum(self._max_norm, copy.max_norm())

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """The copies of all vectors, in the order in which they were added."""
        residuals, scales = self._residuals.rows, self._scales.rows
        for start, codes in self._copy.tiles():
            end = start + len(codes)
            yield start, _ScannedTile(RoundedVectors(codes, scales[start:end], residuals[start:end]).rows())

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
class _ScannedTile(DocumentTile):
    vectors: Tensor  # float32 [t, D + 1]: copies, and the lengths of the residuals

    def __len__(self) -> int:
        return len(self.vectors)

    def scores(self, queries: Part) -> Tensor:
        return with_length(queries.values) @ self.vectors.T


def scanned_candidates(k: int) -> int:
    """Candidates for the best `k`: of vectors in random directions, two to five times `k` are."""
    return 5 * k + 256


class DotProduct(VectorScore):
    """Inner product of two vectors."""

    name = VectorSimilarity.dot.value
    is_symmetric = True
    named_by_loss = True

    def __init__(self, similarity: Similarity | None = Similarity.dot) -> None:
        super().__init__(similarity)

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The vectors, or their first dimensions, as they are."""
        return values[:, :dimension].float()

    def exact(self, first: Part, second: Part) -> Tensor:
        """Inner products."""
        parts = (torch.split(part.values, pair_batch_size(part.values)) for part in (first, second))
        return torch.cat([pairwise_dot(*pair) for pair in zip(*parts, strict=True)]).float().cpu()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of vectors; a ConfigError for fp16 of vectors of any length, whose numbers it may not hold."""
        require_no_fp16(config, self.name)
        return self._vector_store(config, device, expected)

    @staticmethod
    def _vector_store(config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        store = VectorStore if config.scan_dtype is None else ScannedStore
        return store(config, device, expected)


class Cosine(DotProduct):
    """Cosine of two vectors; an index computes inner products of what `search_rows` returns."""

    name = VectorSimilarity.cosine.value

    def __init__(self) -> None:
        super().__init__(Similarity.cosine)

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """Unit vectors."""
        return unit_vectors(values[:, :dimension])

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of unit vectors."""
        return self._vector_store(config, device, expected)

    def exact(self, first: Part, second: Part) -> Tensor:
        """Cosines; 0 for a zero vector."""
        # In float32, the cosine of two equal texts is exactly 1, so that they tie.
        return cosines(first.values, second.values).float().cpu()


class NegativeDistance(DotProduct):
    """Euclidean (`p` 2) or Manhattan (`p` 1) distance of two vectors, less than 0: near texts score high."""

    def __init__(self, p: int) -> None:
        super().__init__(None)  # no loss over scores compares by a distance
        self.p = p
        self.name = (VectorSimilarity.euclidean if p == 2 else VectorSimilarity.manhattan).value

    def exact(self, first: Part, second: Part) -> Tensor:
        """Negative distances."""
        parts = (torch.split(part.values, pair_batch_size(part.values)) for part in (first, second))
        return (
            torch.cat([-pairwise_distance(left, right, self.p) for left, right in zip(*parts, strict=True)])
            .float()
            .cpu()
        )

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of vectors; a ConfigError for a copy of them, whose error is bounded for inner products alone."""
        require_no_fp16(config, self.name)
        if config.scan_dtype is not None:
            raise ConfigError(
                f"index.scan_dtype={config.scan_dtype.value}: the model compares vectors by their {self.name} "
                "distance, which is searched without a copy; leave it out"
            )
        return DistanceStore(config, device, expected, self.p)


def require_no_fp16(config: IndexConfig, similarity: str) -> None:
    """Raise ConfigError for `index.dtype=fp16` where vectors have any length; `similarity` says how they compare."""
    if config.dtype is VectorDtype.fp16:
        raise ConfigError(
            f"index.dtype=fp16: is for unit vectors (cosine and MaxSim), because its numbers end at 65,504; the model "
            f"compares vectors by {similarity}; write bf16 or fp32"
        )


def vector_score(similarity: VectorSimilarity) -> DotProduct:
    """How the vectors of a model with this similarity are compared."""
    match similarity:
        case VectorSimilarity.cosine:
            return Cosine()
        case VectorSimilarity.dot:
            return DotProduct()
        case VectorSimilarity.euclidean | VectorSimilarity.manhattan:
            return NegativeDistance(2 if similarity is VectorSimilarity.euclidean else 1)
