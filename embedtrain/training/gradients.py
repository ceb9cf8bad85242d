"""The gradient of a global batch: in one pass, or cached in chunks, the same either way.

Gradient caching is Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(2021): encode all chunks without a graph, take the loss's gradient at the vectors, then encode each chunk
again with a graph and carry its vectors' gradient on. Dropout is replayed: a chunk's random numbers are a
function of (seed, step, rank, chunk), which is also why a resumed run needs no random state.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from embedtrain.data.types import Tokens
from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.sharding import synchronise_gradients
from embedtrain.distributed.world import World
from embedtrain.losses.types import Loss, LossOutput
from embedtrain.training.batches import RankBatch


class Backward:
    """Computes a step's gradient.

    Args:
        encoder: the sharded encoder.
        loss: what is minimised.
        world: the ranks.
        seed: the recipe's seed, from which dropout's random numbers follow.
        dummy: a chunk for ranks that have fewer chunks than others.
    """

    def __init__(self, encoder: nn.Module, loss: Loss, world: World, *, seed: int, dummy: Tokens) -> None:
        self.encoder, self.loss, self.world, self.seed = encoder, loss, world, seed
        self.dummy = dummy.to(world.device)

    def __call__(self, batch: RankBatch) -> tuple[LossOutput, bool]:
        """Add the gradient of the mean over the global batch to the parameters' `grad`.

        Args:
            batch: this rank's share, on this rank's device.

        Returns:
            This rank's share of the loss, detached, and whether all of this rank's vectors are finite.
        """
        # Every forward pass is a collective, so all ranks run as many, in one way; the others' ends are dummies.
        most, cached = max_over_ranks([len(batch.chunks), int(not batch.fits)], self.world.device)
        chunks = [*batch.chunks, *[self.dummy] * (max(1, most) - len(batch.chunks))]
        if cached:
            return self._cached(chunks, batch)
        vectors = [self._encode(batch.step, index, chunk) for index, chunk in enumerate(chunks)]
        synchronise_gradients(self.encoder, last=True)
        rows = _in_order(vectors, chunks)
        output = self._loss_backward(rows, batch)
        return output, bool(rows.detach().isfinite().all())

    def _cached(self, chunks: Sequence[Tokens], batch: RankBatch) -> tuple[LossOutput, bool]:
        with torch.no_grad():
            vectors = [self._encode(batch.step, index, chunk) for index, chunk in enumerate(chunks)]
        rows = _in_order(vectors, chunks).requires_grad_()
        output = self._loss_backward(rows, batch)
        assert rows.grad is not None, "the loss did not use the vectors"
        for index, chunk in enumerate(chunks):
            synchronise_gradients(self.encoder, last=index == len(chunks) - 1)
            again = self._encode(batch.step, index, chunk)
            again.backward(rows.grad[list(chunk.rows)] if chunk.rows != self.dummy.rows else torch.zeros_like(again))
        return output, bool(rows.detach().isfinite().all())

    def _loss_backward(self, rows: Tensor, batch: RankBatch) -> LossOutput:
        output = self.loss(rows[: batch.num_queries], rows[batch.num_queries :], batch.known)
        # The one place that knows of it: FSDP averages gradients over the ranks, and shares are to be summed.
        (output.share * self.world.size).backward()
        return LossOutput(output.share.detach(), output.shares)

    def _encode(self, step: int, index: int, chunk: Tokens) -> Tensor:
        torch.manual_seed(chunk_seed(self.seed, step, self.world.rank, index))
        return self.encoder(chunk.ids, chunk.mask)  # type: ignore[no-any-return]


def chunk_seed(seed: int, step: int, rank: int, index: int) -> int:
    """The seed of one chunk's dropout."""
    return int(np.random.SeedSequence([seed, step, rank, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _in_order(vectors: Sequence[Tensor], chunks: Sequence[Tokens]) -> Tensor:
    """The chunks' vectors as one matrix in the texts' order; dummies' vectors are left out."""
    places = torch.tensor([row for chunk in chunks for row in chunk.rows])
    order = places.argsort()[int((places < 0).sum()) :]
    return torch.cat(list(vectors))[order.to(vectors[0].device)]
