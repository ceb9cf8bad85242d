"""The gradient of global batches: graphs kept as far as memory allows, the rest encoded again; the same either way.

Gradient caching is Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(2021): encode all chunks, take the loss's gradient at the vectors, then carry each vector's gradient on through
its chunk. A chunk whose graph was kept from the first pass is not encoded twice; kept graphs go first, so that
their memory is free again when the others are encoded anew. Dropout is replayed: a chunk's random numbers are
a function of (seed, step, rank, chunk), which is also why a resumed run needs no random state.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from embedtrain.data.types import Tokens
from embedtrain.distributed.collectives import average_gradients
from embedtrain.distributed.sharding import set_gradient_sync
from embedtrain.distributed.world import World
from embedtrain.losses.batch_statistics import MeasuredRows, RowSpec, batch_statistics
from embedtrain.losses.types import Loss, LossOutput
from embedtrain.training import timing
from embedtrain.training.guides import GuideModel
from embedtrain.training.rank_batch import RankBatch
from embedtrain.training.timing import span


class Backward:
    """Computes a step's gradient.

    Args:
        encoder: the sharded encoder.
        loss: what is minimised.
        world: the ranks.
        seed: the recipe's seed, from which dropout's random numbers follow.
        dummy: a chunk for ranks that have fewer chunks than others.
        reduce_per_step: whether this rank holds whole gradients between the chunks of a step.
        guides: other models that the loss asks for, by path.
        sources: names of the training sources, where each batch is of one: their losses are told apart.
        row_specs: of each training source's rows, for what is measured beside the loss; None: nothing is.
    """

    def __init__(
        self,
        encoder: nn.Module,
        loss: Loss,
        world: World,
        *,
        seed: int,
        dummy: Tokens,
        reduce_per_step: bool = True,
        guides: Mapping[str, GuideModel] | None = None,
        sources: Sequence[str] | None = None,
        row_specs: Sequence[RowSpec] | None = None,
    ) -> None:
        self.encoder, self.loss, self.world, self.seed = encoder, loss, world, seed
        self.dummy = dummy.to(world.device)
        self.reduce_per_step = reduce_per_step
        self.guides = dict(guides or {})
        self.sources, self.row_specs = sources, row_specs

    def __call__(self, *batches: RankBatch, measured: bool = False) -> tuple[LossOutput, Tensor]:
        """Add the gradient of the mean over the global batches' rows to the parameters' `grad`.

        Args:
            batches: this rank's share of each, on this rank's device. Each is a batch of its own to the loss:
                no row of one is a negative in another.
            measured: whether to tell how the vectors lie, where this was made for it; the same on every rank.

        Returns:
            This rank's share of the loss, detached, and whether all of this rank's vectors are finite: both on its
            device, for nothing here waits for a GPU.
        """
        num_rows = max(1, sum(batch.num_rows for batch in batches))
        local_loss = torch.zeros((), device=self.world.device)
        finite = torch.ones((), dtype=torch.bool, device=self.world.device)
        metrics, weights = dict[str, Tensor](), dict[str, float]()
        for batch in batches:
            weight = batch.num_rows / num_rows
            found, fine = self._one(batch, weight, last=batch is batches[-1], measured=measured)
            local_loss = local_loss + weight * found.local_loss
            for name, value in self._measures(batch, found).items():  # batches of other sources may have others
                metrics[name] = metrics.get(name, torch.zeros_like(value)) + weight * value
                weights[name] = weights.get(name, 0.0) + weight
            finite = finite & fine
        metrics = {name: value / weights[name] for name, value in metrics.items()}
        used = {id(loss): loss for loss in (self.loss.for_source(batch.batch_info.source) for batch in batches)}
        average_gradients(itertools.chain(*(loss.parameters() for loss in used.values())))
        return LossOutput(local_loss, metrics), finite

    def _measures(self, batch: RankBatch, found: LossOutput) -> dict[str, Tensor]:
        if self.sources is None:
            return found.metrics
        return {**found.metrics, f"loss/{self.sources[batch.batch_info.source]}": found.local_loss}

    def _one(self, batch: RankBatch, weight: float, *, last: bool, measured: bool) -> tuple[LossOutput, Tensor]:
        # Every forward pass is a collective, so all ranks run as many, in one way; the others' ends are dummies.
        mine, most = len(batch.chunks), max(1, batch.num_passes)
        kept = (
            most if batch.num_cached_graphs == batch.num_passes else batch.num_cached_graphs
        )  # a dummy's graphs are no burden
        sample = (
            MeasuredRows.of(batch.num_rows, batch.max_documents, self.world.rank, self.world.size) if measured else None
        )
        chunks = [*batch.chunks, *[self.dummy] * (most - mine)]
        vectors: list[Tensor | None] = []
        for index, chunk in enumerate(chunks):
            with torch.set_grad_enabled(index < kept), span(timing.ENCODE):
                vectors.append(self._encode(batch.step, index, chunk))
        made = [vector.detach() for vector in vectors if vector is not None]
        with span(timing.LOSS):
            output, slopes, finite = self._loss_at_row_owners(
                torch.cat(made)[: sum(map(len, made[:mine]))], batch, weight, sample
            )
        # A dummy's vector is nobody's.
        slope_of = [*slopes.split([len(vector) for vector in made[:mine]]), *map(torch.zeros_like, made[mine:])]
        for index, chunk in enumerate(chunks):
            final = last and index == most - 1
            set_gradient_sync(self.encoder, last=final, reduce_per_step=self.reduce_per_step)
            with span(timing.BACKWARD):
                encoded = vectors[index] if index < kept else self._encode(batch.step, index, chunk)
                assert encoded is not None
                encoded.backward(slope_of[index])
            vectors[index] = encoded = None  # the graph's memory
        return output, finite

    def _loss_at_row_owners(
        self, encoded: Tensor, batch: RankBatch, weight: float, sample: MeasuredRows | None
    ) -> tuple[LossOutput, Tensor, Tensor]:
        """The loss where the rows are, its gradient at the vectors encoded here, and whether these are finite."""
        rows = batch.exchange.to_row_owner(encoded)
        output = self._loss_backward(rows.requires_grad_(), batch, weight)
        if sample is not None and self.row_specs is not None:
            seen, row_spec = rows.detach(), self.row_specs[batch.batch_info.source]
            queries, documents = seen[: batch.num_queries], seen[batch.num_queries :]
            output.metrics.update(batch_statistics(queries, documents, batch.batch_info, sample, row_spec))
        slopes = batch.exchange.to_encoder_rank(torch.zeros_like(rows) if rows.grad is None else rows.grad)
        return output, slopes, encoded.isfinite().all()

    def _loss_backward(self, rows: Tensor, batch: RankBatch, weight: float) -> LossOutput:
        seen = {path: self.guides[path](chunks, batch.num_queries) for path, chunks in batch.guides.items()}
        batch_info = replace(batch.batch_info, guides={**batch.batch_info.guides, **seen})
        output: LossOutput = self.loss(rows[: batch.num_queries], rows[batch.num_queries :], batch_info)
        # The one place that knows of it: gradients are averaged over the ranks, and shares are to be summed.
        (output.local_loss * (weight * self.world.size)).backward()
        return LossOutput(output.local_loss.detach(), output.metrics)

    def _encode(self, step: int, index: int, chunk: Tokens) -> Tensor:
        torch.manual_seed(chunk_seed(self.seed, step, self.world.rank, index))
        return self.encoder(*chunk.inputs)  # type: ignore[no-any-return]


def chunk_seed(seed: int, step: int, rank: int, index: int) -> int:
    """The seed of one chunk's dropout."""
    return int(np.random.SeedSequence([seed, step, rank, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
