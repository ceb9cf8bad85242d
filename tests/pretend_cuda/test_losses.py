"""Every loss in a step on the pretended device, on two ranks: the numbers of the CPU, and few waits for the device."""

import pytest
import torch

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import Attention, Precision
from embedtrain.distributed.world import World
from embedtrain.training.guides import GuideModel
from embedtrain.training.rank_batch import GuideTokenizer
from tests.pretend_cuda.device import host_reads
from tests.pretend_cuda.steps import Case, Result, agree, on_cpu, take_steps
from tests.training.test_losses import LOSSES, rows_for

# fp32, whose texts are padded, agrees with the CPU to its last digits.
CASE = Case(architecture="bert", precision=Precision.fp32, attention=Attention.padded)


def step_with_each(world: World) -> list[dict[str, Result]]:
    """A step with each loss, on the device and on the CPU."""
    results = []
    for place in (world, on_cpu(world)):
        model = CASE.load(place)
        results.append({name: take_steps(place, model, config, measured=True) for name, config in LOSSES.items()})
    return results


@pytest.fixture(scope="module")
def every_loss(cuda_ranks):
    return cuda_ranks(2, step_with_each, timeout=300)


@pytest.mark.parametrize("name", LOSSES)
def test_the_numbers_of_the_cpu(every_loss, name):
    for device, cpu in every_loss:
        agree(device[name], cpu[name], 1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_host_reads(every_loss, name):
    """A measured step waits for the device once, after the backward pass: the ranks agree that all is finite."""
    for device, _ in every_loss:
        (line,) = device[name].reads
        assert line.startswith("training/step.py")
        assert device[name].reads.total() == 1


def encode_with_guide(world: World) -> tuple[dict[str, int], list[torch.Tensor]]:
    """What makes the host wait, and the guide's vectors; rank 0 has more chunks than rank 1."""
    model = CASE.load(world)
    guide = GuideModel(model.encoder, GuideTokenizer(model.tokenizer, "", "", chunk_tokens=24), world)
    rows = rows_for(InfoNCEConfig(), 9).rows[: 6 if world.is_main else 3]
    on_gpu = world.device.type == "cuda"
    chunks = [chunk.map_tensors(torch.Tensor.pin_memory) if on_gpu else chunk for chunk in guide.texts(rows)]
    chunks = [chunk.to(world.device) for chunk in chunks]
    with host_reads() as reads:
        vectors = guide(chunks, len(rows))
    return dict(reads), [part.cpu() for part in (vectors.queries, vectors.documents)]


def guide_on_both(world: World) -> list[tuple[dict[str, int], list[torch.Tensor]]]:
    """On the device and on the CPU."""
    return [encode_with_guide(place) for place in (world, on_cpu(world))]


def test_a_guide_encodes_without_waiting(cuda_ranks):
    for (reads, device), (_, cpu) in cuda_ranks(2, guide_on_both):
        assert reads == {}
        torch.testing.assert_close(device, cpu, atol=1e-5, rtol=0)
