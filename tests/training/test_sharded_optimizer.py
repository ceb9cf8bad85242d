"""StableAdamW, Lion, Muon, moments in bf16 and int8: closed forms, skipped steps, any number of ranks, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.checkpointer import Checkpointer, read_tensors
from embedtrain.checkpoint.snapshot import (
    SCALES,
    SIGNED,
    UNSIGNED,
    decode_moment,
    encode_moment,
    init_optimizer_state,
    optimizer_tensors,
)
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.config.optim import OptimConfig, OptimizerName, StateDtype, block_size
from embedtrain.config.recipe import CheckpointConfig, Strategy
from embedtrain.distributed.sharding import ParallelLayout, copy_local_rows
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.planning.memory import ClusterSpec, StepWorkload, step_memory
from embedtrain.planning.model_costs import LiveBytes
from embedtrain.training import optimizer as optimizer_module
from embedtrain.training.optimizer import (
    LABEL,
    RULE,
    ShardedOptimizer,
    build_optimizer,
    optimizer_groups,
    orthogonalize,
    step_if,
    trained_parameters,
    update_scale,
)
from tests.planning.models import XLMR_LARGE, built, spec_of
from tests.small import parallel, small_model, small_tokenizer

LR, DECAY, EPS = 0.1, 0.5, 1e-8
BETAS = [0.9, 0.99]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(name: str, shape: tuple[int, ...] = (5, 3), **options: Any) -> tuple[nn.Parameter, ShardedOptimizer]:
    """An optimizer of one plain tensor."""
    parameter = nn.Parameter(random(0, *shape))
    optim = OptimConfig(name=OptimizerName(name), lr=LR, betas=BETAS, eps=EPS, **options)
    group = {"params": [parameter], "weight_decay": DECAY, RULE: name, LABEL: "loss"}
    return parameter, ShardedOptimizer([group], optim)


def by_hand(name: str, steps: int, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    """In float64, from the formulas of the papers."""
    weight, (beta1, beta2) = random(0, *shape).double(), BETAS
    moment, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, steps + 1):
        grad, rate = random(step, *shape).double() * step, LR
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
        parameter.grad = random(step, *parameter.shape) * step
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


@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "lion"])
def test_moments_of_8_bits_are_near_the_formulas(name: str):
    shape = 6, 384
    parameter, optimizer = sharded(name, shape, state_dtype=StateDtype.int8)
    start, expected = parameter.detach().double(), by_hand(name, 6, shape)
    distance = (take(parameter, optimizer, 6) - expected).norm() / (expected - start).norm()
    assert distance < (0.2 if name == "lion" else 0.03), distance  # where the sign of a direction changes
    state = optimizer.state[parameter]
    moments = {key: (value.dtype, tuple(value.shape)) for key, value in state.items() if key != "step"}
    expected_moments = {"exp_avg": (torch.int8, shape), "exp_avg" + SCALES: (torch.float32, (6, 2))}
    if name != "lion":
        expected_moments |= {"exp_avg_sq": (torch.uint8, shape), "exp_avg_sq" + SCALES: (torch.float32, (6, 2))}
    assert moments == expected_moments
    # A bias has no blocks, and what a short row has is less than its scale.
    for small in ((384,), (384, 8), (5, 61)):
        parameter, optimizer = sharded(name, small, state_dtype=StateDtype.int8)
        torch.testing.assert_close(
            take(parameter, optimizer, 2).double(), by_hand(name, 2, small), rtol=1e-5, atol=1e-6
        )


def test_blocks_divide_rows():
    shapes = {(2, 1024): 256, (2, 768): 256, (2, 384): 192, (2, 312): 156, (2, 64): 64, (2, 514): None, (9, 61): None}
    assert {shape: block_size(shape) for shape in shapes} == shapes
    assert block_size((1024,)) is block_size((3, 64, 64)) is None


@pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED])
def test_codes_of_moments(dtype: torch.dtype):
    moment = random(1, 7, 512) * torch.logspace(-12, 6, 7).unsqueeze(1)
    moment[2, 256:] = 0
    moment = moment if dtype is SIGNED else moment.square()
    codes, scales = encode_moment(moment, 128, dtype)
    assert (codes.dtype, tuple(codes.shape), tuple(scales.shape)) == (dtype, (7, 512), (7, 4))
    decoded = decode_moment(codes, scales)
    assert ((decoded - moment).norm(dim=1) <= 0.02 * moment.norm(dim=1)).all()
    largest = moment.abs().unflatten(1, (4, 128)).amax(-1)
    assert decoded.abs().unflatten(1, (4, 128)).amax(-1).equal(largest)  # exact, so that decay loses nothing
    again = encode_moment(decoded, 128, dtype)  # a checkpoint that was read in fp32
    assert again[0].equal(codes)
    assert again[1].equal(scales)
    if dtype is UNSIGNED:  # no direction has a denominator of optim.eps alone
        assert (decoded > 0).equal(moment > 0)
        tiny = torch.tensor([1.0, 1e-20, 0.0]).repeat(1, 64)
        assert (decode_moment(*encode_moment(tiny, 64, dtype)) > 0).equal(tiny > 0)
    # Rows are encoded on their own, so that any number of ranks shards them.
    for row in range(7):
        assert encode_moment(moment[row : row + 1], 128, dtype)[0].equal(codes[row : row + 1])


@pytest.mark.parametrize("dtype", StateDtype)
@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "lion"])
def test_large_parameters_are_updated_in_pieces(monkeypatch, name: str, dtype: StateDtype):
    """The same weights, and temporary tensors of a few pieces, whatever the size of the model."""
    shape = 1000, 256
    whole = take(*sharded(name, shape, state_dtype=dtype), 3)
    monkeypatch.setattr(optimizer_module, "_PIECE", 16 * 256)
    parameter, optimizer = sharded(name, shape, state_dtype=dtype)
    take(parameter, optimizer, 1)
    parameter.grad = random(2, *shape) * 2
    with LiveBytes([parameter, parameter.grad, *optimizer.state[parameter].values()]) as live:
        optimizer.step()
    assert live.peak < 20 * 4 * 16 * 256
    parameter.grad = random(3, *shape) * 3
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (8, 8)])
def test_singular_values_of_an_orthogonal_update(shape):
    matrix = random(1, *shape) + 4 * torch.eye(*shape)
    values = torch.linalg.svdvals(orthogonalize(matrix.double()))
    assert values.min() > 0.6 and values.max() < 1.25, (shape, values)


def unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Training:
    """A small model with gradients that are functions of name and step, so that ranks have no part in them."""

    def __init__(
        self, world: World, name: str, strategy: Strategy = Strategy.fsdp, dtype: StateDtype = StateDtype.fp32
    ) -> None:
        model = small_model("bert")
        model.config["intermediate_size"] = 80  # rows of one block, beside those of `hidden_size` that have none
        loaded = load_model(model, parallel(strategy), world, seed=0, tokenizer=small_tokenizer())
        self.encoder = loaded.encoder
        self.optim = OptimConfig(name=OptimizerName(name), lr=1e-2, betas=BETAS, weight_decay=0.1, state_dtype=dtype)
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


def run(
    world: World, name: str, directory: Path, strategy: Strategy, dtype: StateDtype = StateDtype.fp32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after three steps. The first run saves its second step, others resume from it."""
    training = Training(world, name, strategy, dtype)
    before, start = training.weights(), 0
    if directory.exists():
        read_tensors(open_checkpoint(step_path(directory, 2)), training.encoder, training.optimizer)
        start = 2
    for step in range(start, 3):
        if step == 2:
            is_encoded = any(name.endswith(SCALES) for name in optimizer_tensors(training.encoder, training.optimizer))
            assert is_encoded == (dtype is StateDtype.int8)
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


@pytest.mark.quick("muon-fp32", "adamw-int8")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("muon", StateDtype.fp32),
        ("stable_adamw", StateDtype.fp32),
        ("adamw", StateDtype.int8),
        ("muon", StateDtype.int8),
    ],
)
def test_any_number_of_ranks_and_a_resume_give_the_same_weights(ranks, tmp_path, name, dtype):
    (before, expected), *_ = ranks(3, run, name, tmp_path / "checkpoints", Strategy.fsdp, dtype)
    for size, strategy in ((1, Strategy.fsdp), (2, Strategy.ddp)):
        for _, weights in ranks(size, run, name, tmp_path / "checkpoints", strategy, dtype):
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5, msg=key)
                assert name != "adamw" or value.equal(expected[key]), key
    if dtype is not StateDtype.fp32:
        return
    if name == "muon":
        names = list(before)

        def grad(key: str, shape: torch.Size, step: int) -> Tensor:
            return random(100 * names.index(key) + step, *shape) * (step + 1)

        matrices = [key for key in names if ".layer." in key and before[key].dim() == 2]
        assert len(matrices) == 12
        for key in matrices:
            torch.testing.assert_close(expected[key], muon_by_hand(before, key, grad), rtol=1e-4, atol=1e-5, msg=key)


def moments(training: Training) -> dict[str, Tensor]:
    """Unsharded and in fp32, by name."""
    state = {name: unsharded(value) for name, value in optimizer_tensors(training.encoder, training.optimizer).items()}
    return {
        name: decode_moment(value, state[name + SCALES]) if name + SCALES in state else value.float()
        for name, value in state.items()
        if not name.endswith(SCALES)
    }


def reread(world: World, directory: Path, written: StateDtype, read: StateDtype) -> None:
    """Save moments of one type, unless another number of ranks has, and read them in another."""
    given, path = Training(world, "adamw", dtype=written), step_path(directory, 1)
    if not path.exists():
        given.step(0)
        with Checkpointer(directory, CheckpointConfig(), world, metadata={}, log=print) as checkpointer:
            checkpointer.save(given.encoder, given.optimizer, {"step": 1})
    else:
        read_tensors(open_checkpoint(path), given.encoder, given.optimizer)
    other = Training(world, "adamw", dtype=read)
    read_tensors(open_checkpoint(path), other.encoder, other.optimizer)
    expected, found = moments(given), moments(other)
    assert expected.keys() == found.keys()
    num_encoded = 0
    for name, value in expected.items():
        num_encoded += not found[name].equal(value)
        assert (found[name] - value).norm() <= 0.02 * value.norm(), name
    assert bool(num_encoded) == (read is StateDtype.int8), num_encoded  # decoded codes stand for the same numbers
    other.step(1)


def test_the_type_of_moments_may_change_on_resume(ranks, tmp_path):
    for written, read in ((StateDtype.fp32, StateDtype.int8), (StateDtype.int8, StateDtype.fp32)):
        for size in (2, 1):
            ranks(size, reread, tmp_path / written.value, written, read)


def test_planned_bytes_are_those_of_the_state():
    encoder, _ = built(XLMR_LARGE, num_hidden_layers=2)
    for name in OptimizerName:
        for dtype in StateDtype:
            optim = OptimConfig(name=name, state_dtype=dtype, betas=BETAS)
            optimizer = ShardedOptimizer(optimizer_groups(trained_parameters(encoder, optim)), optim)
            init_optimizer_state(optimizer)
            state = [value for of in optimizer.state.values() for key, value in of.items() if key != "step"]
            spec = spec_of(XLMR_LARGE, num_hidden_layers=2)
            used = step_memory(
                spec,
                ParallelLayout(Strategy.ddp, 1, 1, ""),
                ClusterSpec(ranks=1, per_node=1, memory=2**40),
                StepWorkload(optim=optim),
                reduce_per_step=True,
            )
            assert used.optimizer == pytest.approx(sum(value.nbytes for value in state), rel=1e-6), (name, dtype)
    per_weight = used.optimizer / spec.weights.trained
    assert per_weight < 2.04, per_weight  # codes, scales, and fp32 moments of biases and norms
