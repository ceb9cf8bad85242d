"""StableAdamW, Lion, moments in bf16 and Muon: closed forms, skipped steps, any number of ranks, and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.checkpointer import Checkpointer, read_tensors
from embedtrain.checkpoint.snapshot import optimizer_tensors
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.config.optim import OptimConfig, OptimizerName, StateDtype
from embedtrain.config.recipe import CheckpointConfig, Strategy
from embedtrain.distributed.sharding import copy_local_rows
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.training.optimizer import (
    LABEL,
    RULE,
    ShardedOptimizer,
    build_optimizer,
    orthogonalize,
    step_if,
    trained_parameters,
    update_scale,
)
from tests.small import parallel, small_model, small_tokenizer

LR, DECAY, EPS = 0.1, 0.5, 1e-8
BETAS = [0.9, 0.99]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(name: str, **options: Any) -> tuple[nn.Parameter, ShardedOptimizer]:
    """An optimizer of one plain tensor."""
    parameter = nn.Parameter(random(0, 5, 3))
    optim = OptimConfig(name=OptimizerName(name), lr=LR, betas=BETAS, eps=EPS, **options)
    group = {"params": [parameter], "weight_decay": DECAY, RULE: name, LABEL: "loss"}
    return parameter, ShardedOptimizer([group], optim)


def by_hand(name: str, steps: int) -> Tensor:
    """In float64, from the formulas of the papers."""
    weight, (beta1, beta2) = random(0, 5, 3).double(), BETAS
    moment, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, steps + 1):
        grad, rate = random(step, 5, 3).double() * step, LR
        if name == "lion":
            direction = (beta1 * moment + (1 - beta1) * grad).sign()
            moment = beta2 * moment + (1 - beta2) * grad
        else:
            moment = beta1 * moment + (1 - beta1) * grad
            second = beta2 * second + (1 - beta2) * grad**2
            unbiased = second / (1 - beta2**step)
            direction = moment / (1 - beta1**step) / (unbiased.sqrt() + EPS)
            if name == "stable_adamw":
                rate = LR / max(1.0, (grad**2 / unbiased).mean().sqrt().item())
        weight = weight * (1 - rate * DECAY) - rate * direction
    return weight


def take(parameter: nn.Parameter, optimizer: ShardedOptimizer, steps: int) -> Tensor:
    for step in range(1, steps + 1):
        parameter.grad = random(step, 5, 3) * step
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "lion"])
def test_rules_equal_their_formulas(name: str):
    parameter, optimizer = sharded(name)
    expected = by_hand(name, 4)
    torch.testing.assert_close(take(parameter, optimizer, 4).double(), expected, rtol=1e-5, atol=1e-6)
    if name == "stable_adamw":  # gradients grow, so its rates are lower than AdamW's
        assert not torch.allclose(expected, by_hand("adamw", 4), rtol=1e-2)
    halved, optimizer = sharded(name, state_dtype=StateDtype.bf16)
    assert (take(halved, optimizer, 4) - expected).norm() < 0.03 * expected.norm()
    moments = [value for key, value in optimizer.state[halved].items() if key != "step"]
    assert {value.dtype for value in moments} == {torch.bfloat16}


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (8, 8)])
def test_singular_values_of_an_orthogonal_update(shape):
    matrix = random(1, *shape) + 4 * torch.eye(*shape)
    values = torch.linalg.svdvals(orthogonalize(matrix.double()))
    assert values.min() > 0.6 and values.max() < 1.25, (shape, values)


def unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Training:
    """A small model with gradients that are functions of name and step, so that ranks have no part in them."""

    def __init__(self, world: World, name: str, strategy: Strategy = Strategy.fsdp) -> None:
        loaded = load_model(small_model("bert"), parallel(strategy), world, seed=0, tokenizer=small_tokenizer())
        self.encoder = loaded.encoder
        self.optim = OptimConfig(name=OptimizerName(name), lr=1e-2, betas=BETAS, weight_decay=0.1)
        self.optimizer = build_optimizer(self.encoder, self.optim)
        self.names = {item.name: item.settings.rule for item in trained_parameters(self.encoder, self.optim)}

    def grad(self, name: str, shape: torch.Size, step: int) -> Tensor:
        return random(100 * list(self.names).index(name) + step, *shape) * (step + 1)

    def step(self, step: int, finite: bool = True) -> None:
        for name, parameter in self.encoder.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            copy_local_rows(parameter.grad, self.grad(name, parameter.shape, step))
            if not finite:
                parameter.grad *= float("inf")
        step_if(torch.tensor(finite), self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        return {name: unsharded(parameter) for name, parameter in self.encoder.named_parameters()}


def run(world: World, name: str, directory: Path, strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after three steps. The first run saves its second step, others resume from it."""
    training = Training(world, name, strategy)
    before, start = training.weights(), 0
    if directory.exists():
        read_tensors(open_checkpoint(step_path(directory, 2)), training.encoder, training.optimizer)
        start = 2
    for step in range(start, 3):
        if step == 2:
            state = [unsharded(value) for value in optimizer_tensors(training.encoder, training.optimizer).values()]
            with Checkpointer(directory, CheckpointConfig(), world, metadata={}, log=print) as checkpointer:
                if start == 0:
                    checkpointer.save(training.encoder, training.optimizer, {"step": 2})
            weights = training.weights()
            training.step(step, finite=False)
            assert all(value.equal(weights[key]) for key, value in training.weights().items())
            after = optimizer_tensors(training.encoder, training.optimizer).values()
            assert all(unsharded(value).equal(old) for value, old in zip(after, state, strict=True))
        training.step(step)
    return before, training.weights()


def muon_by_hand(before: dict[str, Tensor], name: str, training: Any) -> Tensor:
    weight, momentum = before[name].clone(), torch.zeros_like(before[name])
    for step in range(3):
        grad = training(name, weight.shape, step)
        momentum = 0.95 * momentum + 0.05 * grad
        direction = orthogonalize(0.05 * grad + 0.95 * momentum)
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * update_scale(weight.shape) * direction
    return weight


@pytest.mark.parametrize("name", ["muon", "stable_adamw"])
def test_any_number_of_ranks_and_a_resume_give_the_same_weights(ranks, tmp_path, name):
    (before, expected), *_ = ranks(3, run, name, tmp_path / "checkpoints", Strategy.fsdp)
    for size, strategy in ((1, Strategy.fsdp), (2, Strategy.ddp)):
        for _, weights in ranks(size, run, name, tmp_path / "checkpoints", strategy):
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5, msg=key)
    if name == "muon":
        names = list(before)

        def grad(key: str, shape: torch.Size, step: int) -> Tensor:
            return random(100 * names.index(key) + step, *shape) * (step + 1)

        matrices = [key for key in names if ".layer." in key and before[key].dim() == 2]
        assert len(matrices) == 12
        for key in matrices:
            torch.testing.assert_close(expected[key], muon_by_hand(before, key, grad), rtol=1e-4, atol=1e-5, msg=key)
