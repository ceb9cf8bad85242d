"""What goes into a loss and what comes out: BatchInfo, LossOutput, and Loss itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from embedtrain.config.losses import Similarity
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.errors import ConfigError
from embedtrain.losses.encoded import Encoded

# The key of `BatchInfo.guides` for a teacher's vectors that the rows themselves carry.
FROM_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Guide:
    """Another model's vectors of the same texts, without gradient."""

    queries: Tensor  # float32 [B, T]
    documents: Tensor  # float32 [M, T]
    similarity: Similarity = Similarity.cosine  # of the other model

    def comparable(self) -> "Guide":
        """Vectors whose inner products are the model's similarities: of length 1 for the cosine."""
        if self.similarity is Similarity.dot:
            return self
        return self.map_tensors(lambda vectors: F.normalize(vectors, dim=1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Guide":
        """A copy with `change` applied to all tensors."""
        return replace(self, queries=change(self.queries), documents=change(self.documents))


class Sizes(NamedTuple):
    """The rows of each text of all ranks in one part of the encodings, in host memory; None: one row each."""

    queries: NDArray[np.int64] | None = None  # [N]
    documents: NDArray[np.int64] | None = None  # [K]


class Counts(NamedTuple):
    """The number of queries and of documents of each rank."""

    queries: list[int]
    documents: list[int]


def rows_per_rank(sizes: NDArray[np.int64] | None, counts: Sequence[int]) -> list[int]:
    """The rows of each rank's texts, of which each rank has `counts`, in a part with these `sizes` of texts."""
    if sizes is None:
        return list(counts)
    before = np.concatenate([[0], np.cumsum(sizes)])
    ends = np.cumsum(counts)
    return (before[ends] - before[ends - counts]).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class GlobalRows:
    """The rows of all ranks, in host memory: N queries and K documents, those of rank 0 first.

    Every rank has them before the step, so that losses ask neither other ranks nor the device for sizes and duplicates.
    """

    rank: int  # this one
    num_rows: Sequence[int]  # of each rank
    num_documents: NDArray[np.int64]  # [N], of each row
    query_keys: NDArray[np.int64]  # [N], as in `BatchInfo`
    document_keys: NDArray[np.int64]  # [K]
    # [E, 2], keys of a query and of a document that answers it, besides those of the rows' positives.
    known_answers: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    sizes: tuple[Sizes, ...] = (Sizes(),)  # of each part

    @cached_property
    def counts(self) -> Counts:
        """Queries and documents of each rank."""
        ends = np.cumsum(self.num_rows)
        before = np.concatenate([[0], np.cumsum(self.num_documents)])  # documents before each row
        return Counts(list(self.num_rows), (before[ends] - before[ends - self.num_rows]).tolist())

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """[N], index of each query's positive among the documents of all ranks."""
        return np.cumsum(self.num_documents) - self.num_documents

    def counts_with(self, num_documents: int) -> list[int]:
        """The number of each rank's rows that have at least so many documents."""
        before = np.concatenate([[0], np.cumsum(self.num_documents >= num_documents)])
        ends = np.cumsum(self.num_rows)
        return (before[ends] - before[ends - self.num_rows]).tolist()  # type: ignore[no-any-return]

    @property
    def part_sizes(self) -> Sizes:
        """The sizes of encodings of one part."""
        (sizes,) = self.sizes
        return sizes

    @property
    def num_negatives(self) -> int:
        """The hard negatives of all rows."""
        return len(self.document_keys) - int(np.count_nonzero(self.num_documents))

    @property
    def local_rows(self) -> range:
        """This rank's rows."""
        first = sum(self.num_rows[: self.rank])
        return range(first, first + self.num_rows[self.rank])

    @property
    def local_documents(self) -> range:
        """This rank's documents."""
        first = sum(self.counts.documents[: self.rank])
        return range(first, first + self.counts.documents[self.rank])

    @property
    def local_num_documents(self) -> NDArray[np.int64]:
        """[B], of each row of this rank."""
        return self.num_documents[self.local_rows.start : self.local_rows.stop]

    @property
    def local_positives(self) -> NDArray[np.int64]:
        """[B], index of each query's positive among this rank's documents."""
        return np.cumsum(self.local_num_documents) - self.local_num_documents

    @classmethod
    def gather(cls, owners: Tensor, query_keys: Tensor, document_keys: Tensor) -> "GlobalRows":
        """Of the ranks' columns as in `BatchInfo`. A collective that waits for the device."""
        counts = [row_counts(len(keys), keys.device) for keys in (query_keys, document_keys)]
        num_documents = torch.bincount(owners, minlength=len(query_keys))
        columns = (num_documents, counts[0]), (query_keys, counts[0]), (document_keys, counts[1])
        gathered = [gather_rows(column, number).cpu().numpy() for column, number in columns]
        return cls(
            rank=dist.get_rank(),
            num_rows=counts[0],
            num_documents=gathered[0],
            query_keys=gathered[1],
            document_keys=gathered[2],
        )


class Prepared(Protocol):
    """What a loss computes in advance on the host."""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to all tensors."""
        ...


class Origin(NamedTuple):
    """Where the vectors that a loss compares come from; the same on every rank."""

    batch: int = 0  # the number of the global batch since the start of the run
    source: int = 0  # the training source of all rows, if batches are made by source
    layer: int | None = None  # the number of layers of the encoder that computed the vectors; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """What a loss needs besides embeddings. B queries and M documents on this rank; either may be 0.

    A query's first document is its positive, the others are its hard negatives. A document without id has the key of
    its text as id. A column that one rank has, every rank has, with as many values as it has rows.
    """

    owners: Tensor  # int64 [M], ascending: the index on this rank of the query that a document belongs to
    query_keys: Tensor  # int64 [B], equal exactly where the texts of two queries are equal
    document_keys: Tensor  # int64 [M], the same for documents
    document_ids: Tensor | None = None  # int64 [M], equal exactly where two ids are equal; None: no document has an id
    scores: Tensor | None = None  # float32 [M], relevance of a document to its query, by annotators or a teacher
    labels: Tensor | None = None  # int64 [B], classes of the rows
    guides: Mapping[str, Guide] = field(default_factory=dict)  # by the path of the model, or FROM_ROWS
    origin: Origin = field(default_factory=Origin)
    global_rows: GlobalRows | None = None  # None: the ranks exchange them when the loss is called, see `complete`
    prepared: Mapping[Hashable, Prepared] = field(default_factory=dict)  # by `Loss.prepare`

    @property
    def num_queries(self) -> int:
        """B."""
        return len(self.query_keys)

    @property
    def positives(self) -> Tensor:
        """Int64 [B], index of each query's positive among this rank's documents. Every query must have a document."""
        return torch.searchsorted(self.owners, torch.arange(len(self.query_keys), device=self.owners.device))

    @property
    def rows(self) -> GlobalRows:
        """The rows of all ranks; `complete` makes sure that they are known."""
        assert self.global_rows is not None, "call the loss itself, not its forward method"
        return self.global_rows

    @property
    def negatives(self) -> Tensor:
        """Int64, ascending: this rank's hard negatives, all but the first document of each query."""
        starts = torch.searchsorted(self.owners, self.owners)
        is_positive = starts == torch.arange(len(self.owners), device=self.owners.device)
        # The host knows their number, so a sort finds them; `nonzero` would wait for the device.
        num_positives = int(np.count_nonzero(self.rows.local_num_documents))
        return is_positive.to(torch.uint8).argsort(stable=True)[: len(self.owners) - num_positives]

    def complete(self) -> "BatchInfo":
        """The same with `global_rows`, and with ids on every rank if any rank has them.

        A collective that waits for the device, unless `global_rows` are known. The trainer knows them.
        """
        if self.global_rows is not None:
            return self
        rows = GlobalRows.gather(self.owners, self.query_keys, self.document_keys)
        ids = self.document_ids
        if any(row_counts(int(ids is not None), self.owners.device)) and ids is None:
            ids = self.document_keys
        return replace(self, global_rows=rows, document_ids=ids)

    def to(self, device: torch.device) -> "BatchInfo":
        """A copy with all tensors on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "BatchInfo":
        """A copy with `change` applied to all tensors."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        guides = {name: guide.map_tensors(change) for name, guide in self.guides.items()}
        prepared = {key: value.map_tensors(change) for key, value in self.prepared.items()}
        return replace(self, guides=guides, prepared=prepared, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its metrics, which are this rank's parts of means over the rows of the global batch.

    The loss is the sum of the ranks' parts, and so is its gradient. `row_losses` are the parts of this rank's rows,
    which sum to `local_loss`; None for a loss that is no sum over rows.
    """

    local_loss: Tensor  # scalar, with a graph on every rank, even without rows
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached scalars; the same names on every rank
    row_losses: Tensor | None = None  # [B], detached


class Loss(nn.Module, ABC):
    """A function of embeddings and of the batch's other columns; it never holds a model.

    It runs its own collectives, so every rank calls it, with or without rows. Its parameters (a temperature, a
    projection) are unsharded and equal on all ranks. The trainer multiplies each rank's part of the loss by W and
    averages the gradients over the W ranks, which gives the sum of the gradients of the parts.

    It reads nothing from the device, since the host would wait for all work that is queued there: sizes follow from
    `BatchInfo.global_rows`.
    """

    def __call__(self, queries: Tensor | Encoded, documents: Tensor | Encoded, batch_info: BatchInfo) -> LossOutput:
        """`forward`, after an exchange of `batch_info.global_rows` if they are not known."""
        output = super().__call__(*self._inputs(queries, documents), batch_info.complete())
        if not isinstance(output, LossOutput):
            raise ConfigError(f"{type(self).__name__}.forward must return a LossOutput, not {type(output).__name__}")
        return output

    def _inputs(self, *encoded: Tensor | Encoded) -> list[Any]:
        """What `forward` takes: vectors."""
        return [part if isinstance(part, Tensor) else part.vectors for part in encoded]

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the host can compute for `BatchInfo.prepared` before there are embeddings; callable from any thread.

        `dimension` is that of the embeddings. What is not prepared, the loss computes when it is called.
        """
        return {}

    def for_source(self, source: int) -> "Loss":
        """The loss of this training source's rows: itself, unless sources have losses of their own."""
        return self

    @abstractmethod
    def forward(self, queries: Any, documents: Any, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D], float32 or float64 tensors, to this rank's loss."""


class EncodedLoss(Loss):
    """A loss of any kind of model: a function of scores, or of other losses."""

    def _inputs(self, *encoded: Tensor | Encoded) -> list[Any]:
        return [Encoded.of(part) if isinstance(part, Tensor) else part for part in encoded]

    @abstractmethod
    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss. A cross-encoder encodes no queries."""


@dataclass(frozen=True, slots=True)
class RowSources:
    """Which source each of this rank's B rows is of. In `BatchInfo.prepared` under this class."""

    sources: Sequence[int]  # those that the global batch has rows of
    indices: Tensor  # int64 [B], index in `sources` of each row's
    scales: Tensor  # float64 [B], rows of the global batch per row of its source

    @classmethod
    def of(cls, row_sources: NDArray[np.int64], rank: int, size: int) -> Self:
        """From the source of each row of the global batch, [N]."""
        sources, indices, counts = np.unique(row_sources, return_inverse=True, return_counts=True)
        local = indices[rank::size]
        return cls(sources.tolist(), torch.from_numpy(local), torch.from_numpy(len(row_sources) / counts[local]))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to all tensors."""
        return replace(self, indices=change(self.indices), scales=change(self.scales))

    def local_losses(self, row_losses: Tensor) -> dict[int, Tensor]:
        """By source, this rank's part of the mean over its rows, from `LossOutput.row_losses` [B]."""
        sums = self.scales.new_zeros(len(self.sources)).index_add_(0, self.indices, row_losses.double() * self.scales)
        return dict(zip(self.sources, sums.unbind(), strict=True))
