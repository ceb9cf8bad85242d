"""The optimizer updates all trained weights; clipping equals that of one process; dropout is replayed."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import ModelConfig, Precision, Strategy
from embedtrain.data.rows import Documents, Example
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.backward import Backward, chunk_seed
from embedtrain.training.optimizer import build_optimizer, clip_grad_norm
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import ARCHITECTURES, batch, parallel, small_model, small_tokenizer, tokenised


def load(world: World, model: ModelConfig, **options: object) -> LoadedModel:
    return load_model(model, parallel(**options), world, seed=3, tokenizer=small_tokenizer())


def compute_gradient(world: World, model: LoadedModel, step: int = 0, num_rows: int = 8) -> None:
    backward = Backward(
        model.encoder, InfoNCE(InfoNCEConfig(temperature=0.1)), world, seed=0, dummy=model.tokenizer.dummy()
    )
    backward(make_rank_batch(batch(num_rows, step), world.rank, world.size, model.tokenizer, ChunkOptions(10_000)))


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# A post-norm encoder, one without biases, and a decoder.
UPDATED = ("xlm-roberta", "modernbert", "gemma3_text")


def check_updates(world: World, architectures: list[str]) -> None:
    for name in architectures:
        for strategy in (Strategy.fsdp, Strategy.ddp):
            model = load(world, small_model(name), strategy=strategy)
            optimizer = build_optimizer(model.encoder, OptimConfig(lr=1e-2, weight_decay=0.5))
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parameters = dict(model.encoder.named_parameters())
            assert {id(parameter) for parameter in held} == {id(parameter) for parameter in parameters.values()}
            assert len(held) == len(parameters)
            assert all(isinstance(parameter, DTensor) for parameter in held)
            for group in optimizer.param_groups:
                decays = {parameter.dim() > 1 for parameter in group["params"]}
                assert decays == {group["weight_decay"] == 0.5}
            before = {key: unsharded(parameter) for key, parameter in parameters.items()}
            compute_gradient(world, model)
            assert {id(p) for p in model.encoder.parameters()} == {id(parameter) for parameter in held}
            without = [key for key, parameter in parameters.items() if parameter.grad is None]
            assert not without, (name, without)
            optimizer.step()
            for key, parameter in model.encoder.named_parameters():
                assert not unsharded(parameter).equal(before[key]), f"{name} {strategy} {key} did not change"


def test_every_parameter_is_updated(ranks):
    """Also if ranks have empty shards: biases and tables with fewer rows than ranks."""
    ranks(2, check_updates, list(UPDATED))
    ranks(3, check_updates, ["xlm-roberta"])


@pytest.mark.slow
def test_every_parameter_of_other_architectures_is_updated(ranks):
    ranks(2, check_updates, [name for name in ARCHITECTURES if name not in UPDATED])


def changed_fraction(world: World, model: ModelConfig) -> float:
    """Fraction of weights changed by three steps with learning rate 1e-5; in bf16 hardly any would change."""
    loaded = load(world, model, precision=Precision.bf16)
    optimizer = build_optimizer(loaded.encoder, OptimConfig(lr=1e-5))
    # Embeddings of unused tokens have no gradient.
    blocks = {n: p for n, p in loaded.encoder.named_parameters() if "embed" not in n}
    before = {name: unsharded(parameter) for name, parameter in blocks.items()}
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        compute_gradient(world, loaded, step)
        optimizer.step()
    changed = {name: (unsharded(parameter) != before[name]).sum().item() for name, parameter in blocks.items()}
    return sum(changed.values()) / sum(parameter.numel() for parameter in blocks.values())


def test_small_steps_are_not_lost_in_bf16(ranks):
    for name in ("xlm-roberta", "llama"):
        assert min(ranks(2, changed_fraction, small_model(name))) > 0.8


def clip(world: World, model: ModelConfig, max_norm: float | None) -> tuple[float, dict[str, torch.Tensor]]:
    loaded = load(world, model)
    loaded.encoder.eval()
    if world.size > 2:
        assert any(n == 0 for n in world.gather(min(p.to_local().numel() for p in loaded.encoder.parameters())))
    compute_gradient(world, loaded)
    norm = float(clip_grad_norm(loaded.encoder.parameters(), max_norm))
    return norm, {name: unsharded(p.grad) for name, p in loaded.encoder.named_parameters() if p.grad is not None}


def test_clipping_equals_one_process(ranks):
    model = small_model("xlm-roberta")
    ((expected, plain),) = ranks(1, clip, model, None)
    assert expected == pytest.approx(torch.stack([g.norm() for g in plain.values()]).norm().item(), rel=1e-5)
    for world_size in (1, 2, 3, 4):
        answers = ranks(world_size, clip, model, expected / 2)
        assert len({norm for norm, _ in answers}) == 1
        assert answers[0][0] == pytest.approx(expected, rel=1e-5)
        for name, gradients in answers[0][1].items():
            torch.testing.assert_close(gradients, plain[name] / 2, rtol=1e-3, atol=1e-5, msg=name)
    ((norm, untouched),) = ranks(1, clip, model, expected * 2)
    assert norm == expected
    assert all(untouched[name].equal(plain[name]) for name in plain)


def test_clipping_without_gradients():
    assert clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def replay_dropout(world: World, model: ModelConfig) -> None:
    """Chunks that are encoded twice have the same dropout masks both times, hence the same gradient."""
    loaded = load(world, model)
    loaded.encoder.train()
    backward = Backward(
        loaded.encoder, InfoNCE(InfoNCEConfig(temperature=0.1)), world, seed=0, dummy=loaded.tokenizer.dummy()
    )
    rank_batch = make_rank_batch(batch(7), world.rank, world.size, loaded.tokenizer, ChunkOptions(24, 10_000))
    assert rank_batch.num_cached_graphs == len(rank_batch.chunks)
    rank_batch = replace(rank_batch, num_passes=rank_batch.num_passes + 1)  # a dummy on every rank
    results = []
    for kept in (9, 0, 9, 1):
        torch.manual_seed(world.rank * 100 + len(results))  # a different state of the generator
        loaded.encoder.zero_grad()
        output, _ = backward(replace(rank_batch, num_cached_graphs=kept))
        gradients = {n: unsharded(p.grad) for n, p in loaded.encoder.named_parameters() if p.grad is not None}
        results.append((output.local_loss.item(), gradients))
    (kept, first), (cached, second), (again, third), (partly, fourth) = results
    assert kept == again == pytest.approx(cached, rel=1e-6)
    assert kept == pytest.approx(partly, rel=1e-6)
    for name, expected in first.items():
        assert expected.equal(third[name])
        for other in (second, fourth):
            assert (other[name] - expected).norm() <= 1e-6 * max(expected.norm(), torch.tensor(1.0)), name
    # Dropout is active: the masks of another step give another loss.
    other, _ = backward(replace(rank_batch, step=1, num_cached_graphs=0))
    assert other.local_loss.item() != pytest.approx(cached, rel=1e-4)


@pytest.mark.quick("option")
@pytest.mark.parametrize(
    "model",
    [small_model("llama", dropout=0.2), replace(small_model("xlm-roberta"), dropout=0.2)],
    ids=["own", "option"],
)
def test_dropout_is_replayed(ranks, model):
    ranks(2, replay_dropout, model)


def test_every_chunk_has_its_own_seed():
    seeds = {chunk_seed(a, b, c, d) for a in range(3) for b in range(3) for c in range(3) for d in range(3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def outputs_of_equal_texts(world: World, model: ModelConfig, dropout: bool) -> list[list[float]]:
    """What the encoder returns for a rank's texts of a batch in which all are equal, in chunks of two texts."""
    loaded = load(world, model)
    loaded.encoder.train(dropout)
    backward = Backward(
        loaded.encoder, InfoNCE(InfoNCEConfig(temperature=0.1)), world, seed=0, dummy=loaded.tokenizer.dummy()
    )
    rows = tuple(Example("alpha beta gamma", Documents(("alpha beta gamma",))) for _ in range(2 * world.size))
    rank_batch = make_rank_batch(
        tokenised(GlobalBatch(0, rows), loaded.tokenizer),
        world.rank,
        world.size,
        loaded.tokenizer,
        ChunkOptions(10, 10_000),
    )
    outputs: list[list[float]] = []
    handle = loaded.encoder.register_forward_hook(lambda _module, _args, output: outputs.extend(output[0].tolist()))
    backward(rank_batch)
    handle.remove()
    return outputs


@pytest.mark.parametrize("dropout", [True, False])
def test_ranks_chunks_and_texts_have_their_own_dropout_masks(ranks, dropout):
    """Otherwise ranks would drop the same units of different texts, and more ranks would mean less noise per text.

    A text that is its own positive would be equal to it.
    """
    first, second = ranks(2, outputs_of_equal_texts, replace(small_model("xlm-roberta"), dropout=0.2), dropout)
    assert len(first) == len(second) == 4
    outputs = [*first, *second]
    distinct = {tuple(round(value, 4) for value in output) for output in outputs}
    assert len(distinct) == (len(outputs) if dropout else 1)
