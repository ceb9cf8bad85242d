"""Rows of training data. Nothing here imports torch: files are also read by commands that do not compute."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of a row, without prompts.

    Attributes:
        scores: one per document, in float32; empty if the row has no scores.
        ids: one per document, "" for a document without an id; empty if the row has no ids.
    """

    texts: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> "Documents":
        """The documents with these numbers."""
        return Documents(take(self.texts, indices), take(self.scores, indices), take(self.ids, indices))

    def joined(self, others: "Documents") -> "Documents":
        """These documents, then the others; without an id on one side, their ids are ""."""
        ids = (*self.all_ids, *others.all_ids) if self.ids or others.ids else ()
        return Documents((*self.texts, *others.texts), (*self.scores, *others.scores), ids)

    @property
    def all_ids(self) -> tuple[str, ...]:
        """One id per document, also if the row has none."""
        return self.ids or ("",) * len(self.texts)


class RowLocation(NamedTuple):
    """Where a row is from."""

    source: int  # index in `data.train`
    file: str  # path, or id on the Hub
    line: int  # line or row number in the file, from 1


@dataclass(frozen=True, slots=True)
class Example:
    """One checked training row: no text is empty, and no negative is repeated or equal to a positive."""

    query: str  # without a prompt; or the only text of a row that has no documents
    positives: Documents = Documents()  # at least one, unless the loss needs no documents
    negatives: Documents = Documents()
    num_dropped: int = 0  # negatives left out, equal to a positive or to another negative
    label: int | None = None
    # Of a teacher, in float32: one for all texts, or one per text in the order query, positives, negatives; or empty.
    vectors: tuple[Sequence[float], ...] = ()
    instruction: str | None = None  # replaces the prompt of the query; "" for no prompt, None to keep the source's
    document_instruction: str | None = None  # replaces the prompt of all documents
    max_negatives: int | None = None  # maximal number of hard negatives that a step uses; None: all
    location: RowLocation | None = None  # None while the file is read

    @property
    def place(self) -> str:
        """`file:line`, for messages."""
        return "" if self.location is None else f"{self.location.file}:{self.location.line}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The query, the positives and the negatives."""
        return (self.query, *self.positives.texts, *self.negatives.texts)

    def with_positives(self, keep: Sequence[bool]) -> "Example":
        """The same row with some of its positives."""
        kept = [index for index, is_kept in enumerate(keep) if is_kept]
        vectors, first_negative = self.vectors, 1 + len(self.positives)
        if len(vectors) == len(self.texts) > 1:
            vectors = (vectors[0], *take(vectors[1:first_negative], kept), *vectors[first_negative:])
        return replace(self, positives=self.positives.take(kept), vectors=vectors)

    def scaled(self, by: float) -> "Example":
        """The same row with scores divided by `by`."""
        if by == 1.0 or not self.positives.scores:
            return self
        positives, negatives = (
            replace(documents, scores=tuple(score / by for score in documents.scores))
            for documents in (self.positives, self.negatives)
        )
        return replace(self, positives=positives, negatives=negatives)


@dataclass(frozen=True, slots=True)
class Row:
    """What one step uses of an Example: the query, one positive, and some hard negatives, without prompts."""

    query: str
    documents: Documents = Documents()  # the positive, then the hard negatives; none in a row of one text
    label: int | None = None
    vectors: tuple[Sequence[float], ...] = ()  # of a teacher: of the query, then of each document; or empty
    source: int = 0  # index in `data.train`


def take(values: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    """The values with these numbers; none if there are no values."""
    return tuple(values[index] for index in indices) if values else ()


def format_row(
    row: Example,
    negatives: Sequence[str],
    ids: Sequence[str],
    scores: tuple[Sequence[float], Sequence[float]] | None,
) -> str:
    """The row with `negatives` instead of its own, as JSON in FlagEmbedding's layout, which our reader restores.

    `ids` has one per negative, "" for none, or is empty; `scores` has float32 scores of positives and of negatives.
    """
    query, positives = row.query, list(row.positives.texts)
    fields: dict[str, Any] = {"query": query, "pos": positives, "neg": list(negatives)}
    symmetric = row.document_instruction is not None and row.document_instruction == row.instruction
    if row.document_instruction is not None and (row.max_negatives is not None or not symmetric):
        document_instruction = row.document_instruction
        fields["query"] = [row.instruction or "", query]
        fields["pos"] = [[document_instruction, text] for text in positives]
        fields["neg"] = [[document_instruction, text] for text in negatives]
    elif row.instruction is not None:
        fields["prompt"] = row.instruction
        if symmetric:
            fields["type"] = "symmetric_sts"
    if row.max_negatives is not None:
        fields["type"] = "only_1neg"
    if row.positives.ids:
        fields["pos_id"] = [name or None for name in row.positives.ids]
    if ids:
        fields["neg_id"] = [name or None for name in ids]
    if scores is not None:
        # The shortest decimals that round to the same float32: 0.9, not 0.8999999761581421.
        fields["pos_scores"], fields["neg_scores"] = ([float(str(np.float32(s))) for s in values] for values in scores)
    return json.dumps(fields, ensure_ascii=False)
