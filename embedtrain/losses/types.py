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
    """Another model's vectors of the same texts, without gradient.

    Attributes:
        queries: float32 [B, T].
        documents: float32 [M, T].
    """

    queries: Tensor
    documents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """What a loss needs besides embeddings. B queries and M documents on this rank; either may be 0.

    Attributes:
        owners: int64 [M], ascending: the index of the query that a document belongs to, on this rank. A query's first
            document is its positive, the others are its hard negatives.
        query_keys: int64 [B], equal exactly where the texts of two queries are equal.
        document_keys: int64 [M], the same for documents.
        document_ids: int64 [M], equal exactly where the ids of two documents are equal; a document without id has the
            key of its text. None if no document has an id.
        scores: float32 [M], the relevance of a document to its query, by annotators or by a teacher; None if rows have
            no scores.
        labels: int64 [B], the classes of the rows; None if they have none.
        guides: other models' vectors, by the path of the model; FROM_ROWS for vectors that came with the rows.
        seed: a number that is the same on every rank and differs from step to step.
        source: the training source of all rows, if batches are made by source.
    """

    owners: Tensor
    query_keys: Tensor
    document_keys: Tensor
    document_ids: Tensor | None = None
    scores: Tensor | None = None
    labels: Tensor | None = None
    guides: Mapping[str, Guide] = field(default_factory=dict)
    seed: int = 0
    source: int = 0

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
        return replace(self, guides=guides, **tensors)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its metrics.

    Attributes:
        local_loss: scalar, this rank's part of the mean over the rows of the global batch. The loss is the sum of the
            ranks' parts, and so is its gradient. It has a graph on every rank, even without rows.
        metrics: detached scalars to log, this rank's parts of means as well; the same names on every rank.
    """

    local_loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Loss(nn.Module, ABC):
    """A function of embeddings and of the batch's other columns; it never holds a model.

    It runs its own collectives, so every rank calls it, with or without rows. Its parameters (a temperature, a
    projection) are whole on every rank and equal on all; the trainer sums their gradients over the ranks.
    """

    def for_source(self, source: int) -> "Loss":
        """The loss of this training source's rows: itself, unless sources have losses of their own."""
        return self

    @abstractmethod
    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D], float32 or float64, to this rank's loss."""
