"""One optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.sharding import remove_guards
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.watchdog.peers import format_ranks
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.losses.types import LossOutput
from embedtrain.planning.flops import NO_FLOPS, ModelFlops
from embedtrain.training.backward import Backward
from embedtrain.training.groups import logged_rates
from embedtrain.training.optimizer import Schedule, clip_grad_norm, step_if
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
    flops: ModelFlops = NO_FLOPS
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
    local = [*map(float, tokens), sum(context.flops.of(batch.lengths) for batch in batches)]
    with span(AGREE):
        ranks = _gather_results(context, local, output, grad_norm, finite)
        # The only values of a step that are read from a GPU, and read after the optimizer step is queued: if a rank
        # waited for them before, its GPU would be idle until the step is launched.
        read = _start_reading(ranks)
    lr = context.schedule.apply(context.state.step)
    context.wait_for_staging()
    with span(OPTIMIZER):
        # Embeddings, gradient norm and local loss of all ranks: the same answer on every rank.
        step_if(ranks[:, :3].isfinite().all() & ranks[:, 0].all(), context.optimizer)
    context.optimizer.zero_grad(set_to_none=True)
    with span(AGREE):
        totals, norm, notices = _require_finite(context, read())
    remove_guards(context.module.encoder)
    num_rows = sum(batch.num_rows for batch in batches)
    context.state.step += 1
    context.state.samples += num_rows
    loss, *measures, real, computed, flops = totals
    return StepReport(
        loss=loss,
        measures=dict(zip(output.metrics, measures, strict=True)),
        grad_norm=norm,
        lr=lr,
        group_lrs=logged_rates(context.optimizer),
        num_rows=num_rows,
        real_tokens=int(real),
        computed_tokens=int(computed),
        flops=flops,
        notices=notices,
    )


def _gather_results(
    context: StepContext, local: list[float], output: LossOutput, grad_norm: Tensor, finite: Tensor
) -> Tensor:
    """Every rank's results in one matrix: whether embeddings are finite, norm, loss, metrics, `local`, and notices.

    Notices are exchanged in the same collective, so that all ranks act on them after the same step.
    """
    scalars = (finite, grad_norm, output.local_loss, *output.metrics.values())
    values = torch.stack([scalar.double().to(context.world.device) for scalar in scalars])
    return gather_vector(values, [*local, float(context.notices())])


def _start_reading(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host; the returned function waits for it, but not for work that is queued later."""
    copy = values.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if values.is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read


def _require_finite(context: StepContext, ranks: Tensor) -> tuple[list[float], float, Notice]:
    """Check that everything is finite. Return the sums of loss, metrics and `local` over ranks, the norm, and notices.

    If something is not, the optimizer has left the weights unchanged.
    """
    norm = float(ranks[context.world.rank, 1])
    # An embedding that is not finite makes the loss of every rank non-finite, so embeddings are checked first.
    broken = [rank for rank in range(context.world.size) if not ranks[rank, 0]]
    what = "its embeddings are"
    if not broken:
        broken = [rank for rank in range(context.world.size) if not ranks[rank, 2].isfinite()]
        what = "its local loss is"
    if not broken and not ranks[:, 1].isfinite().all():
        broken, what = list(range(context.world.size)), "the gradient is"
    if broken:
        raise TrainingError(
            f"step {context.state.step + 1}, {format_ranks(broken)}: {what} not finite, so training stops before the "
            f"weights change; lower optim.lr, or check the rows of this step (loss {float(ranks[:, 2].sum())}, "
            f"gradient norm {norm})"
        )
    notices = reduce(or_, (Notice(int(value)) for value in ranks[:, -1].tolist()))
    return ranks[:, 2:-1].sum(dim=0).tolist(), norm, notices
