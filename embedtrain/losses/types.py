"""What goes into a loss and what comes out: BatchInfo, LossOutput, and Loss itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor, nn

# The key of `BatchInfo.guides` for a teacher's vectors that the rows themselves carry.
FROM_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Guide:
    """Another model's vectors of the same texts, without gradient."""

    queries: Tensor  # float32 [B, T]
    documents: Tensor  # float32 [M, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """What a loss needs besides embeddings. B queries and M documents on this rank; either may be 0.

    A query's first document is its positive, the others are its hard negatives. A document without id has the key of
    its text as id.
    """

    owners: Tensor  # int64 [M], ascending: the index on this rank of the query that a document belongs to
    query_keys: Tensor  # int64 [B], equal exactly where the texts of two queries are equal
    document_keys: Tensor  # int64 [M], the same for documents
    document_ids: Tensor | None = None  # int64 [M], equal exactly where two ids are equal; None: no document has an id
    scores: Tensor | None = None  # float32 [M], relevance of a document to its query, by annotators or a teacher
    labels: Tensor | None = None  # int64 [B], classes of the rows
    guides: Mapping[str, Guide] = field(default_factory=dict)  # by the path of the model, or FROM_ROWS
    seed: int = 0  # the same on every rank, different from step to step
    source: int = 0  # the training source of all rows, if batches are made by source

    @property
    def positives(self) -> Tensor:
        """Int64 [B], index of each query's positive among this rank's documents. Every query must have a document."""
        return torch.searchsorted(self.owners, torch.arange(len(self.query_keys), device=self.owners.device))

    def to(self, device: torch.device) -> "BatchInfo":
        """A copy with all tensors on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "BatchInfo":
        """A copy with `change` applied to all tensors."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        guides = {name: Guide(change(guide.queries), change(guide.documents)) for name, guide in self.guides.items()}
        return replace(self, guides=guides, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its metrics, which are this rank's parts of means over the rows of the global batch.

    The loss is the sum of the ranks' parts, and so is its gradient.
    """

    local_loss: Tensor  # scalar, with a graph on every rank, even without rows
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached scalars; the same names on every rank


class Loss(nn.Module, ABC):
    """A function of embeddings and of the batch's other columns; it never holds a model.

    It runs its own collectives, so every rank calls it, with or without rows. Its parameters (a temperature, a
    projection) are unsharded and equal on all ranks. The trainer multiplies each rank's part of the loss by W and
    averages the gradients over the W ranks, which gives the sum of the gradients of the parts.
    """

    def for_source(self, source: int) -> "Loss":
        """The loss of this training source's rows: itself, unless sources have losses of their own."""
        return self

    @abstractmethod
    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D], float32 or float64, to this rank's loss."""
