"""Optimizer steps of small models on the device of a world: what they compute, and what makes the host wait."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig, LossConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import Attention, ModelConfig, Precision, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.losses.build import row_spec_of
from embedtrain.losses.types import Loss
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step
from tests.pretend_cuda.device import collectives, host_reads
from tests.small import parallel, small_model, small_tokenizer
from tests.training.test_losses import loss_of, rows_for

# A large eps: with a small one the first step is the gradient's sign, and that of rounding errors where it is 0.
OPTIM = OptimConfig(lr=1e-3, eps=1e-3, warmup=0, max_grad_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a layout and a loss."""

    architecture: str = "xlm-roberta"
    attention: Attention = Attention.packed
    precision: Precision = Precision.bf16
    strategy: Strategy = Strategy.fsdp
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: LossConfig = field(default_factory=InfoNCEConfig)

    def load(self, world: World) -> LoadedModel:
        config: ModelConfig = small_model(self.architecture, attention=self.attention, **self.model)
        options = parallel(self.strategy, precision=self.precision, **self.parallel)
        return load_model(config, options, world, seed=0, tokenizer=small_tokenizer())


@dataclass(frozen=True)
class Result:
    """Numbers of each step, and of the last step what the host waited for and which collectives ran."""

    losses: list[float]
    grad_norms: list[float]
    metrics: dict[str, float]  # of the last step
    update: torch.Tensor  # all changes of trained parameters by all steps, one after the other
    reads: Counter[str]
    calls: Counter[str]


def agree(result: Result, expected: Result, tolerance: float) -> None:
    """Compare the numbers of two devices; `tolerance` is relative."""
    assert result.losses == pytest.approx(expected.losses, rel=tolerance)
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=5 * tolerance)
    assert result.metrics == pytest.approx(expected.metrics, rel=5 * tolerance, abs=tolerance)
    assert (result.update - expected.update).norm() <= 10 * tolerance * expected.update.norm()
    assert expected.update.norm() > 0


def on_cpu(world: World) -> World:
    """The same ranks, with the CPU as their device."""
    return replace(world, device=torch.device("cpu"))


def step_context(world: World, model: LoadedModel, config: LossConfig) -> StepContext:
    """What a step needs."""
    loss = loss_of(config).to(world.device)
    optimizer = build_optimizer(model.encoder, OPTIM, loss)
    backward = Backward(
        model.encoder,
        loss,
        world,
        seed=0,
        dummy=model.tokenizer.dummy(),
        reduce_per_step=model.reduce_per_step,
        row_specs=[row_spec_of(config)],
    )
    return StepContext(
        module=EncoderWithLoss(model.encoder, loss),
        schedule=Schedule(optimizer, OPTIM, 10),
        backward=backward,
        state=TrainState(),
    )


def rank_batch(world: World, model: LoadedModel, rows: GlobalBatch, loss: Loss) -> RankBatch:
    """This rank's part as the training loop prepares it: several chunks, of which some keep their graph."""
    width = len(rows.rows[0].vectors[0]) if rows.rows[0].vectors else None
    options = ChunkOptions(60, 60, pass_overhead_tokens=8)
    built = make_rank_batch(rows, world.rank, world.size, model.tokenizer, options, teacher_dimension=width)
    built = built.prepared_for(loss, model.encoder.dimension)
    return built.pinned() if world.device.type == "cuda" else built


def take_steps(
    world: World, model: LoadedModel, config: LossConfig, *, steps: int = 1, num_rows: int = 6, measured: bool = False
) -> Result:
    """A step on each batch; every rank must call it."""
    context = step_context(world, model, config)
    before = trained_weights(context.module)
    losses, grad_norms = [], []
    for step in range(steps):
        local = rank_batch(world, model, rows_for(config, num_rows, step), context.backward.loss)
        with host_reads() as reads, collectives() as calls:
            report = train_step(context, local, measured=measured)
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
    return Result(losses, grad_norms, report.measures, trained_weights(context.module) - before, reads, calls)


def trained_weights(module: EncoderWithLoss) -> torch.Tensor:
    """Every trained parameter, unsharded, on the CPU, one after the other."""
    trained = [p.detach() for p in module.parameters() if p.requires_grad]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).cpu().flatten() for p in trained])


def run_case(world: World, case: Case, steps: int = 1) -> tuple[Result, Result]:
    """Steps on the device, and the same on the CPU."""
    device, cpu = (
        take_steps(each_world, case.load(each_world), case.loss, steps=steps) for each_world in (world, on_cpu(world))
    )
    return device, cpu
