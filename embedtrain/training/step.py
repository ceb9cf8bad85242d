"""One optimiser step, and what it reports."""

import time
from dataclasses import dataclass

import torch

from embedtrain.config.schema import OptimConfig
from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.losses.types import LossOutput
from embedtrain.models.encoder import Encoder
from embedtrain.training.batches import RankBatch
from embedtrain.training.gradients import Backward
from embedtrain.training.optimizer import Schedule, clip_grad_norm
from embedtrain.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, over all ranks."""

    loss: float
    accuracy: float  # share of queries whose positive scored above every negative
    grad_norm: float
    lr: float
    num_rows: int
    real_tokens: int
    computed_tokens: int  # padding included
    seconds: float


@dataclass(slots=True, kw_only=True)
class Trainable:
    """What a step changes and what it needs for that."""

    world: World
    encoder: Encoder
    optimizer: torch.optim.AdamW
    schedule: Schedule
    backward: Backward
    optim: OptimConfig
    state: TrainState


def train_step(run: Trainable, batch: RankBatch) -> StepReport:
    """Take one step on this rank's share of a global batch. Every rank must call it.

    Raises:
        TrainingError: the loss or the gradient is not finite, on all ranks and before any weight has moved.
    """
    began = time.perf_counter()
    run.encoder.train()
    run.optimizer.zero_grad(set_to_none=True)
    batch = batch.to(run.world.device)
    output, finite = run.backward(batch)  # one pass, or cached in chunks: the same gradient
    grad_norm = clip_grad_norm(run.encoder.parameters(), run.optim.max_grad_norm)
    totals = _require_finite(run.world, batch, output, grad_norm, finite)
    lr = run.schedule.apply(batch.step)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step = batch.step + 1
    run.state.samples += batch.num_rows
    loss, accuracy, real, computed = (float(value) for value in totals)
    return StepReport(
        loss=loss,
        accuracy=accuracy,
        grad_norm=grad_norm,
        lr=lr,
        num_rows=batch.num_rows,
        real_tokens=int(real),
        computed_tokens=int(computed),
        seconds=time.perf_counter() - began,
    )


def _require_finite(world: World, batch: RankBatch, output: LossOutput, grad_norm: float, finite: bool) -> torch.Tensor:
    """Loss, accuracy and token counts summed over the ranks, once nothing in them is NaN or infinite."""
    mine = [
        output.share.item(),
        output.shares["accuracy"].item() if "accuracy" in output.shares else 0.0,
        float(batch.real_tokens),
        float(batch.computed_tokens),
        float(finite),
    ]
    ranks = gather_vector(mine, world.device)
    # A text's vector that is not finite spoils every rank's loss, so the vectors' rank is looked for first.
    broken = [rank for rank in range(world.size) if not ranks[rank, 4]]
    what = "its texts' vectors are"
    if not broken:
        broken, what = [rank for rank in range(world.size) if not ranks[rank, 0].isfinite()], "its part of the loss is"
    if not broken and not torch.tensor(grad_norm).isfinite():
        broken, what = list(range(world.size)), "the gradient is"
    if broken:
        named = f"rank {broken[0]}" if len(broken) == 1 else f"ranks {', '.join(map(str, broken))}"
        raise TrainingError(
            f"step {batch.step + 1}, {named}: {what} not finite, so training stops before the weights change; "
            f"lower optim.lr, or look at the rows of this step (loss {float(ranks[:, 0].sum())}, "
            f"gradient norm {grad_norm})"
        )
    return ranks[:, :4].sum(dim=0)
