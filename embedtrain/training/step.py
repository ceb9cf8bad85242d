"""One optimizer step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from embedtrain.config.recipe import OptimConfig
from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.watchdog.peers import format_ranks
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.losses.types import LossOutput
from embedtrain.planning.flops import NO_FLOPS, ModelFlops
from embedtrain.training import timing
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, clip_grad_norm
from embedtrain.training.rank_batch import RankBatch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.timing import span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one step over all ranks."""

    loss: float  # mean over the rows of the global batches
    measures: dict[str, float]  # other metrics of the loss, such as `accuracy`
    grad_norm: float  # before clipping
    lr: float  # learning rate of the encoder
    num_rows: int  # rows of the global batches
    real_tokens: int
    computed_tokens: int
    flops: float  # of the model, for real tokens only
    seconds: float
    notices: Notice  # union of the notices of all ranks


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What a step reads and updates."""

    world: World
    module: EncoderWithLoss
    optimizer: torch.optim.AdamW
    schedule: Schedule
    backward: Backward
    optim: OptimConfig
    state: TrainState
    flops: ModelFlops = NO_FLOPS
    notices: Callable[[], Notice] = lambda: Notice(0)  # returns what this rank announces to the others
    # Called before weights change: an asynchronous checkpoint may still be copying them.
    wait_for_staging: Callable[[], None] = lambda: None


def train_step(context: StepContext, *batches: RankBatch, measured: bool = False) -> StepReport:
    """Take one optimizer step on the local parts of one or several global batches. Every rank must call it.

    Args:
        measured: whether to compute `Backward.row_specs` metrics as well.

    Raises:
        TrainingError: on all ranks, the loss or the gradient is not finite; the weights have not changed.
    """
    started = time.perf_counter()
    context.module.train()
    context.optimizer.zero_grad(set_to_none=True)
    output, finite = context.backward(*(batch.to(context.world.device) for batch in batches), measured=measured)
    with span(timing.NORM):
        grad_norm = clip_grad_norm(context.module.parameters(), context.optim.max_grad_norm)
    tokens = [sum(batch.real_tokens for batch in batches), sum(batch.computed_tokens for batch in batches)]
    local = [*map(float, tokens), sum(context.flops.of(batch.lengths) for batch in batches)]
    with span(timing.AGREE):
        totals, norm, notices = _require_finite(context, local, output, grad_norm, finite)
    lr = context.schedule.apply(context.state.step)
    context.wait_for_staging()
    with span(timing.OPTIMIZER):
        context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)
    num_rows = sum(batch.num_rows for batch in batches)
    context.state.step += 1
    context.state.samples += num_rows
    loss, *measures, real, computed, flops = totals
    return StepReport(
        loss=loss,
        measures=dict(zip(output.metrics, measures, strict=True)),
        grad_norm=norm,
        lr=lr,
        num_rows=num_rows,
        real_tokens=int(real),
        computed_tokens=int(computed),
        flops=flops,
        seconds=time.perf_counter() - started,
        notices=notices,
    )


def _require_finite(
    context: StepContext, local: list[float], output: LossOutput, grad_norm: Tensor, finite: Tensor
) -> tuple[list[float], float, Notice]:
    """Check that everything is finite. Return the sums of loss, metrics and `local` over ranks, the norm, and notices.

    Notices are exchanged in the same collective, so that all ranks act on them after the same step. This is the only
    place of a step where a rank waits for its GPU: the result must be known before weights change.
    """
    values = torch.stack([part.double() for part in (finite, grad_norm, output.local_loss, *output.metrics.values())])
    ranks = gather_vector(values, [*local, float(context.notices())])
    norm = float(ranks[context.world.rank, 1])
    # An embedding that is not finite makes the loss of every rank non-finite, so embeddings are checked first.
    broken = [rank for rank in range(context.world.size) if not ranks[rank, 0]]
    what = "its embeddings are"
    if not broken:
        broken = [rank for rank in range(context.world.size) if not ranks[rank, 2].isfinite()]
        what = "its local loss is"
    if not broken and not math.isfinite(norm):
        broken, what = list(range(context.world.size)), "the gradient is"
    if broken:
        raise TrainingError(
            f"step {context.state.step + 1}, {format_ranks(broken)}: {what} not finite, so training stops before the "
            f"weights change; lower optim.lr, or check the rows of this step (loss {float(ranks[:, 2].sum())}, "
            f"gradient norm {norm})"
        )
    notices = reduce(or_, (Notice(int(value)) for value in ranks[:, -1].tolist()))
    return ranks[:, 2:-1].sum(dim=0).tolist(), norm, notices
