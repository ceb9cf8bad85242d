"""A loss for each training source, where sources differ: a batch's rows are all of one."""

from collections.abc import Sequence

from torch import Tensor, nn

from embedtrain.losses.types import BatchInfo, Loss, LossOutput


class LossPerSource(Loss):
    """Each batch is given to the loss of its source.

    Args:
        losses: the different losses.
        which: of each source, which of them.
    """

    def __init__(self, losses: Sequence[Loss], which: Sequence[int]) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)
        self.which = list(which)

    def for_source(self, source: int) -> Loss:
        """See Loss."""
        loss = self.losses[self.which[source]]
        assert isinstance(loss, Loss)
        return loss

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """See Loss."""
        output: LossOutput = self.for_source(batch_info.source)(queries, documents, batch_info)
        return output
