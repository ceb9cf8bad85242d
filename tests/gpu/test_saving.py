"""Saving on the device: resumed runs equal uninterrupted ones, and a checkpoint holds the weights of its step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.snapshot import init_optimizer_state
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.config.recipe import Strategy
from embedtrain.distributed.world import World
from tests.checkpoint.live import Live, open_checkpoints, state_of
from tests.runs import evaluation_metrics, exported_weights, losses, options, rewind_run, run
from tests.small import parallel

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "precision"),
    [(1, "fp32"), pytest.param(1, "bf16", marks=SLOW), pytest.param(2, "fp32", marks=SLOW), (2, "bf16")],
)
def test_resumed_runs_equal_uninterrupted_ones(device_ranks, run_inputs, tmp_path, size, precision):
    """Bit for bit, with dropout and asynchronous checkpoints, in deterministic algorithms."""
    common = (
        "train.steps=6",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "evaluation.every=3",
        f"parallel.precision={precision}",
        "parallel.deterministic=true",
    )
    whole = tmp_path / "whole"
    device_ranks(size, run, *options(run_inputs, whole, *common, model="dropout"))
    resumed = rewind_run(whole, tmp_path / "resumed", 2)
    device_ranks(size, run, *options(run_inputs, resumed, *common, model="dropout"))
    assert losses(resumed) == losses(whole)
    assert evaluation_metrics(resumed) == evaluation_metrics(whole)
    assert exported_weights(resumed) == exported_weights(whole)


def tensors(live: Live) -> list[Tensor]:
    """This rank's parts of parameters and optimizer state, of the moment: copies are queued like all work."""
    init_optimizer_state(live.optimizer)
    state = [value for values in live.optimizer.state.values() for value in values.values()]
    actual = [*live.parameters, *(value for value in state if isinstance(value, Tensor))]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in actual]


def save_under_load(world: World, root: Path, offload: bool, *, small: bool = False) -> None:
    """Save three times behind work that keeps the device busy, and train on at once; `small`: not busy for long."""
    live = Live(world, parallel(Strategy.fsdp, cpu_offload=offload), odd=False)
    width = 8192 if world.device.type == "cuda" and not small else 64
    matrix = torch.randn(width, width, device=world.device)
    expected = {}
    with open_checkpoints(root, world, keep=9) as checkpoints:
        for step in (1, 2, 3):
            for _ in range(20):
                matrix = matrix @ matrix / width
            live.step()
            expected[step] = tensors(live)
            checkpoints.save(live.trained, live.optimizer, state_of(step))
            checkpoints.wait_for_staging()
            live.step()
            live.step()
        checkpoints.wait()
        for step, before in expected.items():
            checkpoints.resume(open_checkpoint(step_path(root, step)), live.trained, live.optimizer)
            after = tensors(live)
            assert len(after) == len(before)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), step
    assert not all(torch.equal(a, b) for a, b in zip(expected[1], expected[2], strict=True))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_under_load_hold_the_weights_of_their_step(device_ranks, tmp_path, size, offload):
    device_ranks(size, save_under_load, tmp_path, offload)
