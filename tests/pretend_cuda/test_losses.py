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


@pytest.mark.parametrize("name", LOSSES)
def test_host_reads(every_loss, name):
    """A measured step waits for the device once, after the backward pass: the ranks agree that all is finite."""
    for device, _ in every_loss:
        (line,) = device[name].reads
        assert line.startswith("training/step.py")
        assert device[name].reads.total() == 1
