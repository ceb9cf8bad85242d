"""Encoding in bf16 on the pretended device; tests/inference/test_on_device.py has the rest of inference."""

import pytest
import torch
from torch import Tensor

from embedtrain.config.evaluation import Unshard
from embedtrain.config.recipe import Attention
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from tests.pretend_cuda.steps import Case, on_cpu
from tests.small import text


def encode(world: World, attention: Attention, unshard: Unshard) -> tuple[Tensor, Tensor]:
    """The vectors of the same texts on the device and on the CPU."""
    texts = [text(seed, 1 + seed % 7) for seed in range(12)]
    results = []
    for each_world in (world, on_cpu(world)):
        model = Case(attention=attention).load(each_world)
        encoder = SentenceEncoder.from_model(model, each_world, chunk_tokens=40, unshard=unshard)
        results.append(encoder.encode_all(texts).cpu())
    return results[0], results[1]


@pytest.mark.quick("packed-layer")
@pytest.mark.parametrize(
    ("attention", "unshard"), [(Attention.packed, Unshard.layer), (Attention.padded, Unshard.model)]
)
def test_encoding(cuda_ranks, attention, unshard):
    for device, cpu in cuda_ranks(2, encode, attention, unshard):
        assert (device - cpu).norm(dim=1).max() < 2e-2
        assert torch.pdist(cpu).max() > 0.1
