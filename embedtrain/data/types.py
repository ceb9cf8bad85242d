"""The types that flow from files to the encoder: Texts, Example, Row, GlobalBatch, Tokens."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Texts:
    """One row as a layout reads it, checked: no text is empty, no negative is a positive or repeated.

    What lies beside the texts is as in Example.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    num_dropped: int  # negatives left out because they equal a positive or another negative
    positive_scores: tuple[float, ...] = ()
    negative_scores: tuple[float, ...] = ()
    positive_ids: tuple[str, ...] = ()
    negative_ids: tuple[str, ...] = ()
    label: int | None = None
    vectors: tuple[Sequence[float], ...] = ()
    instruction: str | None = None
    document_instruction: str | None = None
    most_negatives: int | None = None

    def scaled(self, by: float) -> "Texts":
        """The same with its scores divided by `by`."""
        if by == 1.0 or not self.positive_scores:
            return self
        positives, negatives = (
            tuple(score / by for score in scores) for scores in (self.positive_scores, self.negative_scores)
        )
        return replace(self, positive_scores=positives, negative_scores=negatives)


@dataclass(frozen=True, slots=True)
class Example:
    """One training row as every reader yields it: texts without prompts.

    Attributes:
        query: the query, or the only text of a row that has no documents.
        positives: at least one, unless the loss needs no documents.
        negatives: hard negatives.
        source: the index in `data.train` of where it came from.
        file: the file's path or the Hub id.
        line: its line or row number there, counted from 1.
        positive_scores: one for each positive, in float32; empty where the row has no scores.
        negative_scores: likewise; a row has both or neither.
        positive_ids: one for each positive, "" for one that has none; empty where the row names none.
        negative_ids: likewise, of its own.
        label: the row's class.
        vectors: a teacher's, in float32: one that stands for all texts, or one for each in the order query,
            positives, negatives; empty where the row has none.
        instruction: the row's own for its query, instead of the source's prompt; "" is none; None where the row
            says nothing.
        document_instruction: likewise, for all its documents.
        most_negatives: hard negatives that may be used of the row at a time, if it says so.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    source: int
    file: str
    line: int
    positive_scores: tuple[float, ...] = ()
    negative_scores: tuple[float, ...] = ()
    positive_ids: tuple[str, ...] = ()
    negative_ids: tuple[str, ...] = ()
    label: int | None = None
    vectors: tuple[Sequence[float], ...] = ()
    instruction: str | None = None
    document_instruction: str | None = None
    most_negatives: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What one step uses of an Example: texts without prompts, one positive, and the negatives that are drawn."""

    query: str
    documents: tuple[str, ...]  # the positive first, then the hard negatives; none in a row of one text
    scores: tuple[float, ...] = ()  # one for each document, or empty
    ids: tuple[str, ...] = ()  # one for each document, "" for one that has none; or empty
    label: int | None = None
    vectors: tuple[Sequence[float], ...] = ()  # a teacher's: the query's, then each document's; or empty
    source: int = 0  # which of `data.train`


class BatchTokens(Protocol):
    """The tokens of a global batch's texts, where they are kept: all B queries, then all documents, row by row.

    Attributes:
        num_documents: int64 [B], of each row.
        lengths: int64 [T], tokens of each text.
        keys: int64 [T], equal exactly where two texts without prompts are equal, in any process.
    """

    num_documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.int64]

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens of these texts, one after the other; what TextTokenizer.ids gives."""
        ...


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one step over all ranks, in an order that does not depend on the number of ranks.

    Attributes:
        step: counted from 0.
        rows: may make its elements when they are asked for, so that a rank pays for its share alone.
        source: the source that all rows are of, where batches are made so.
        tokens: of all texts; None until the data is tokenised.
        beside: whether rows hold more than texts: scores, ids, labels or vectors.
    """

    step: int
    rows: Sequence[Row]
    source: int | None = None
    tokens: BatchTokens | None = None
    beside: bool = True

    def share(self, rank: int, size: int) -> tuple[Row, ...]:
        """The rows that rank `rank` of `size` works on: every `size`-th, so shares differ by one at most."""
        return tuple(self.rows[rank::size])


class Packing:
    """Where texts lie that stand one after another in one row, without padding. N texts, T tokens.

    Not a dataclass: what is compiled looks into those, and would be compiled anew for every batch.

    Attributes:
        lengths: tokens of each text, at least one: [N].
        starts: int32 [N + 1], where each begins, and the end.
        positions: int64 [1, T], each token's place in its own text, from 0.
    """

    __slots__ = ("lengths", "positions", "starts")

    def __init__(self, lengths: tuple[int, ...], starts: Tensor, positions: Tensor) -> None:
        self.lengths, self.starts, self.positions = lengths, starts, positions

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours of equal length: how many texts, and their length."""
        return [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Packing":
        """The same with its tensors changed."""
        return Packing(self.lengths, change(self.starts), change(self.positions))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts ready for the encoder: N texts padded to L tokens, or packed into one row of T = L tokens.

    Attributes:
        ids: int64 [N, L], or [1, T].
        mask: the same shape, 1 where a token is real. Padding may be on either side.
        rows: where each text stood in the list it was made from; -1 is a dummy whose vector is dropped.
        pooled: the same shape, 1 where a token counts in its text's vector; None: all real ones do.
        packing: where the texts of a packed chunk lie; None: they are padded.
    """

    ids: Tensor
    mask: Tensor
    rows: tuple[int, ...]
    pooled: Tensor | None = None
    packing: Packing | None = None

    @property
    def inputs(self) -> tuple[Tensor | Packing | None, ...]:
        """What the encoder is called with: ids, mask and pooled, and the packing of a packed chunk."""
        padded = (self.ids, self.mask, self.pooled)
        return padded if self.packing is None else (*padded, self.packing)

    def to(self, device: torch.device) -> "Tokens":
        """The same tokens on `device`."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same with its tensors changed."""
        pooled = None if self.pooled is None else change(self.pooled)
        packing = None if self.packing is None else self.packing.each(change)
        return Tokens(change(self.ids), change(self.mask), self.rows, pooled, packing)

    @property
    def lengths(self) -> Tensor:
        """Int64 [N], real tokens of each text."""
        return self.mask.sum(dim=1) if self.packing is None else torch.tensor(self.packing.lengths)
