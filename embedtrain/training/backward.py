"""The backward pass of global batches with gradient caching.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021): encode all chunks, compute
the gradient of the loss with respect to the embeddings, then backpropagate it through each chunk. Graphs of the first
pass are kept as far as memory allows; chunks without a graph are encoded again. Chunks with a graph come first, so that
its memory is free when the others are encoded again. Dropout is replayed: the random numbers of a chunk are a function
of (seed, step, rank, chunk), which is also why a resumed run needs no random state.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from embedtrain.data.types import Chunk
from embedtrain.distributed.block_compute import EagerBlocks, explain_changed_results
from embedtrain.distributed.collectives import average_gradients
from embedtrain.distributed.sharding import set_gradient_sync, towers_of
from embedtrain.distributed.world import World
from embedtrain.losses.batch_statistics import MeasuredRows, RowSpec, batch_statistics
from embedtrain.losses.encoded import Part, split_queries
from embedtrain.losses.types import Loss, LossOutput, RowSources
from embedtrain.models.attention import grad_independent_attention, use_flash_attention
from embedtrain.models.encoder import Encoder
from embedtrain.training.guides import GuideModel
from embedtrain.training.profile import BACKWARD, ENCODE, LOSS, span
from embedtrain.training.rank_batch import RankBatch


class Backward:
    """Computes the gradient of a step.

    Args:
        dummy: chunk for ranks that have fewer chunks than others, of an encoder with one tower.
        reduce_per_step: see `set_gradient_sync`.
        guides: other models that the loss needs, by path.
        sources: names of the training sources, to log their losses separately; None if there is only one.
        row_specs: rows of each training source, for batch statistics; None disables them.
    """

    def __init__(
        self,
        encoder: nn.Module,
        loss: Loss,
        world: World,
        *,
        seed: int,
        dummy: Chunk,
        reduce_per_step: bool = True,
        guides: Mapping[str, GuideModel] | None = None,
        sources: Sequence[str] | None = None,
        row_specs: Sequence[RowSpec] | None = None,
    ) -> None:
        self.encoder, self.loss, self.world, self.seed = encoder, loss, world, seed
        self.towers = towers_of(encoder)
        # A frozen tower has no backward passes.
        # Of vision towers, which not all passes compute.
        modules = [module for tower in self.towers for module in getattr(tower, "vision_modules", ())]
        self._vision: list[nn.Module] = list(filter(lambda module: isinstance(module, FSDPModule), modules))
        self._trains = [any(weight.requires_grad for weight in tower.parameters()) for tower in self.towers]
        self.dummy = dummy.to(world.device)
        self.reduce_per_step = reduce_per_step
        self.guides = dict(guides or {})
        self.sources, self.row_specs = sources, row_specs
        self.eager_blocks = EagerBlocks([encoder, *(guide.encoder for guide in self.guides.values())])

    def __call__(self, *batches: RankBatch, measured: bool = False) -> tuple[LossOutput, Tensor]:
        """Add the gradient of the mean loss over all rows of the global batches to the parameters' `grad`.

        Args:
            batches: local part of each global batch, on this rank's device. Rows of different global batches are never
                negatives of each other.
            measured: whether to compute batch statistics; the same on every rank.

        Returns:
            The local loss, detached, and whether all local embeddings are finite. Both stay on the device, so that
            nothing waits for a GPU.
        """
        num_rows = max(1, sum(batch.num_rows for batch in batches))
        local_loss = torch.zeros((), device=self.world.device)
        finite = torch.ones((), dtype=torch.bool, device=self.world.device)
        metrics, weights = dict[str, Tensor](), dict[str, float]()
        # The tower of each backward pass, and whether it computes pictures.
        passes = [chunk for batch in batches for chunk in self._passes(batch)]
        remaining = [(chunk.tower, chunk.pictures is not None) for chunk in passes if self._trains[chunk.tower]]
        for batch in batches:
            weight = batch.num_rows / num_rows
            with grad_independent_attention(self.encoder):
                output, batch_finite = self._backward_batch(batch, weight, remaining, measured=measured)
            local_loss = local_loss + weight * output.local_loss
            for name, value in self._metrics(batch, output).items():  # sources may have different metrics
                metrics[name] = metrics.get(name, torch.zeros_like(value)) + weight * value
                weights[name] = weights.get(name, 0.0) + weight
            finite = finite & batch_finite
        metrics = {name: value / weights[name] for name, value in metrics.items()}
        losses = {
            id(loss): loss for loss in (self.loss.for_source(batch.batch_info.origin.source) for batch in batches)
        }
        average_gradients(itertools.chain(*(loss.parameters() for loss in losses.values())))
        return LossOutput(local_loss, metrics), finite

    def _metrics(self, batch: RankBatch, output: LossOutput) -> dict[str, Tensor]:
        """The metrics of the loss, and the mean over the rows of each source, if the loss is a sum over rows."""
        if self.sources is None:
            return output.metrics
        row_sources = batch.batch_info.prepared.get(RowSources)
        losses = {batch.batch_info.origin.source: output.local_loss}
        if isinstance(row_sources, RowSources):
            losses = {} if output.row_losses is None else row_sources.local_losses(output.row_losses)
        return {**output.metrics, **{f"loss/{self.sources[source]}": loss for source, loss in losses.items()}}

    def _passes(self, batch: RankBatch) -> list[Chunk]:
        """The chunks of a batch. Every forward pass is a collective, so all ranks run the same number of passes.

        Ranks with fewer chunks add dummies, whose graphs take little memory.
        """
        return [*batch.chunks, *[self.dummy] * (max(1, batch.num_passes) - len(batch.chunks))]

    def _backward_batch(
        self, batch: RankBatch, weight: float, remaining: list[tuple[int, bool]], *, measured: bool
    ) -> tuple[LossOutput, Tensor]:
        """`remaining` has the tower of each backward pass that is left, and whether it computes pictures.

        Those of this batch are removed from it.
        """
        chunks = self._passes(batch)
        num_cached = len(chunks) if batch.num_cached_graphs == batch.num_passes else batch.num_cached_graphs
        sample = (
            MeasuredRows.of(batch.num_rows, batch.max_documents, self.world.rank, self.world.size) if measured else None
        )
        graphs: list[tuple[Tensor, ...] | None] = []
        for index, chunk in enumerate(chunks):
            with torch.set_grad_enabled(index < num_cached and self._trains[chunk.tower]), span(ENCODE):
                graphs.append(self._encode(batch.step, index, chunk))
        encoded = [tuple(part.detach() for part in graph) for graph in graphs if graph is not None]
        # Dummies do not contribute to the loss.
        sizes = [[0 if c.is_dummy else len(part) for part in parts] for c, parts in zip(chunks, encoded, strict=True)]
        local = [
            torch.cat([part[:size] for part, size in zip(parts, of_part, strict=True)])
            for parts, of_part in zip(zip(*encoded, strict=True), zip(*sizes, strict=True), strict=True)
        ]
        with span(LOSS):
            output, grads, finite = self._loss_at_row_owners(local, batch, weight, sample)
        chunk_grads = [grad.split(of_part) for grad, of_part in zip(grads, zip(*sizes, strict=True), strict=True)]
        for index, chunk in enumerate(chunks):
            if not self._trains[chunk.tower]:
                continue
            remaining.pop(0)
            # A tower is finished before the last pass if that one computes another tower.
            towers = {tower for tower, _ in remaining}
            finished = [tower for number, tower in enumerate(self.towers) if number not in towers]
            if not any(has_pictures for _, has_pictures in remaining):
                finished += self._vision
            set_gradient_sync(self.encoder, last=not remaining, reduce_per_step=self.reduce_per_step, finished=finished)
            with span(BACKWARD):
                graph = graphs[index] if index < num_cached else self._encode(batch.step, index, chunk)
                assert graph is not None
                if isinstance(self.encoder, Encoder):  # a guide may have another kernel than the graph
                    use_flash_attention(self.encoder.packed_kernel)
                gradients = [
                    torch.zeros_like(part) if chunk.is_dummy else part_grads[index]
                    for part, part_grads in zip(graph, chunk_grads, strict=True)
                ]
                with explain_changed_results(self.towers[chunk.tower]):
                    torch.autograd.backward(graph, gradients)
            graphs[index] = graph = None  # frees the graph
        return output, finite

    def _loss_at_row_owners(
        self, encoded: Sequence[Tensor], batch: RankBatch, weight: float, sample: MeasuredRows | None
    ) -> tuple[LossOutput, list[Tensor], Tensor]:
        """The loss of local rows, its gradient at the parts encoded here, and whether these are finite."""
        rows = [
            exchange.to_row_owner(part).requires_grad_()
            for exchange, part in zip(batch.exchanges, encoded, strict=True)
        ]
        parts = [Part(values, exchange.sizes) for values, exchange in zip(rows, batch.exchanges, strict=True)]
        if self.dummy.row_ids is not None:
            # Of all chunks, of which a rank may have none.
            ids = [self.dummy.row_ids[:0], *(chunk.row_ids for chunk in batch.chunks if chunk.row_ids is not None)]
            parts[0] = replace(parts[0], ids=batch.exchanges[0].to_row_owner(torch.cat(ids)))
        output = self.loss_backward(parts, batch, weight)
        if sample is not None and self.row_specs is not None:
            vectors, row_spec = rows[0].detach(), self.row_specs[batch.batch_info.origin.source]
            queries, documents = vectors[: batch.num_queries], vectors[batch.num_queries :]
            output.metrics.update(batch_statistics(queries, documents, batch.batch_info, sample, row_spec))
        grads = [
            exchange.to_encoder_rank(torch.zeros_like(part) if part.grad is None else part.grad)
            for exchange, part in zip(batch.exchanges, rows, strict=True)
        ]
        return output, grads, torch.stack([part.isfinite().all() for part in encoded]).all()

    def loss_backward(self, parts: Sequence[Part], batch: RankBatch, weight: float) -> LossOutput:
        """The loss of texts, and the gradients of their values; the local loss counts `weight` times."""
        guides = {path: self.guides[path](chunks, batch.num_queries) for path, chunks in batch.guides.items()}
        batch_info = replace(batch.batch_info, guides={**batch.batch_info.guides, **guides})
        queries, documents = split_queries(parts, batch.num_queries)
        output: LossOutput = self.loss(queries, documents, batch_info)
        # FSDP and `average_gradients` divide gradients by the number of ranks, but local losses sum to the global one:
        # the loss is multiplied by it here, and only here.
        (output.local_loss * (weight * self.world.size)).backward()
        return LossOutput(output.local_loss.detach(), output.metrics, output.row_losses)

    def _encode(self, step: int, index: int, chunk: Chunk) -> tuple[Tensor, ...]:
        """The parts of a chunk's texts."""
        torch.manual_seed(chunk_seed(self.seed, step, self.world.rank, index))
        parts: tuple[Tensor, ...] = self.encoder(chunk)
        return parts


def chunk_seed(seed: int, step: int, rank: int, index: int) -> int:
    """The seed of a chunk's dropout masks."""
    return int(np.random.SeedSequence([seed, step, rank, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
