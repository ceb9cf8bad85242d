"""How texts are compared by their representations: what depends on the kind of a model in search and evaluation.

Shapes: T queries, n documents of this rank, t of them in a tile, P pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.errors import ConfigError
from embedtrain.losses.encoded import Part


class Tile(Protocol):
    """Some of the documents, on the device."""

    def __len__(self) -> int: ...

    def scores(self, queries: Part) -> Tensor:
        """Approximate scores, float32 [T, t]; of an exact store, int32 and exact.

        An exact score exceeds that of a tile by at most `rounding_error`, and is below it by at most `deficit`.
        """
        ...


class DocumentStore(ABC):
    """The documents of a rank, numbered from 0 in the order in which they were added.

    Attributes:
        is_exact: whether all scores are integers, int32, and those of tiles are exact.
    """

    is_exact: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number n of documents."""

    def viewed(self, comparison: "Comparison") -> "DocumentStore":
        """The same documents, for one of the views of their comparison; only stores of comparisons with views."""
        raise NotImplementedError

    @abstractmethod
    def add(self, documents: Part) -> None:
        """Add documents."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[int, Tile]]:
        """The number of each tile's first document, and the tile."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """All documents: their numbers, int64 on the CPU, and their representations as float32 on the device."""

    @abstractmethod
    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Scores of pairs (query, document), int64 [P] each: float32 [P], a function of the two texts alone."""

    @property
    def score_dtype(self) -> torch.dtype:
        """The type of exact scores."""
        return torch.int32 if self.is_exact else torch.float32

    @abstractmethod
    def rounding_error(self, queries: Part) -> Tensor:
        """Bound, float64 [T], on how far an exact score may be above that of a tile."""

    def deficit(self, queries: Part, documents: Tensor) -> Tensor:
        """Bound, float64 [T, C] or [T, 1], on how far an exact score may be below that of a tile.

        `documents`, int64 [T, C] or [1, C] on the device, are numbers of documents.
        """
        return self.rounding_error(queries).unsqueeze(1)

    def candidate_limit(self, k: int) -> int:
        """The candidates that a search collects for the best `k`, more than rounding makes necessary."""
        return k + 32


class Comparison(ABC):
    """How two texts are compared. All results are bit-identical for any batching of texts and any number of ranks.

    Attributes:
        name: of this similarity in sentence-transformers.
        is_symmetric: whether two texts are compared without saying which one is the query.
        max_chunks_per_block: chunks whose representations a rank holds on its device before they are stored.
    """

    name: str
    is_symmetric: bool
    max_chunks_per_block: int = 16

    @property
    def views(self) -> Mapping[str, "Comparison"]:
        """Comparisons of the same representations by other scores, which are measured besides: none by default."""
        return {}

    @abstractmethod
    def prepare(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """What an index and queries hold of the rows [R, D] of an encoder, or of their first dimensions."""

    def prepared(self, part: Part) -> Part:
        """The texts of an encoder as queries of an index."""
        return part.with_values(self.prepare(part.values))

    @abstractmethod
    def similarities(self, first: Part, second: Part) -> Tensor:
        """Scores of n pairs of texts as the encoder returns them: float32 [n] on the CPU."""

    @abstractmethod
    def store(self, config: IndexConfig, device: torch.device, expected: int) -> DocumentStore:
        """An empty store of an index; `expected` is the final number of documents on this rank.

        Raises ConfigError if the index stores vectors in a way that this comparison cannot.
        """


def require_kept_in_memory(config: IndexConfig, kind: str) -> None:
    """Raise ConfigError for what only an index of one vector per text has; `kind` describes the model."""
    if config.scan_dtype is not None:
        value = config.scan_dtype.value
        raise ConfigError(f"index.scan_dtype={value}: a {kind} is searched without a copy; leave it out")
    if config.place is VectorPlacement.disk:
        raise ConfigError(f"index.place=disk: the vectors of a {kind} are kept in memory; write auto, device or host")
