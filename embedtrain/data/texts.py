"""One checked row of a file. Nothing here imports torch: files are also read by commands that do not compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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
