"""A step that is not finite changes nothing on any rank, and no rank waits for its device before the optimizer."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import Strategy
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.types import BatchInfo, Loss, LossOutput
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, StepReport, train_step
from tests.pretend_cuda.device import collectives, host_reads
from tests.small import batch, parallel, small_model, small_tokenizer


class Breaking(Loss):
    """A sum with a trained factor; `breaks` says what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.breaks = ""

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        value = self.factor.squeeze() * (queries.sum() + documents.square().sum())
        if self.breaks == "loss":
            value = value * float("nan")
        if self.breaks == "gradient":  # the square root is 0, its gradient infinite
            value = value + (queries - queries.detach()).sum().sqrt()
        return LossOutput(value)


@dataclass
class Training:
    """A small model at its first step on this rank."""

    context: StepContext
    tokenizer: TextTokenizer

    @classmethod
    def of(cls, world: World, loss: Loss, max_grad_norm: float | None = None, **options: Any) -> "Training":
        loaded = load_model(small_model("bert"), parallel(**options), world, seed=0, tokenizer=small_tokenizer())
        # With the usual eps, Adam takes whole steps by gradients that are nothing but rounding.
        optim = OptimConfig(lr=1e-2, warmup=0, eps=1.0, max_grad_norm=max_grad_norm)
        optimizer = build_optimizer(loaded.encoder, optim, loss.to(world.device))
        context = StepContext(
            module=EncoderWithLoss(loaded.encoder, loss),
            schedule=Schedule(optimizer, optim, 10),
            backward=Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy()),
            state=TrainState(),
        )
        return cls(context, loaded.tokenizer)

    def batch(self) -> RankBatch:
        world, step = self.context.world, self.context.state.step
        built = make_rank_batch(batch(9, step), world.rank, world.size, self.tokenizer, ChunkOptions(40, 80))
        return built.pinned() if world.device.type == "cuda" else built

    def step(self) -> StepReport:
        return train_step(self.context, self.batch())

    def tensors(self) -> list[Tensor]:
        """Copies of this rank's part of all weights and of the optimizer state."""
        parameters = list(self.context.module.parameters())
        state = [value for parameter in parameters for value in self.context.optimizer.state[parameter].values()]
        local = [value.to_local() if isinstance(value, DTensor) else value for value in [*parameters, *state]]
        return [value.detach().cpu().clone() for value in local]


def break_steps(world: World) -> None:
    """Rank 1's loss or gradient is not finite in step 2; after that, training continues."""
    for breaks, max_grad_norm, cpu_offload in (
        ("loss", None, False),
        ("gradient", 1.0, False),
        ("gradient", None, True),
    ):
        loss = Breaking()
        training = Training.of(world, loss, max_grad_norm, cpu_offload=cpu_offload)
        training.step()
        before = training.tensors()
        assert len(before) == 4 * len(list(training.context.module.parameters()))
        loss.breaks = breaks * (world.rank == 1)
        with pytest.raises(TrainingError, match="step 2, ") as error:
            training.step()
        expected = "rank 1: its local loss is" if breaks == "loss" else "the gradient is"
        assert f"{expected} not finite" in str(error.value)
        assert training.context.state.step == 1
        assert all(now.equal(old) for now, old in zip(training.tensors(), before, strict=True))
        loss.breaks = ""
        training.step()
        assert not any(now.equal(old) for now, old in zip(training.tensors()[:1], before, strict=False))


def test_a_step_that_is_not_finite_changes_nothing(ranks):
    ranks(2, break_steps)


def test_a_step_that_is_not_finite_changes_nothing_on_a_device(cuda_ranks):
    cuda_ranks(2, break_steps)


def two_steps(world: World, options: list[dict[str, Any]]) -> list[tuple[float, list[Tensor]]]:
    """Gradient norm and tensors after two steps with each of `options`."""
    results = []
    for some in options:
        training = Training.of(world, Breaking(), max_grad_norm=0.5, **some)
        training.step()
        results.append((training.step().grad_norm, training.tensors()))
    return results


@pytest.mark.slow
def test_layouts_on_a_device_equal_the_cpu(ranks, cuda_ranks):
    """With weights in host memory, the gradient of the encoder is on the CPU, and that of the loss on the device."""
    layouts = (Strategy.ddp, Strategy.fsdp, Strategy.hsdp)
    options = [{"strategy": strategy, "cpu_offload": offload} for strategy, offload in product(layouts, (False, True))]
    expected, on_device = ranks(2, two_steps, options), cuda_ranks(2, two_steps, options)
    for (norm, tensors), (device_norm, device_tensors) in zip(chain(*expected), chain(*on_device), strict=True):
        assert norm > 0.5  # is clipped
        assert device_norm == pytest.approx(norm, rel=1e-4)
        for tensor, other in zip(tensors, device_tensors, strict=True):
            torch.testing.assert_close(other, tensor, rtol=1e-3, atol=1e-5)


def waits_of_a_step(world: World, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """What waits for the device until the optimizer has stepped, and in the whole step; and its collectives."""
    training = Training.of(world, Breaking(), max_grad_norm=1.0, **options)
    training.step()
    rank_batch, earlier = training.batch(), Counter[str]()
    with host_reads() as reads, collectives() as calls:
        training.context.optimizer.register_step_post_hook(lambda *_: earlier.update(reads))
        train_step(training.context, rank_batch)
    return dict(earlier), dict(reads), dict(calls)


@pytest.mark.quick("hsdp")
@pytest.mark.parametrize("strategy", [Strategy.ddp, Strategy.fsdp, Strategy.hsdp])
def test_nothing_waits_for_the_device_before_the_optimizer(cuda_ranks, strategy):
    """Otherwise a GPU is idle from the end of the backward pass until the host has launched the optimizer."""
    for earlier, reads, _ in cuda_ranks(2, waits_of_a_step, {"strategy": strategy}):
        assert not earlier
        (read,) = reads.items()
        assert read[0].startswith("training/step.py:") and read[1] == 1


def call_a_layer(world: World) -> None:
    """Until a step has succeeded, a layer called on its own names the mistake; after it no hook slows calls down."""
    training = Training.of(world, Breaking())
    encoder = training.context.module.encoder
    layer = next(part for part in encoder.backbone.modules() if isinstance(part, nn.Linear))
    hidden = torch.zeros(1, layer.in_features, device=world.device)
    with pytest.raises(TrainingError, match=r"encoder\(chunk\)"):
        layer(hidden)
    training.step()
    with pytest.raises(RuntimeError, match="DTensor"):
        layer(hidden)


def test_layers_are_checked_until_a_step_succeeds(ranks):
    ranks(1, call_a_layer)
