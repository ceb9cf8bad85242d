"""The types in which a run computes: bf16 or fp32 for the model, TF32 for its loss; and the rates of the device."""

import re
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.device import has_bf16
from embedtrain.distributed.sharding import resolve_precision
from embedtrain.distributed.world import World
from embedtrain.planning.model_costs import compute_dtype
from embedtrain.tracking.console import Console

# TFLOP/s of dense products in bf16 with sums in fp32, by the name of the device: what the datasheets say, half of the
# figure where that is for sparse matrices.
_BF16_PEAKS = (
    (r"B200", 2250.0),
    (r"H200 NVL", 835.0),
    (r"GH200|H200|H100 80GB HBM3|H100 SXM", 989.4),
    (r"H100 NVL", 835.0),
    (r"H100 PCIe", 756.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)


@dataclass(frozen=True, slots=True)
class FlopsReference:
    """FLOP/s of one device in dense products, of the type that the model computes in; None if it is not known."""

    peak: float | None = None  # of the datasheet: the reference of `mfu`
    matmul: float | None = None  # measured: the reference of `matmul_fraction`


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense peak of the datasheet; None for other types than bf16, other devices, and parts of a device (MIG)."""
    if dtype != torch.bfloat16 or "MIG" in device_name:
        return None
    return next(
        (tflops * 1e12 for name, tflops in _BF16_PEAKS if re.search(rf"\b({name})\b", device_name)),
        None,
    )


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


def choose_precision(recipe: Recipe, run_dir: RunDirectory, world: World, console: Console) -> Recipe:
    """The recipe with the precision of the run that it resumes, or else that of the ranks, if it chooses none.

    A collective; all ranks raise the same errors.
    """
    parallel, device = recipe.parallel, world.device
    saved: str | None = None
    with world.fail_together("reading the precision of the run"):
        if world.is_main and parallel.precision is Precision.auto:
            saved = run_dir.saved_precision()
    saved = world.broadcast(saved)
    precision = resolve_precision(parallel.precision if saved is None else Precision(saved), world)
    if precision is Precision.bf16 and device.type == "cpu" and not has_bf16(device):
        console.note("this CPU has no bf16 instructions (AMX, AVX512-BF16): parallel.precision=fp32 is faster")
    elif parallel.precision is Precision.auto:
        reason = f"all {device.type.upper()}s have instructions for it"
        if saved is not None:
            reason = "as before"
        elif precision is Precision.fp32:
            reason = f"not every {device.type.upper()} has bf16 instructions"
        console.note(f"precision: {precision.value}, {reason} (parallel.precision)")
    return replace(recipe, parallel=replace(parallel, precision=precision))


def flops_reference(recipe: Recipe, world: World, console: Console) -> FlopsReference:
    """The references of `mfu` and `matmul_fraction` on GPUs.

    The rate is measured before the model is loaded, because that needs memory as well. On CPUs there is none: the rate
    in one product is no limit, because clocks and threads differ between products and training.
    """
    if world.device.type != "cuda":
        return FlopsReference()
    dtype = compute_dtype(recipe.parallel.precision)
    rate, peak = matmul_rate(world, dtype), peak_flops(torch.cuda.get_device_name(world.device), dtype)
    console.note(f"matmul_fraction is relative to {rate}")
    if peak is not None:
        console.note(f"mfu is relative to the {peak / 1e12:,.0f} TFLOP/s of the datasheet")
    return FlopsReference(peak, rate.flops)


def use_tf32_products(loss: nn.Module, precision: Precision) -> None:
    """Use TF32 for the matrix products of the loss in bf16 runs: 10-bit mantissas, fp32 sums, several times faster.

    Embeddings computed in bf16 have 8 significant bits, so nothing is lost. TF32 is limited to the loss, because rotary
    position embeddings are fp32 products as well, and angles of position 3000 rounded to 11 bits are other positions.

    The forward pass of a loss contains its large products and their gradients. The previous setting is restored after
    each pass. This setting of torch 2.9 and later must not be mixed with the earlier ones: torch and torch.compile
    raise while it is in force.
    """
    if precision is not Precision.bf16:
        return
    previous: list[str] = []

    def enable(*_: object) -> None:
        previous.append(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def restore(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = previous.pop()

    loss.register_forward_pre_hook(enable)
    loss.register_forward_hook(restore, always_call=True)
