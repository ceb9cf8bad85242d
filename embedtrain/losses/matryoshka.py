"""Any loss on the first dimensions of the vectors as well, so that they can be cut short when they are used."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from embedtrain.losses.similarity import widened
from embedtrain.losses.types import BatchInfo, Loss, LossOutput


class Matryoshka(Loss):
    """Kusupati et al., "Matryoshka Representation Learning" (2022).

    The weighted sum of a loss on the vectors' first n dimensions, normalised anew, for each n.

    Args:
        inner: the loss.
        dims: how many dimensions, the largest first.
        weights: of each of them.
    """

    def __init__(self, inner: Loss, dims: Sequence[int], weights: Sequence[float]) -> None:
        super().__init__()
        self.inner, self.dims, self.weights = inner, list(dims), list(weights)

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """See Loss. What is logged is the inner loss's at the most dimensions, and its value at each n."""
        queries, documents = widened(queries), widened(documents)
        local_loss, metrics = queries.new_zeros(()), dict[str, Tensor]()
        for dim, weight in zip(self.dims, self.weights, strict=True):
            short = (F.normalize(vectors[:, :dim], dim=1) for vectors in (queries, documents))
            found = self.inner(*short, batch_info)
            local_loss = local_loss + weight * found.local_loss
            metrics = metrics or dict(found.metrics)
            metrics[f"loss@{dim}"] = found.local_loss.detach()
        return LossOutput(local_loss, metrics)
