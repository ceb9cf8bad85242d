"""The rate that MFU is a share of: what it is made of, that ranks agree on it, that it takes no time."""

import time

import pytest
import torch
from torch.distributed import HashStore

from embedtrain.distributed.world import World
from embedtrain.training import matmul_rate as module
from embedtrain.training.matmul_rate import matmul_rate


def with_products_of(world: World, seconds: list[float]) -> tuple[float, int]:
    """What is found where this rank's products of any size take so long."""
    real = module._once
    module._once = lambda *_: seconds[world.rank]
    try:
        found = matmul_rate(world, torch.float32)
    finally:
        module._once = real
    return found.flops, found.size


def measured(world: World, dtype: torch.dtype) -> tuple[float, str, float]:
    began = time.process_time()  # whatever else runs on the machine
    found = matmul_rate(world, dtype)
    return found.flops, str(found), time.process_time() - began


def test_it_is_the_mean_of_the_ranks_in_products_of_one_size(ranks):
    # In 0.06 s six products fit that take 64 times as long as the smallest, on the slower rank those of that alone.
    assert ranks(1, with_products_of, [1e-4]) == [(2 * 1024**3 / 1e-4, 1024)]
    slower = 2 * 256**3 / 1e-2
    assert ranks(2, with_products_of, [1e-4, 1e-2]) == [(pytest.approx((slower * 100 + slower) / 2), 256)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_measured_in_no_time(ranks, dtype):
    ranks(2, measured, dtype)  # what torch prepares once
    (flops, told, seconds), (same, _, _) = ranks(2, measured, dtype)
    assert flops == same
    assert 1e8 < flops < 1e14
    assert f"in {str(dtype).removeprefix('torch.')}" in told
    assert seconds < 0.4


@pytest.mark.gpu
def test_a_gpu_is_filled():
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        world = World(0, 1, 0, 1, torch.device("cuda", 0))
        flops, told, _ = measured(world, torch.bfloat16)
        plain, _, _ = measured(world, torch.float32)
        _, _, seconds = measured(world, torch.float32)
    finally:
        torch.distributed.destroy_process_group()
    assert "8192 x 8192" in told
    assert flops > 3 * plain, "fp32 is true fp32"
    assert seconds < 0.6
    assert torch.cuda.max_memory_allocated() < 2**20
