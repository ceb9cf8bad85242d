"""How two texts compare, in training and in search. Losses and indices read texts through `Score` alone.

B, M: queries and documents of this rank; c, t: anchors and candidates of one tile; R: rows of a part; D: dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.config.losses import VECTOR_TEMPERATURE, VECTOR_TEMPERATURE_BOUNDS, Similarity
from embedtrain.errors import ModelError
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.similarity import at_least_float32, rounding_tolerance
from embedtrain.losses.types import BatchInfo

if TYPE_CHECKING:
    from embedtrain.inference.store import DocumentStore


# Names of representations in sentence-transformers (`output_value`), and that of the weights of tokens.
SENTENCE_EMBEDDING, TOKEN_EMBEDDINGS, LEXICAL_WEIGHTS = "sentence_embedding", "token_embeddings", "lexical_weights"
# Inner products of one block of texts with several rows, in training: what fits a CPU's caches, 256 MiB of float32 on a
# GPU, where a block of 16 MiB would hold one page of 1,000 rows for 4,096 rows of queries.
BLOCK_CELLS_CPU, BLOCK_CELLS_GPU = 1 << 22, 1 << 26


class Columns(Protocol):
    """Candidates in the form in which anchors are compared with them; one column of scores each."""

    @property
    def values(self) -> Tensor:
        """[R, D]."""
        ...

    def __len__(self) -> int: ...


class ScoreTile(ABC):
    """The scores of c anchors and t candidates, and the way of their gradient back to the rows of both."""

    @abstractmethod
    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores times `scale`, [c, t]. Differentiable, except with the buffer `out`, to which they are written."""

    @abstractmethod
    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """Add the gradient of the anchors' rows [R, D]: that of the scores [c, t], row i multiplied by weights[i]."""

    @abstractmethod
    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        """Add the gradient of the candidates' rows [R, D] likewise."""


class Score(ABC):
    """The score of a query and a document, from what the encoder computes of them.

    In training, scores are differentiable, in float32 or float64: `prepare` and `compare`, and the tiles of a
    `TiledScore`. In search they are a function of the two texts alone, bit-identical for any batching of texts and any
    number of ranks: `search_rows`, `exact` and `store`. A score that is only trained with has no methods of search.

    Attributes:
        default_temperature: divides scores in a softmax over documents, where a loss leaves it to the score.
        temperature_bounds: those of a trained temperature, likewise.
        kind: of model whose texts it compares, for messages; empty for one vector of each text.
        one_vector: whether a text has one vector, which losses of vectors need.
        named_by_loss: whether each loss chooses the score by its option `similarity`.
        name: of this similarity in sentence-transformers.
        is_symmetric: whether two texts are compared without saying which one is the query.
        max_chunks_per_block: chunks whose representations a rank holds on its device before they are stored.
    """

    default_temperature = 1.0
    temperature_bounds: Sequence[float] = VECTOR_TEMPERATURE_BOUNDS
    kind: str = ""
    one_vector: bool = False
    named_by_loss: bool = False
    name: str
    is_symmetric: bool = False
    max_chunks_per_block: int = 16
    pools_tokens: bool = False

    def pairs(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> Tensor:
        """The score of each document and its query: [M], float32 or float64, differentiable."""
        counts = batch_info.rows.local_num_documents
        return self.compare(self.prepare(queries), self.prepare(documents), batch_info.owners, counts)

    @abstractmethod
    def prepare(self, encoded: Encoded) -> Part:
        """The rows that `compare` and `tile` take, in float32 or float64; differentiable."""

    @abstractmethod
    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """`pairs` of prepared texts.

        `owners`, int64 [M], is the index of the query that a document belongs to, and `counts` [B] are the documents of
        each query, for the host.
        """

    @property
    def views(self) -> "Mapping[str, Score]":
        """Scores of the same representations, which are measured besides: none by default."""
        return {}

    def outputs(self, part: Part) -> dict[str, Part]:
        """The representations by their names in sentence-transformers, the main one first."""
        return {SENTENCE_EMBEDDING if part.sizes is None else TOKEN_EMBEDDINGS: part}

    def _without_search(self) -> ModelError:
        return ModelError(
            f"{type(self).__name__} compares texts in training only: it has no search_rows, exact and store, so its "
            "model is neither evaluated nor searched with; docs/extending.md has a kind of model that is"
        )

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """What an index and queries hold of the rows [R, D] of an encoder, or of their first dimensions."""
        raise self._without_search()

    def search_part(self, part: Part) -> Part:
        """The texts of an encoder as queries of an index."""
        return part.with_values(self.search_rows(part.values))

    def document_part(self, part: Part, token_pooling: float = 1.0) -> Part:
        """The texts of an encoder as documents of an index; with `token_pooling`, fewer vectors of each."""
        return part.with_values(self.search_rows(part.values))

    def exact(self, first: Part, second: Part) -> Tensor:
        """Scores of n pairs of texts as the encoder returns them: float32 [n] on the CPU."""
        raise self._without_search()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> "DocumentStore":
        """An empty store of an index; `expected` is the final number of documents on this rank.

        Raises ConfigError if the index stores vectors in a way that this score cannot.
        """
        raise self._without_search()


class TiledScore(Score):
    """A score by which all queries and all documents of a batch can be compared, tile by tile."""

    @abstractmethod
    def columns(self, candidates: Part) -> Columns:
        """Prepared texts as candidates; differentiable."""

    @abstractmethod
    def tile(self, anchors: Part, columns: Columns) -> ScoreTile:
        """A tile of these anchors and candidates."""

    @abstractmethod
    def rounding(self, queries: Part, documents: Part) -> Tensor:
        """How far two computations of the score of each query and its document may differ, [B]; see `VectorScore`."""


class VectorScore(TiledScore):
    """The similarity of one vector of the query and one of the document."""

    default_temperature = VECTOR_TEMPERATURE
    one_vector = True

    def __init__(self, similarity: Similarity | None) -> None:
        self.similarity = similarity or Similarity.cosine

    def prepare(self, encoded: Encoded) -> Part:
        """The vectors, of length 1 for the cosine."""
        vectors = at_least_float32(encoded.vectors)
        return Part(F.normalize(vectors, dim=1) if self.similarity is Similarity.cosine else vectors)

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """Inner products of [B, D] and [M, D]: [M]."""
        return (queries.values[owners] * documents.values).sum(dim=1)

    def columns(self, candidates: Part) -> Part:
        """The candidates as they are."""
        return candidates

    def tile(self, anchors: Part, columns: Columns) -> ScoreTile:
        """Inner products."""
        return _VectorTile(anchors.values, columns.values)

    def rounding(self, queries: Part, documents: Part) -> Tensor:
        """Comparisons of scores leave this margin.

        A document whose vector equals the positive's has to be treated alike in every precision, by every kernel and on
        every rank, instead of by rounding errors.
        """
        norms: Tensor = queries.values.norm(dim=1) * documents.values.norm(dim=1)
        return rounding_tolerance(queries.values) * norms


class _VectorTile(ScoreTile):
    def __init__(self, anchors: Tensor, candidates: Tensor) -> None:
        self.anchors, self.candidates = anchors, candidates

    def scores(self, scale: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(self.anchors * scale, self.candidates.T, out=out)

    def add_anchor_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        grads.addcmul_(tile_grads @ self.candidates, weights)

    def add_candidate_grads(self, grads: Tensor, tile_grads: Tensor, weights: Tensor) -> None:
        grads.addmm_(tile_grads.T, self.anchors * weights)


class PairScore(Score):
    """The scores themselves, which a cross-encoder computes: it encodes no queries, and its documents are pairs."""

    one_vector = True

    def prepare(self, encoded: Encoded) -> Part:
        """The scores [N, 1]."""
        return Part(at_least_float32(encoded.vectors))

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """The scores [M, 1] as [M]."""
        return documents.values.squeeze(1)
