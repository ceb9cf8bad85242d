"""One optimiser step, and what it reports."""

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
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.losses.types import LossOutput
from embedtrain.planning.flops import NO_FLOPS, ModelFlops
from embedtrain.training import spans
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, clip_grad_norm
from embedtrain.training.rank_batch import RankBatch
from embedtrain.training.spans import span
from embedtrain.training.state import EncoderWithLoss, TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, over all ranks."""

    loss: float
    measures: dict[str, float]  # what the loss tells besides, such as `accuracy`
    grad_norm: float
    lr: float
    num_rows: int
    real_tokens: int
    computed_tokens: int  # padding included
    flops: float  # of the model, for real tokens alone
    seconds: float
    notices: Notice  # of all ranks together


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What a step changes and what it needs for that."""

    world: World
    trained: EncoderWithLoss
    optimizer: torch.optim.AdamW
    schedule: Schedule
    backward: Backward
    optim: OptimConfig
    state: TrainState
    flops: ModelFlops = NO_FLOPS  # what texts ask of the encoder
    notices: Callable[[], Notice] = lambda: Notice(0)  # what this rank has to say to the others
    wait_for_staging: Callable[[], None] = lambda: None  # called before the weights change


def train_step(run: StepContext, *batches: RankBatch, measured: bool = False) -> StepReport:
    """Take one step on this rank's share of one or several global batches. Every rank must call it.

    Args:
        run: what is changed.
        batches: see Backward.
        measured: see Backward.

    Raises:
        TrainingError: the loss or the gradient is not finite, on all ranks and before any weight has moved.
    """
    began = time.perf_counter()
    run.trained.train()
    run.optimizer.zero_grad(set_to_none=True)
    output, finite = run.backward(
        *(batch.to(run.world.device) for batch in batches), measured=measured
    )  # kept, or encoded twice
    with span(spans.NORM):
        grad_norm = clip_grad_norm(run.trained.parameters(), run.optim.max_grad_norm)
    tokens = [sum(batch.real_tokens for batch in batches), sum(batch.computed_tokens for batch in batches)]
    mine = [*map(float, tokens), sum(run.flops.of(batch.lengths) for batch in batches)]
    with span(spans.AGREE):
        totals, norm, notices = _require_finite(run, mine, output, grad_norm, finite)
    lr = run.schedule.apply(run.state.step)
    run.wait_for_staging()
    with span(spans.OPTIMIZER):
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    num_rows = sum(batch.num_rows for batch in batches)
    run.state.step += 1
    run.state.samples += num_rows
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
        seconds=time.perf_counter() - began,
        notices=notices,
    )


def _require_finite(
    run: StepContext, mine: list[float], output: LossOutput, grad_norm: Tensor, finite: Tensor
) -> tuple[list[float], float, Notice]:
    """Sums over the ranks, once nothing is NaN or infinite: the loss, `mine`, its measures; and the gradient's norm.

    The ranks' notices travel along, so that all act on them after the same step. This is the one place in a step where
    a rank waits for its GPU: no weight may move before it is known.
    """
    seen = torch.stack([part.double() for part in (finite, grad_norm, output.local_loss, *output.metrics.values())])
    ranks = gather_vector(seen, [*mine, float(run.notices())])
    norm = float(ranks[run.world.rank, 1])
    # A text's vector that is not finite spoils every rank's loss, so the vectors' rank is looked for first.
    broken = [rank for rank in range(run.world.size) if not ranks[rank, 0]]
    what = "its texts' vectors are"
    if not broken:
        broken = [rank for rank in range(run.world.size) if not ranks[rank, 2].isfinite()]
        what = "its part of the loss is"
    if not broken and not math.isfinite(norm):
        broken, what = list(range(run.world.size)), "the gradient is"
    if broken:
        named = f"rank {broken[0]}" if len(broken) == 1 else f"ranks {', '.join(map(str, broken))}"
        raise TrainingError(
            f"step {run.state.step + 1}, {named}: {what} not finite, so training stops before the weights change; "
            f"lower optim.lr, or look at the rows of this step (loss {float(ranks[:, 2].sum())}, "
            f"gradient norm {norm})"
        )
    notices = reduce(or_, (Notice(int(said)) for said in ranks[:, -1].tolist()))
    return ranks[:, 2:-1].sum(dim=0).tolist(), norm, notices
