"""What goes into a loss and what comes out: LossInput, LossOutput."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInput:
    """What the batch knows of this rank's embeddings. B queries and M documents on this rank; either may be 0.

    Attributes:
        positives: int64 [B], which of this rank's documents is a query's positive.
        query_keys: int64 [B], equal exactly where two queries' texts are equal.
        document_keys: int64 [M], the same of documents.
    """

    positives: Tensor
    query_keys: Tensor
    document_keys: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss.

    Attributes:
        share: scalar, this rank's part of the mean over the global batch's rows. The ranks' shares add up to
            the loss; so do their gradients.
        shares: detached scalars to log, this rank's parts of means as well.
    """

    share: Tensor
    shares: dict[str, Tensor] = field(default_factory=dict)


# (queries [B, D], documents [M, D], what the batch knows) -> loss. Runs its own collectives: every rank calls it.
Loss = Callable[[Tensor, Tensor, LossInput], LossOutput]
