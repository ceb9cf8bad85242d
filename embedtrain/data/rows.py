"""Rows of training data. Nothing here imports torch: files are also read by commands that do not compute."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Texts:
    """One checked row of a file: no text is empty, and no negative is repeated or equal to a positive.

    The other fields are those of Example.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    num_dropped: int  # negatives left out, equal to a positive or to another negative
    positive_scores: tuple[float, ...] = ()
    negative_scores: tuple[float, ...] = ()
    positive_ids: tuple[str, ...] = ()
    negative_ids: tuple[str, ...] = ()
    label: int | None = None
    vectors: tuple[Sequence[float], ...] = ()
    instruction: str | None = None
    document_instruction: str | None = None
    max_negatives: int | None = None

    def with_positives(self, keep: Sequence[bool]) -> "Texts":
        """The same row with some of its positives."""
        num_positives, num_texts = len(self.positives), 1 + len(self.positives) + len(self.negatives)

        def select(values: Sequence[T]) -> tuple[T, ...]:
            return tuple(value for value, kept in zip(values, keep, strict=True) if kept) if values else ()

        vectors = self.vectors
        if len(vectors) == num_texts and num_texts > 1:
            vectors = (vectors[0], *select(vectors[1 : 1 + num_positives]), *vectors[1 + num_positives :])
        return replace(
            self,
            positives=select(self.positives),
            positive_scores=select(self.positive_scores),
            positive_ids=select(self.positive_ids),
            vectors=vectors,
        )

    def scaled(self, by: float) -> "Texts":
        """The same row with scores divided by `by`."""
        if by == 1.0 or not self.positive_scores:
            return self
        positives, negatives = (
            tuple(score / by for score in scores) for scores in (self.positive_scores, self.negative_scores)
        )
        return replace(self, positive_scores=positives, negative_scores=negatives)


if TYPE_CHECKING:
    from embedtrain.data.types import Example  # imports torch


def format_row(
    row: "Example | Texts",
    negatives: Sequence[str],
    ids: Sequence[str],
    scores: tuple[Sequence[float], Sequence[float]] | None,
) -> str:
    """The row with `negatives` instead of its own, as JSON in FlagEmbedding's layout, which our reader restores.

    `ids` has one per negative, "" for none, or is empty; `scores` has float32 scores of positives and of negatives.
    """
    query, positives = row.query, list(row.positives)
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
    if row.positive_ids:
        fields["pos_id"] = [name or None for name in row.positive_ids]
    if ids:
        fields["neg_id"] = [name or None for name in ids]
    if scores is not None:
        # The shortest decimals that round to the same float32: 0.9, not 0.8999999761581421.
        fields["pos_scores"], fields["neg_scores"] = ([float(str(np.float32(s))) for s in values] for values in scores)
    return json.dumps(fields, ensure_ascii=False)
