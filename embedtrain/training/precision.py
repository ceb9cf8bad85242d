"""The types in which a run computes: bf16 or fp32 for the model, TF32 for the products of its loss."""

from dataclasses import replace

import torch
from torch import nn

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.distributed.device import has_bf16
from embedtrain.distributed.sharding import resolve_precision
from embedtrain.distributed.world import World
from embedtrain.planning.model_costs import compute_dtype
from embedtrain.tracking.console import Console
from embedtrain.training.timing import FlopsReference, matmul_rate, peak_flops


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
