"""Every loss on the device, in float32, against the same vectors on the CPU in float64."""

import pytest
import torch
import torch.nn.functional as F

from embedtrain.distributed.world import World
from tests.training.test_losses import LOSSES, WIDTH, cut_for, load_tokenizer, loss_of, rows_for

# Sums of a few hundred float32 products of numbers up to 1; a device adds them in another order than the CPU.
TOLERANCE = 2e-5
NUM_ROWS = 24


def value_and_gradients(world: World, name: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """The loss of random vectors, its metrics, and its gradients at the vectors and its own parameters."""
    config = LOSSES[name]
    batch = cut_for(rows_for(config, NUM_ROWS), world, load_tokenizer(), 10_000, 10_000).to(device)
    loss = loss_of(config).to(device, dtype)
    random = torch.Generator().manual_seed(3)
    num_documents = len(batch.batch_info.document_keys)
    vectors = torch.randn(batch.num_queries + num_documents, WIDTH, generator=random)
    vectors = F.normalize(vectors + 0.5, dim=1).to(device, dtype).requires_grad_()
    output = loss(vectors[: batch.num_queries], vectors[batch.num_queries :], batch.batch_info)
    output.local_loss.backward()
    assert vectors.grad is not None
    actual = {"loss": output.local_loss, "vectors": vectors.grad, **output.metrics}
    actual |= {f"gradient of {name}": p.grad for name, p in loss.named_parameters() if p.grad is not None}
    return {name: value.detach().double().cpu() for name, value in actual.items()}


def on_device(world: World, name: str) -> dict[str, torch.Tensor]:
    return value_and_gradients(world, name, torch.float32, world.device)


def on_cpu(world: World, name: str) -> dict[str, torch.Tensor]:
    return value_and_gradients(world, name, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_those_on_the_cpu(ranks, device_ranks, name):
    (expected,) = ranks(1, on_cpu, name)
    (actual,) = device_ranks(1, on_device, name)
    assert actual.keys() == expected.keys()
    assert expected["vectors"].norm() > 0
    for key, value in expected.items():
        error = (actual[key] - value).norm() / max(value.norm().item(), 1e-2)
        assert error <= TOLERANCE, (key, float(error))
