"""Checkpoints on the pretended device: saved at once and while training continues, and read back bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import Attention, Precision, Strategy
from embedtrain.distributed.world import World
from embedtrain.training.step import StepContext, train_step
from tests.checkpoint.live import open_checkpoints, slow_disk, state_of
from tests.pretend_cuda.device import host_reads
from tests.pretend_cuda.steps import Case, on_cpu, rank_batch, step_context
from tests.training.test_losses import rows_for

CASE = Case(precision=Precision.fp32, attention=Attention.padded, loss=InfoNCEConfig(learn_temperature=True))


def tensors(context: StepContext) -> list[Tensor]:
    """This rank's part of every trained tensor and of the optimizer's state, on the CPU."""
    parts = []
    for parameter in context.module.parameters():
        state = context.optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
            parts.append(local.cpu().clone())
    return parts


def save_and_resume(world: World, root: Path, strategy: Strategy, offload: bool, asynchronous: bool) -> dict[str, Any]:
    """Save after one step, take another, then resume on the device and on the CPU and take that step again."""
    case = Case(**{**vars(CASE), "strategy": strategy, "parallel": {"cpu_offload": offload}})

    def start(each_world: World) -> tuple[StepContext, Any]:
        model = case.load(each_world)
        context = step_context(each_world, model, case.loss)

        def take_step(step: int) -> float:
            local = rank_batch(each_world, model, rows_for(case.loss, 6, step), context.backward.loss)
            return train_step(context, local).loss

        return context, take_step

    context, take_step = start(world)
    take_step(0)
    with open_checkpoints(root, world, asynchronous=asynchronous) as checkpoints, slow_disk() as written:
        if not asynchronous:
            written.set()
        saved = tensors(context)
        with host_reads() as reads:
            checkpoints.save(context.module, context.optimizer, state_of(1))
            checkpoints.wait_for_staging()
        loss = take_step(1)  # changes the weights before the copy is written
        written.set()
        checkpoints.wait()
    result: dict[str, Any] = {"loss": loss, "reads": reads, "resumed": {}}
    for each_world in (world, on_cpu(world)):
        context, take_step = start(each_world)
        with open_checkpoints(root, each_world) as checkpoints:
            checkpoint = checkpoints.newest()
            assert checkpoint is not None
            state = checkpoints.resume(checkpoint, context.module, context.optimizer)
            equal = all(torch.equal(a, b) for a, b in zip(tensors(context), saved, strict=True))
        result["resumed"][each_world.device.type] = (equal, state == state_of(1), take_step(1))
    return result


@pytest.mark.parametrize(
    ("strategy", "offload", "asynchronous"),
    [
        (Strategy.fsdp, False, True),
        pytest.param(Strategy.fsdp, True, False, marks=pytest.mark.slow),
        pytest.param(Strategy.ddp, False, True, marks=pytest.mark.slow),
        pytest.param(Strategy.fsdp, False, False, marks=pytest.mark.slow),
        pytest.param(Strategy.fsdp, True, True, marks=pytest.mark.slow),
        pytest.param(Strategy.ddp, False, False, marks=pytest.mark.slow),
    ],
)
def test_save_and_resume(cuda_ranks, tmp_path, strategy, offload, asynchronous):
    for result in cuda_ranks(2, save_and_resume, tmp_path, strategy, offload, asynchronous):
        equal, same_state, loss = result["resumed"]["cuda"]
        assert equal and same_state
        assert loss == result["loss"]
        equal, same_state, loss = result["resumed"]["cpu"]
        assert equal and same_state
        assert loss == pytest.approx(result["loss"], rel=1e-5)
        if asynchronous and not offload:  # copied into page-locked memory, which the device does on its own
            assert not [line for line in result["reads"] if "copy" in line]
