"""A score for new kinds of models: two functions of texts give what training and search need.

`matrix` compares all texts with all, which torch differentiates and a search reads first; `exact` compares pairs, with
the same bits in any batch. Kinds of the package compute the same with less memory.

c, t: anchors and candidates; B, M: queries and documents of this rank; R: rows; T: queries of a search; P: pairs.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.config.losses import VECTOR_TEMPERATURE
from embedtrain.inference.exact import norms
from embedtrain.inference.store import TILE, DocumentStore, DocumentTile, require_no_copy
from embedtrain.inference.vectors import require_no_fp16
from embedtrain.losses.encoded import Encoded, Part, concatenate
from embedtrain.losses.score import Columns, ScoreTile, TiledScore
from embedtrain.losses.similarity import at_least_float32, rounding_tolerance


class MatrixScore(TiledScore):
    """A score of which a kind defines `matrix`, `exact`, `name` and `kind`; the rows of texts are those of the encoder.

    A score is a sum of inner products of rows of the query with rows of the document, at most one for each row of the
    query, such as a maximum over rows: this bounds its rounding error.
    """

    default_temperature = VECTOR_TEMPERATURE  # as that of a `Kind`

    @abstractmethod
    def matrix(self, anchors: Part, candidates: Part) -> Tensor:
        """The score of each anchor with each candidate: [c, t], differentiable, in the type of the rows."""

    @abstractmethod
    def exact(self, first: Part, second: Part) -> Tensor:
        """The score of each of the first texts with the second of the same index: float32 [P] on the CPU.

        A function of the two texts alone: `inference/exact.py` has inner products whose bits no batch changes.
        """

    def prepare(self, encoded: Encoded) -> Part:
        """The rows as they are."""
        (part,) = encoded.parts
        return Part(at_least_float32(part.values), part.sizes)

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """Cells of the matrix."""
        if not len(documents):  # without queries there are no documents, and the graph remains
            return queries.values.sum(dim=1)[:0] + documents.values.sum(dim=1)[:0]
        return self.matrix(queries, documents)[owners, torch.arange(len(documents), device=owners.device)]

    def columns(self, candidates: Part) -> Columns:
        """The candidates as they are."""
        return candidates

    def tile(self, anchors: Part, columns: Columns) -> ScoreTile:
        """A part of the matrix."""
        assert isinstance(columns, Part)
        return _DifferentiatedTile(self, anchors, columns)

    def rounding(self, queries: Part, documents: Part) -> Tensor:
        """That of inner products, summed over the rows of the query."""
        longest = documents.values.norm(dim=1).amax() if len(documents.values) else queries.values.new_ones(())
        bound: Tensor = rounding_tolerance(queries.values) * _sums(queries.values.norm(dim=1), queries) * longest
        return bound

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The rows as they are, or their first dimensions."""
        return values[:, :dimension].float()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "MatrixStore":
        """A store on the device."""
        require_no_copy(config, f"model of model.kind={self.kind}")
        require_no_fp16(config, self.name)
        return MatrixStore(self, device)


class _DifferentiatedTile(ScoreTile):
    """The matrix of c anchors and t candidates, differentiated by torch."""

    def __init__(self, score: MatrixScore, anchors: Part, candidates: Part) -> None:
        self._score, self._anchors, self._candidates = score, anchors, candidates

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return self._matrix(self._anchors, self._candidates) * scale
        self._rows, self._columns = (
            part.values.detach().requires_grad_() for part in (self._anchors, self._candidates)
        )
        with torch.enable_grad():
            parts = self._anchors.with_values(self._rows), self._candidates.with_values(self._columns)
            self._computed = self._matrix(*parts)
        return torch.mul(self._computed.detach(), scale, out=out)

    def _matrix(self, anchors: Part, candidates: Part) -> Tensor:
        if len(anchors) and len(candidates):
            return self._score.matrix(anchors, candidates)
        return anchors.values.new_zeros(len(anchors), len(candidates)) + 0 * (
            anchors.values.sum() + candidates.values.sum()
        )

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        self._add(grads, self._rows, tile_grads * weights)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        self._add(grads, self._columns, tile_grads * weights)

    def _add(self, grads: Tensor, values: Tensor, tile_grads: Tensor) -> None:
        (own,) = torch.autograd.grad(self._computed, values, tile_grads, retain_graph=True)
        grads += own


class MatrixStore(DocumentStore):
    """Documents of a `MatrixScore`, as float32 on the device."""

    def __init__(self, score: MatrixScore, device: torch.device) -> None:
        self._score, self._device = score, device
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, documents: Part) -> None:
        """Add documents."""
        if len(documents):
            self._parts.append(documents.to(self._device, torch.float32))

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """All documents, in the order in which they were added."""
        for start in range(0, len(self), TILE):
            yield start, _MatrixTile(self._score, self._all().slice(start, min(start + TILE, len(self))))

    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """The same as one part."""
        if len(self):
            yield torch.arange(len(self)), self._all()

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Those of `MatrixScore.exact`."""
        scores = torch.zeros(len(rows), device=self._device)
        for chosen in torch.arange(len(rows), device=self._device).split(TILE):
            first, second = (
                part.take(index[chosen], index[chosen].cpu().numpy())
                for part, index in ((queries, rows), (self._all(), documents))
            )
            scores[chosen] = self._score.exact(first, second).to(self._device)
        return scores

    def rounding_error(self, queries: Part) -> Tensor:
        """Of inner products see `VectorStore`; a sum of n terms adds n u times the sum of their magnitudes."""
        unit = torch.finfo(torch.float32).eps / 2
        longest = norms(self._all().values).max() if len(self) else 1.0
        terms = queries.values.shape[1] + 16 + queries.max_size
        bound: Tensor = terms * unit * longest * _sums(norms(queries.values), queries)
        return bound

    def _all(self) -> Part:
        if len(self._parts) > 1:
            self._parts = [concatenate(self._parts)]
        return self._parts[0]


@dataclass(frozen=True, slots=True)
class _MatrixTile(DocumentTile):
    score: MatrixScore
    documents: Part

    def __len__(self) -> int:
        return len(self.documents)

    def scores(self, queries: Part) -> Tensor:
        return self.score.matrix(queries, self.documents)


def _sums(values: Tensor, part: Part) -> Tensor:
    """Sums over the rows of each text: [R] to [N]."""
    texts = part.per_row(torch.arange(len(part), device=values.device))
    return values.new_zeros(len(part)).index_add_(0, texts, values)
