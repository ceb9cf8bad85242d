"""Every loss in a step on the pretended device, on two ranks: the numbers of the CPU, and few waits for the device."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from embedtrain.config.losses import (
    DistillScoresConfig,
    Implementation,
    InfoNCEConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    Similarity,
    XTRConfig,
)
from embedtrain.config.recipe import Attention, Precision
from embedtrain.data.rows import TextFormat
from embedtrain.distributed.world import World
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.types import BatchInfo, Loss
from embedtrain.training.guides import GuideModel
from embedtrain.training.rank_batch import GuideTokenizer
from tests.losses.token_vectors import token_batch
from tests.marks import slow_but
from tests.pretend_cuda.device import host_reads
from tests.pretend_cuda.steps import Case, Result, agree, on_cpu, take_steps
from tests.training.test_losses import LOSSES, rows_for

# fp32, whose texts are padded, agrees with the CPU to its last digits.
CASE = Case(architecture="bert", precision=Precision.fp32, attention=Attention.padded)


# A scalar, chunks of a ring, codes, a choice of rows, and several losses; tests/training/test_waits.py has all losses.
QUICK = ("infonce", "matryoshka, ring", "quantised", "batch_triplet", "combined")


def step_with_each(world: World, names: tuple[str, ...]) -> list[dict[str, Result]]:
    """A step with each loss, on the device and on the CPU."""
    results = []
    for each_world in (world, on_cpu(world)):
        model = CASE.load(each_world)
        results.append({name: take_steps(each_world, model, LOSSES[name], measured=True) for name in names})
    return results


@pytest.fixture(scope="module")
def steps(cuda_ranks):
    """Name of a loss -> of each rank, its step on the device and on the CPU."""

    @cache
    def take(names: tuple[str, ...]) -> list[list[dict[str, Result]]]:
        return cuda_ranks(2, step_with_each, names, timeout=580)

    others = tuple(name for name in LOSSES if name not in QUICK)
    return lambda name: [(device[name], cpu[name]) for device, cpu in take(QUICK if name in QUICK else others)]


@pytest.mark.parametrize("name", slow_but(QUICK, LOSSES))
def test_the_numbers_of_the_cpu(steps, name):
    for device, cpu in steps(name):
        agree(device, cpu, 1e-5)


@pytest.mark.parametrize("name", slow_but(QUICK, LOSSES))
def test_host_reads(steps, name):
    """A measured step waits for the device once, after the backward pass: the ranks agree that all is finite."""
    for device, _ in steps(name):
        (line,) = device.reads
        assert line.startswith("training/step.py")
        assert device.reads.total() == 1


def encode_with_guide(world: World) -> tuple[dict[str, int], list[torch.Tensor]]:
    """What makes the host wait, and the guide's vectors; rank 0 has more chunks than rank 1."""
    model = CASE.load(world)
    guide = GuideModel(
        model.encoder, GuideTokenizer(model.tokenizer, TextFormat(), chunk_tokens=24), Similarity.cosine, world
    )
    rows = rows_for(InfoNCEConfig(), 9).rows[: 6 if world.is_main else 3]
    on_gpu = world.device.type == "cuda"
    chunks = [chunk.map_tensors(torch.Tensor.pin_memory) if on_gpu else chunk for chunk in guide.texts(rows)]
    chunks = [chunk.to(world.device) for chunk in chunks]
    with host_reads() as reads:
        vectors = guide(chunks, len(rows))
    return dict(reads), [part.cpu() for part in (vectors.queries, vectors.documents)]


def guide_on_both(world: World) -> list[tuple[dict[str, int], list[torch.Tensor]]]:
    """On the device and on the CPU."""
    return [encode_with_guide(each_world) for each_world in (world, on_cpu(world))]


def test_a_guide_encodes_without_waiting(cuda_ranks):
    for (reads, device), (_, cpu) in cuda_ranks(2, guide_on_both):
        assert reads == {}
        torch.testing.assert_close(device, cpu, atol=1e-5, rtol=0)


TOKEN_LOSSES = (
    *(
        InfoNCEConfig(implementation=implementation, learn_temperature=True)
        for implementation in list(Implementation)[1:]
    ),
    InfoNCEConfig(in_batch_negatives=False, false_negative_margin=0.2),
    XTRConfig(top_k=4),
    XTRConfig(top_k=4, implementation=Implementation.ring),
    DistillScoresConfig(normalize_scores=True),
    MarginMSEConfig(matryoshka=MatryoshkaConfig(dims=[6, 3])),
)


def token_losses(world: World) -> list[tuple[dict[str, int], list[torch.Tensor]]]:
    """What makes the host wait in each loss of late interaction, and its value and gradients."""
    batch, rows_of_rank, results = token_batch(), [[0, 1], [2, 3, 4]], []
    for each_world in (world, on_cpu(world)):
        for config in TOKEN_LOSSES:
            loss = build_loss(config, dimension=6, seed=0, score=MaxSim(mean=True)).to(each_world.device)
            *parts, info = batch.of_rank(each_world.rank, rows_of_rank, torch.float32)
            parts = [part.with_values(part.values.detach().to(each_world.device).requires_grad_()) for part in parts]
            info = replace(info.to(each_world.device), prepared=_prepared(loss, info, each_world.device))
            with host_reads() as reads:
                local_loss = loss(*(Encoded((part,)) for part in parts), info).local_loss
                local_loss.backward()
            results.append(
                (dict(reads), [value.detach().cpu() for value in (local_loss, *(part.values.grad for part in parts))])
            )
    return results


def _prepared(loss: Loss, info: BatchInfo, device: torch.device) -> dict:
    return {key: value.map_tensors(lambda tensor: tensor.to(device)) for key, value in loss.prepare(info, 6).items()}


def test_losses_of_token_vectors(cuda_ranks):
    for results in cuda_ranks(2, token_losses):
        device, cpu = results[: len(TOKEN_LOSSES)], results[len(TOKEN_LOSSES) :]
        for config, (reads, ours), (_, expected) in zip(TOKEN_LOSSES, device, cpu, strict=True):
            assert reads == {}, config
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
