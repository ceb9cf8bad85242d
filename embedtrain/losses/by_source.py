"""A loss for each training source, where sources differ: a batch's rows are all of one."""

from collections.abc import Sequence

from torch import Tensor, nn

from embedtrain.losses.types import Loss, LossInput, LossOutput


class BySource(Loss):
    """Each batch is given to the loss of its source.

    Args:
        losses: the different losses.
        which: of each source, which of them.
    """

    def __init__(self, losses: Sequence[Loss], which: Sequence[int]) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)
        self.which = list(which)

    def of_source(self, source: int) -> Loss:
        """See Loss."""
        loss = self.losses[self.which[source]]
        assert isinstance(loss, Loss)
        return loss

    def forward(self, queries: Tensor, documents: Tensor, known: LossInput) -> LossOutput:
        """See Loss."""
        output: LossOutput = self.of_source(known.source)(queries, documents, known)
        return output
