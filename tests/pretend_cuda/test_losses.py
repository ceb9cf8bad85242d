"""Every loss in a step on the pretended device, on two ranks: the numbers of the CPU, and few waits for the device."""

import pytest

from embedtrain.config.recipe import Attention, Precision
from embedtrain.distributed.world import World
from tests.pretend_cuda.steps import Case, Result, agree, on_cpu, take_steps
from tests.training.test_losses import LOSSES

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


# The largest number of host reads of a measured step of two ranks, by loss. Whoever saves one lowers the number.
BUDGETS = {
    "infonce": 27,
    "infonce, tiled": 46,
    "infonce, ring": 123,
    "infonce, own negatives": 21,
    "infonce, hardness": 29,
    "matryoshka": 74,
    "matryoshka, ring": 94,
    "siglip": 33,
    "cosent": 4,
    "angle": 4,
    "cosine_mse": 6,
    "contrastive": 4,
    "online_contrastive": 6,
    "triplet": 5,
    "batch_triplet": 13,
    "batch_triplet, all": 14,
    "distill_scores": 9,
    "margin_mse": 5,
    "distill_embeddings": 6,
    "distill_embeddings, projected": 4,
    "combined": 50,
    "softmax": 9,
    "cached": 8,
}


@pytest.mark.parametrize("name", LOSSES)
def test_host_reads(every_loss, name):
    for device, _ in every_loss:
        reads = device[name].reads
        assert reads.total() <= BUDGETS[name], reads
