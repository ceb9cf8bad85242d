"""A weighted sum of losses on the same rows."""

from collections.abc import Mapping

from torch import Tensor, nn

from embedtrain.losses.types import BatchInfo, Loss, LossOutput


class CombinedLoss(Loss):
    """Distillation beside a contrastive loss, a regularisation beside either.

    Every part is a mean over the global rows, so their ratio is the same at any number of ranks.

    Args:
        parts: by name, in the order they are computed: their collectives must come in one order.
        weights: of each of them.
    """

    def __init__(self, parts: Mapping[str, Loss], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.weights = dict(weights)

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """See Loss. Each part's own value is logged under its name, without its weight."""
        local_loss, metrics = queries.new_zeros(()), dict[str, Tensor]()
        for name, part in self.parts.items():
            found = part(queries, documents, batch_info)
            local_loss = local_loss + self.weights[name] * found.local_loss
            metrics[name] = found.local_loss.detach()
            for key, value in found.metrics.items():
                metrics[key if key not in metrics else f"{name}/{key}"] = value
        return LossOutput(local_loss, metrics)
