"""A weighted sum of losses on the same rows."""

from collections.abc import Mapping

from torch import Tensor, nn

from embedtrain.losses.types import Loss, LossInput, LossOutput


class Combined(Loss):
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

    def forward(self, queries: Tensor, documents: Tensor, known: LossInput) -> LossOutput:
        """See Loss. Each part's own value is logged under its name, without its weight."""
        share, shares = queries.new_zeros(()), dict[str, Tensor]()
        for name, part in self.parts.items():
            found = part(queries, documents, known)
            share = share + self.weights[name] * found.share
            shares[name] = found.share.detach()
            for key, value in found.shares.items():
                shares[key if key not in shares else f"{name}/{key}"] = value
        return LossOutput(share, shares)
