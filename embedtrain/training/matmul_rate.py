"""The rate of a large matrix product, measured on the devices of a run: the reference of `mfu`.

Data sheets assume a clock that a GPU does not sustain, and there is none for a CPU.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embedtrain.config.recipe import Precision
from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World

# Sizes n of n x n matrices, of which the largest that fits into `SECONDS` is measured. Small ones do not fill a GPU.
SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
SECONDS = {"cuda": 0.4, "cpu": 0.06}
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """The measured rate."""

    flops: float  # floating point operations per second of one rank, the mean over ranks
    size: int  # n
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.flops / 1e12:,.3g} TFLOP/s per rank in products of {self.size} x {self.size} matrices in {kind}"


def matmul_rate(world: World, dtype: torch.dtype) -> MatmulRate:
    """Measure the rate on all ranks at the same time, within half a second. A collective."""
    sizes, device = SIZES[world.device.type], world.device
    _seconds(sizes[0], dtype, device, rounds=1)  # warm-up: selects kernels, loads libraries
    once = _seconds(sizes[0], dtype, device, rounds=1)
    fitting = [n for n in sizes if once * (n / sizes[0]) ** 3 * (ROUNDS + 1) <= SECONDS[device.type]]
    size = min(world.gather(max(fitting, default=sizes[0])))
    local = 2.0 * size**3 / _seconds(size, dtype, device, rounds=ROUNDS)
    rates = gather_vector(torch.tensor([local], dtype=torch.float64, device=device))
    if device.type == "cuda":  # the matrices do not count as memory of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return MatmulRate(float(rates.mean()), size, dtype)


def _seconds(size: int, dtype: torch.dtype, device: torch.device, *, rounds: int) -> float:
    """Seconds of one product: the median of `rounds`, after a warm-up."""
    # Random numbers, because zeros take less power and are multiplied faster.
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=source) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return statistics.median(time_product(left, right, out) for _ in range(rounds))


def time_product(left: Tensor, right: Tensor, out: Tensor) -> float:
    """Seconds of one product."""
    if left.device.type != "cuda":
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# Names in torch: AMX and AVX512 on x86, and those of ARM. Other CPUs convert bf16 to fp32 and back for every product.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


def bf16_notes(
    precision: Precision, device: torch.device, capabilities: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """A note for a run that would be faster in fp32.

    Args:
        capabilities: of the CPU; default: those of this one, available from torch 2.12 on.
    """
    if precision is not Precision.bf16 or device.type != "cpu":
        return ()
    if capabilities is None:
        get_capabilities = getattr(torch.cpu, "get_capabilities", None)
        capabilities = None if get_capabilities is None else get_capabilities()
    if not capabilities or any(capabilities.get(name) for name in _INSTRUCTIONS):
        return ()
    return (
        "this CPU has no bf16 instructions (AMX, AVX512-BF16): parallel.precision=fp32 is faster and more accurate",
    )
