"""One checked row of a file. Nothing here imports torch: files are also read by commands that do not compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


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

    def scaled(self, by: float) -> "Texts":
        """The same row with scores divided by `by`."""
        if by == 1.0 or not self.positive_scores:
            return self
        positives, negatives = (
            tuple(score / by for score in scores) for scores in (self.positive_scores, self.negative_scores)
        )
        return replace(self, positive_scores=positives, negative_scores=negatives)
