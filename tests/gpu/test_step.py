"""Training steps on the device in every layout, and dropout, against the same steps on one rank of the CPU."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import SELECTIVE, Attention, LoraConfig, ModelConfig, Precision, Strategy
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step
from tests.small import batch, parallel, small_model, small_tokenizer

# A large eps: with a small one the first update is the gradient's sign, and that of rounding errors where it is 0.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup=0)
NUM_ROWS, STEPS = 12, 3
# Relative, of losses and gradient norms. fp32: sums in another order, through three steps. bf16: activations have 8
# bits, so that each of two layers and the pooling is off by about 2^-8 in every value, and similarities by as much.
TOLERANCE = {Precision.fp32: 1e-4, Precision.bf16: 5e-2}
WEIGHTS_TOLERANCE = {Precision.fp32: 1e-4, Precision.bf16: 2e-2}

Trained = tuple[list[float], list[float], dict[str, Tensor]]


def model_of(architecture: str, *, lora: bool = False) -> ModelConfig:
    """Heads of size 16, which the packed kernel of a GPU supports."""
    return small_model(architecture, lora=LoraConfig(rank=4 if lora else None))


def train(world: World, model: ModelConfig, precision: Precision, options: dict[str, Any]) -> Trained:
    """Losses and gradient norms of three steps on 12 rows, and the trained weights."""
    config = parallel(**{"precision": precision, "cpu_offload": False, "activation_checkpointing": False} | options)
    loaded = load_model(model, config, world, seed=0, tokenizer=small_tokenizer())
    loss = InfoNCE(InfoNCEConfig(temperature=0.2, learn_temperature=True)).to(world.device)
    optimizer = build_optimizer(loaded.encoder, OPTIM, loss)
    backward = Backward(
        loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy(), reduce_per_step=loaded.reduce_per_step
    )
    context = StepContext(
        module=EncoderWithLoss(loaded.encoder, loss),
        schedule=Schedule(optimizer, OPTIM, total_steps=STEPS),
        backward=backward,
        state=TrainState(),
    )
    reports = []
    for step in range(STEPS):
        rows = batch(NUM_ROWS, step, first=NUM_ROWS * step)
        # Chunks of 40 tokens; the graphs of half of them are kept, the others are encoded twice.
        cutting = ChunkOptions(40, activation_tokens=120, pass_overhead_tokens=4)
        local = make_rank_batch(rows, world.rank, world.size, loaded.tokenizer, cutting)
        reports.append(train_step(context, local.pinned() if world.device.type == "cuda" else local))
    weights = {name: whole(p) for name, p in context.module.named_parameters() if p.requires_grad}
    return [report.loss for report in reports], [report.grad_norm for report in reports], weights


def whole(parameter: Tensor) -> Tensor:
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().double().cpu()


def assert_equal_training(actual: Trained, expected: Trained, precision: Precision) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=TOLERANCE[precision])
    assert actual[1] == pytest.approx(expected[1], rel=TOLERANCE[precision])
    assert actual[2].keys() == expected[2].keys()
    for name, weight in expected[2].items():
        error = (actual[2][name] - weight).norm() / max(1.0, float(weight.norm()))
        assert error <= WEIGHTS_TOLERANCE[precision], (name, float(error))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (1, {}),
    "ddp": (1, {"strategy": Strategy.ddp}),
    "fsdp, offload": (1, {"cpu_offload": True}),
    "fsdp, recomputation": (1, {"activation_checkpointing": True}),
    "fsdp, resharding": (1, {"reshard_after_forward": True}),
    "fsdp, 2 ranks": (2, {}),
    "fsdp, 2 ranks, offload": (2, {"cpu_offload": True}),
    "ddp, 2 ranks": (2, {"strategy": Strategy.ddp}),
    "hsdp, 4 ranks": (4, {"strategy": Strategy.hsdp, "shard_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks, device_ranks, layout):
    """fp32 is padded on a GPU and bf16 is packed; on a CPU both are packed."""
    size, options = LAYOUTS[layout]
    for architecture, lora in (("xlm-roberta", False), ("qwen3", False), ("qwen3", True)):
        model = model_of(architecture, lora=lora)
        expected = reference(ranks, architecture, lora)
        for precision in (Precision.bf16, Precision.fp32):
            actual = device_ranks(size, train, model, precision, options)
            assert_equal_training(actual[0], expected, precision)


_references: dict[tuple[str, bool], Trained] = {}


def reference(ranks: Any, architecture: str, lora: bool) -> Trained:
    """One rank, in fp32, padded."""
    key = architecture, lora
    if key not in _references:
        model = replace(model_of(architecture, lora=lora), attention=Attention.padded)
        (_references[key],) = ranks(1, train, model, Precision.fp32, {})
    losses = _references[key][0]
    assert losses[0] != losses[1]
    return _references[key]


@pytest.mark.slow
def test_compiled_blocks(ranks, device_ranks):
    (actual,) = device_ranks(1, train, model_of("qwen3"), Precision.bf16, {"compile": True}, timeout=500)
    assert_equal_training(actual, reference(ranks, "qwen3", False), Precision.bf16)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel: pip install '.[liger]'"
)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3_text"])
def test_fused_kernels(ranks, gpu_ranks, architecture):
    """Of liger-kernel, which is compared with the modules in fp32 and bf16 when the model is loaded."""
    for precision in (Precision.bf16, Precision.fp32):
        options = {"fused_kernels": True, "activation_checkpointing": SELECTIVE}
        (actual,) = gpu_ranks(1, train, model_of(architecture), precision, options, timeout=500)
        assert_equal_training(actual, reference(ranks, architecture, False), precision)


def dropout_gradients(
    world: World, architecture: str, attention: Attention, precision: Precision, kept_tokens: int
) -> tuple[dict[str, Tensor], float]:
    """The gradient with dropout, of graphs that are kept for `kept_tokens` tokens; and the loss."""
    model = replace(small_model(architecture, dropout=0.2), attention=attention)
    loaded = load_model(model, parallel(precision=precision), world, seed=0, tokenizer=small_tokenizer())
    loaded.encoder.train()
    backward = Backward(
        loaded.encoder, InfoNCE(InfoNCEConfig(temperature=0.2)), world, seed=0, dummy=loaded.tokenizer.dummy()
    )
    cutting = ChunkOptions(40, activation_tokens=kept_tokens, pass_overhead_tokens=4)
    local = make_rank_batch(batch(NUM_ROWS), world.rank, world.size, loaded.tokenizer, cutting)
    output, _ = backward(local.to(world.device))
    gradients = {name: whole(p.grad) for name, p in loaded.encoder.named_parameters() if p.grad is not None}
    return gradients, float(output.local_loss)


# A chunk that is encoded again must have the dropout of its first pass, whichever kernel computes with and without a
# gradient. Without replay the gradient differs by about its own size.
@pytest.mark.parametrize("architecture", ["xlm-roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("attention", [Attention.auto, Attention.padded])
def test_dropout_is_replayed(device_ranks, architecture, attention):
    for precision, tolerance in ((Precision.fp32, 1e-4), (Precision.bf16, 2e-2)):
        ((kept, loss),) = device_ranks(1, dropout_gradients, architecture, attention, precision, 10_000)
        ((again, same_loss),) = device_ranks(1, dropout_gradients, architecture, attention, precision, 0)
        assert same_loss == pytest.approx(loss, rel=tolerance)
        norm = torch.stack([gradient.norm() for gradient in kept.values()]).norm()
        for name, gradient in kept.items():
            assert (again[name] - gradient).norm() <= tolerance * norm, name
