"""The rate of a large matrix product, measured on the devices of a run: what its model FLOP/s are a share of (mfu).

A data sheet's rate is one of a clock that a GPU does not keep, and of a CPU nobody knows one.
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

# Of n x n matrices, and seconds that the rounds may take: the largest n that fits. Small ones do not fill a GPU.
SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
SECONDS = {"cuda": 0.4, "cpu": 0.06}
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """What was found.

    Attributes:
        flops: floating point operations a second of one rank, the mean of all.
        size: n.
        dtype: that was multiplied.
    """

    flops: float
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.flops / 1e12:,.3g} TFLOP/s a rank in products of {self.size} x {self.size} matrices in {kind}"


def matmul_rate(world: World, dtype: torch.dtype) -> MatmulRate:
    """Measure it on all ranks at the same time. A collective; below half a second.

    Args:
        world: the ranks.
        dtype: what the run computes in.
    """
    sizes, device = SIZES[world.device.type], world.device
    _seconds(sizes[0], dtype, device, rounds=1)  # kernels are chosen, libraries loaded
    once = _seconds(sizes[0], dtype, device, rounds=1)
    fitting = [n for n in sizes if once * (n / sizes[0]) ** 3 * (ROUNDS + 1) <= SECONDS[device.type]]
    size = min(world.gather(max(fitting, default=sizes[0])))
    mine = 2.0 * size**3 / _seconds(size, dtype, device, rounds=ROUNDS)
    found = gather_vector(torch.tensor([mine], dtype=torch.float64, device=device))
    if device.type == "cuda":  # the matrices are no part of what training takes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return MatmulRate(float(found.mean()), size, dtype)


def _seconds(size: int, dtype: torch.dtype, device: torch.device, *, rounds: int) -> float:
    """Of one product, the median of some, after one that is not counted."""
    # Zeros would be multiplied faster than numbers, for they take less power.
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=source) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return statistics.median(_once(left, right, out) for _ in range(rounds))


def _once(left: Tensor, right: Tensor, out: Tensor) -> float:
    if left.device.type != "cuda":
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# By torch's names: AMX and AVX512 of x86, and what ARM has. Others turn bf16 into fp32 and back for every product.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


def bf16_notes(
    precision: Precision, device: torch.device, capabilities: Mapping[str, object] | None = None
) -> tuple[str, ...]:
    """A line for a run that would be faster in fp32.

    Args:
        precision: of the run.
        device: that computes.
        capabilities: of the processor; default: those of this one, where torch tells them (from 2.12 on).
    """
    if precision is not Precision.bf16 or device.type != "cpu":
        return ()
    if capabilities is None:
        asked = getattr(torch.cpu, "get_capabilities", None)
        capabilities = None if asked is None else asked()
    if not capabilities or any(capabilities.get(name) for name in _INSTRUCTIONS):
        return ()
    return (
        "this processor has no instructions for bf16 (AMX, AVX512-BF16): parallel.precision=fp32 is faster on it, and "
        "more exact",
    )
