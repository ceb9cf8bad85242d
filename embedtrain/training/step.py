"""One optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Self

import torch
from torch import Tensor

from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.sharding import remove_guards
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.watchdog.peers import format_ranks
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.losses.types import LossOutput
from embedtrain.planning.flops import ModelFlops
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, clip_grad_norm, logged_rates, step_if
from embedtrain.training.profile import AGREE, NORM, OPTIMIZER, span
from embedtrain.training.rank_batch import RankBatch
from embedtrain.training.state import EncoderWithLoss, TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one step over all ranks."""

    loss: float  # mean over the rows of the global batches
    measures: dict[str, float]  # other metrics of the loss, such as `accuracy`
    grad_norm: float  # before clipping
    lr: float  # learning rate of the encoder
    group_lrs: dict[str, float]  # `lr/GROUP` of groups with another one
    num_rows: int  # rows of the global batches
    real_tokens: int
    computed_tokens: int
    flops: float  # of the model, for real tokens only
    notices: Notice  # union of the notices of all ranks


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What a step reads and updates."""

    module: EncoderWithLoss
    schedule: Schedule  # of the optimizer
    backward: Backward
    state: TrainState
    flops: tuple[ModelFlops, ...] = ()  # of each tower; empty if the rate is not of interest
    notices: Callable[[], Notice] = lambda: Notice(0)  # returns what this rank announces to the others
    # Called before weights change: an asynchronous checkpoint may still be copying them.
    wait_for_staging: Callable[[], None] = lambda: None

    @property
    def world(self) -> World:
        """The ranks that train."""
        return self.backward.world

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What changes the weights."""
        return self.schedule.optimizer


def train_step(context: StepContext, *batches: RankBatch, measured: bool = False) -> StepReport:
    """Take one optimizer step on the local parts of one or several global batches. Every rank must call it.

    If the loss or the gradient is not finite, all ranks raise TrainingError and the weights have not changed.
    """
    context.module.train()
    context.optimizer.zero_grad(set_to_none=True)
    output, finite = context.backward(*(batch.to(context.world.device) for batch in batches), measured=measured)
    context.schedule.drop_frozen_gradients(context.state.step)
    with span(NORM):
        grad_norm = clip_grad_norm(context.module.parameters(), context.schedule.max_grad_norm)
    tokens = [sum(batch.real_tokens for batch in batches), sum(batch.computed_tokens for batch in batches)]
    needed = (
        of.of(batch.lengths_of(tower), batch.patches_of(tower))
        for tower, of in enumerate(context.flops)
        for batch in batches
    )
    local = [*map(float, tokens), float(sum(needed))]
    with span(AGREE):
        results = _RankResults.gather(context, local, output, grad_norm, finite)
        # The only values of a step that are read from a GPU, and read after the optimizer step is queued: if a rank
        # waited for them before, its GPU would be idle until the step is launched.
        read = _start_reading(results)
    lr = context.schedule.apply(context.state.step)
    context.wait_for_staging()
    with span(OPTIMIZER):
        step_if(results.all_finite, context.optimizer)
    context.optimizer.zero_grad(set_to_none=True)
    with span(AGREE):
        results = read()
        _require_finite(context, results)
    remove_guards(context.module.encoder)
    num_rows = sum(batch.num_rows for batch in batches)
    context.state.step += 1
    context.state.samples += num_rows
    loss, *measures, real, computed, flops = results.totals
    return StepReport(
        loss=loss,
        measures=dict(zip(output.metrics, measures, strict=True)),
        grad_norm=float(results.grad_norms[context.world.rank]),
        lr=lr,
        group_lrs=logged_rates(context.optimizer),
        num_rows=num_rows,
        real_tokens=int(real),
        computed_tokens=int(computed),
        flops=flops,
        notices=results.notices,
    )


@dataclass(frozen=True, slots=True)
class _RankResults:
    """What every rank contributes to a step: float64 [W, 4 + n], a row for each rank."""

    rows: Tensor

    @classmethod
    def gather(
        cls, context: StepContext, local: list[float], output: LossOutput, grad_norm: Tensor, finite: Tensor
    ) -> Self:
        """Exchange the results of the ranks. A collective.

        Notices are exchanged with them, so that all ranks act on them after the same step.
        """
        scalars = (finite, grad_norm, output.local_loss, *output.metrics.values())
        values = torch.stack([scalar.double().to(context.world.device) for scalar in scalars])
        return cls(gather_vector(values, [*local, float(context.notices())]))

    @property
    def embeddings_are_finite(self) -> Tensor:
        """[W], 1 or 0."""
        return self.rows[:, 0]

    @property
    def grad_norms(self) -> Tensor:
        """[W], the same on all ranks if nothing is wrong."""
        return self.rows[:, 1]

    @property
    def local_losses(self) -> Tensor:
        """[W]."""
        return self.rows[:, 2]

    @property
    def all_finite(self) -> Tensor:
        """Whether embeddings, gradient norm and local loss of all ranks are finite: the same answer on every rank."""
        return self.rows[:, :3].isfinite().all() & self.embeddings_are_finite.all()

    @property
    def totals(self) -> list[float]:
        """Sums over the ranks: of the loss, of its metrics, and of `local`."""
        return self.rows[:, 2:-1].sum(dim=0).tolist()

    @property
    def notices(self) -> Notice:
        """The union of the notices of all ranks."""
        return reduce(or_, (Notice(int(value)) for value in self.rows[:, -1].tolist()))


def _start_reading(results: _RankResults) -> Callable[[], _RankResults]:
    """Start a copy to the host; the returned function waits for it, but not for work that is queued later."""
    copy = results.rows.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if results.rows.is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> _RankResults:
        if copied is not None:
            copied.synchronize()
        return _RankResults(copy)

    return read


def _require_finite(context: StepContext, results: _RankResults) -> None:
    """Raise TrainingError on all ranks if something is not finite; then the weights have not changed."""
    # An embedding that is not finite makes the loss of every rank non-finite, so embeddings are checked first.
    broken = [rank for rank in range(context.world.size) if not results.embeddings_are_finite[rank]]
    what = "its embeddings are"
    if not broken:
        broken = [rank for rank in range(context.world.size) if not results.local_losses[rank].isfinite()]
        what = "its local loss is"
    if not broken and not results.grad_norms.isfinite().all():
        broken, what = list(range(context.world.size)), "the gradient is"
    if broken:
        raise TrainingError(
            f"step {context.state.step + 1}, {format_ranks(broken)}: {what} not finite, so training stops before the "
            "weights change; lower optim.lr, or check the rows of this step "
            f"(loss {float(results.local_losses.sum())}, "
            f"gradient norm {float(results.grad_norms[context.world.rank])})"
        )
