"""The reference of MFU: the mean over ranks of one matrix size, measured within half a second."""

import time

import pytest
import torch
from torch.distributed import HashStore

from embedtrain.distributed.signals import Notice
from embedtrain.distributed.world import World
from embedtrain.planning import flops
from embedtrain.planning.flops import FlopsReference, matmul_rate, peak_flops
from embedtrain.training.loop import _Throughput
from embedtrain.training.step import StepReport


def rate_for_durations(world: World, seconds: list[float]) -> tuple[float, int]:
    """The rate and size if a product takes `seconds[rank]`, whatever its size."""
    real = flops.time_product
    flops.time_product = lambda *_: seconds[world.rank]
    try:
        rate = matmul_rate(world, torch.float32)
    finally:
        flops.time_product = real
    return rate.flops, rate.size


def measure(world: World, dtype: torch.dtype) -> tuple[float, str, float]:
    started = time.process_time()  # independent of other work on the machine
    rate = matmul_rate(world, dtype)
    return rate.flops, str(rate), time.process_time() - started


def test_the_rate_is_the_mean_over_ranks_for_one_size(ranks):
    # Six products within 0.06 s: of size 1024 on a fast rank, only of size 256 on a slow one.
    assert ranks(1, rate_for_durations, [1e-4]) == [(2 * 1024**3 / 1e-4, 1024)]
    slow = 2 * 256**3 / 1e-2
    assert ranks(2, rate_for_durations, [1e-4, 1e-2]) == [(pytest.approx((slow * 100 + slow) / 2), 256)] * 2


def test_mfu_is_the_fraction_of_the_datasheet_and_not_of_the_measured_rate():
    report = StepReport(
        loss=0.0, measures={}, grad_norm=0.0, lr=0.0, group_lrs={}, num_rows=1, real_tokens=1, computed_tokens=1,
        flops=4e15, notices=Notice(0),
    )  # fmt: skip
    throughput = _Throughput(reports=[report, report], seconds=10.0)
    known = throughput.rates(2, FlopsReference(peak=1000e12, matmul=800e12))
    assert known == {"model_tflops": 400.0, "mfu": 0.4, "matmul_fraction": 0.5}
    assert throughput.rates(2, FlopsReference(matmul=800e12)).keys() == {"model_tflops", "matmul_fraction"}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_datasheet(name, tflops):
    assert peak_flops(name, torch.bfloat16) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(name, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measurement_is_short(ranks, dtype):
    ranks(2, measure, dtype)  # initialises torch
    (flops, text, seconds), (other_flops, _, _) = ranks(2, measure, dtype)
    assert flops == other_flops
    assert 1e8 < flops < 1e14
    assert f"in {str(dtype).removeprefix('torch.')}" in text
    assert seconds < 0.4


@pytest.mark.gpu
def test_the_matrices_fill_a_gpu():
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        world = World(0, 1, 0, 1, torch.device("cuda", 0))
        before = torch.cuda.memory_allocated()
        bf16_flops, text, _ = measure(world, torch.bfloat16)
        fp32_flops, _, _ = measure(world, torch.float32)
        _, _, seconds = measure(world, torch.float32)
    finally:
        torch.distributed.destroy_process_group()
    assert "8192 x 8192" in text
    assert bf16_flops > 3 * fp32_flops, "fp32 does not use TF32"
    assert seconds < 0.6
    # The matrices are freed: the smallest has 128 MiB. cuBLAS keeps its workspace, 8 to 32 MiB for each of its handles.
    assert torch.cuda.max_memory_allocated() < before + 2**27
