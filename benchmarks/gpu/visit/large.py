"""Qwen3-4B with adapters, whole and in fp8, the stall of a checkpoint, and a step under compute-sanitizer."""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import torch

from benchmarks.comparison import OPTIM
from benchmarks.gpu.checkpoints import HEADER, rows
from benchmarks.gpu.models import sized_named
from benchmarks.gpu.training import Variant
from benchmarks.gpu.visit.entries import Entry, Skipped, Values, Visit, batch_share
from benchmarks.gpu.visit.steps import EAGER, LENGTH, train_values
from benchmarks.measure import require
from embedtrain.config.optim import StateDtype
from embedtrain.config.recipe import Attention, LoraConfig
from embedtrain.distributed.world import World, joined_world
from tests.pretend_cuda.steps import Case, take_steps

RECOMPUTED = (*EAGER, "activation_checkpointing=true")
VARIANTS = (
    Variant(name="LoRA", options=EAGER, lora=LoraConfig(rank=16)),
    Variant(
        name="moments in bf16", options=RECOMPUTED, optim=replace(OPTIM, state_dtype=StateDtype.bf16, betas=[0.9, 0.99])
    ),
    Variant(name="moments in int8", options=RECOMPUTED, optim=replace(OPTIM, state_dtype=StateDtype.int8)),
)

COMPILED = ("compile=true", "activation_checkpointing=true")
OF_FP8 = tuple(
    Variant(name=f"{name}, compiled", options=(*COMPILED, *more), optim=VARIANTS[-1].optim)
    for name, more in (("products in bf16", ()), ("products in fp8", ("fp8=true",)))
)


def large_model(variant: Variant, world: World, visit: Visit) -> Values:
    """Steps of Qwen3-4B."""
    sized = sized_named("Qwen3-4B", small=visit.small).of_length(LENGTH)
    sized = replace(sized, pairs=max(2, int(sized.pairs * batch_share(world.device))))
    return train_values(sized, variant, world, visit)


def products(variant: Variant, world: World, visit: Visit) -> Values:
    """Steps of Qwen3-4B that are compared: products in bf16 and in fp8, which a CPU emulates."""
    if importlib.util.find_spec("torchao") is None:
        raise Skipped("needs torchao")
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
        raise Skipped("needs compute capability 8.9")
    return large_model(variant, world, visit)


def stall(world: World, visit: Visit) -> Values:
    """How long a checkpoint of XLM-R-large stops training, asynchronous or not."""
    found = rows(sized_named("XLM-R-large", small=visit.small), world, 1 if visit.small else 5)
    return {
        f"{name}, asynchronous={asynchronous}": value
        for _, size, asynchronous, *values in found
        for name, value in zip(HEADER[3:], values, strict=True)
    } | {"GB": found[0][1]}


def sanitized(world: World, visit: Visit) -> Values:
    """One step of a small packed model, each of whose memory accesses is checked."""
    program = shutil.which("compute-sanitizer")
    if program is None or world.device.type != "cuda":
        raise Skipped("needs a CUDA device and the program compute-sanitizer")
    step = f"from {__name__} import one_step; one_step()"
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", step]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    require(done.returncode == 0, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return {"result": summary[-1].strip("= ") if summary else "no errors"}


def one_step() -> None:
    """What `sanitized` runs."""
    with joined_world() as world:
        case = Case(attention=Attention.packed)
        take_steps(world, case.load(world), case.loss)


ENTRIES = (
    *(Entry(name=f"Qwen3-4B, {variant.name}", measure=partial(large_model, variant)) for variant in VARIANTS),
    *(
        Entry(name=f"Qwen3-4B, {variant.name}", measure=partial(products, variant), unpretended=True)
        for variant in OF_FP8
    ),
    Entry(name="the stall of a checkpoint of XLM-R-large", measure=stall),
    Entry(name="memcheck of one step", measure=sanitized, limit=120),
)
