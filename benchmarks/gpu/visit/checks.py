"""Numbers of the device against those of the CPU: attention, steps, losses, whole runs; the checks of tests/gpu.

The test functions are called with functions in place of their fixtures: every rank is this process.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.comparison import make_step_context
from benchmarks.gpu.__main__ import OTHER_KINDS
from benchmarks.gpu.models import RandomTexts, load, saved, sized_named, tiny
from benchmarks.gpu.training import loss_of, matmul_rate, rank_batch, timed
from benchmarks.gpu.visit.entries import Entry, Skipped, Values, Visit, recorded_waits
from embedtrain.config.recipe import Attention, Precision
from embedtrain.distributed.world import World
from embedtrain.planning.flops import peak_flops
from embedtrain.training.step import train_step
from tests.gpu import test_attention, test_kinds, test_losses, test_step
from tests.pretend_cuda.steps import Case, Result, on_cpu, take_steps
from tests.pretend_cuda.test_kinds import KINDS, write_inputs
from tests.pretend_cuda.test_steps import TOLERANCES
from tests.training.test_losses import LOSSES

ARCHITECTURES = ("bert", "xlm-roberta", "modernbert", "qwen3", "gemma3_text")
COPY_BYTES = 2**31


def machine(world: World, visit: Visit) -> Values:
    """What the figures depend on, and the rates that nothing exceeds."""
    device, size = world.device, 64 if visit.small else 8192
    rate = matmul_rate(device, size)
    values: dict[str, object] = {
        "machine": measure.machine(),
        f"product of two {size:,} x {size:,} matrices in bf16, TFLOP/s": f"{rate / 1e12:,.3g}",
    }
    if device.type != "cuda":
        return values
    source = torch.empty(2**20 if visit.small else COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device) for _ in range(5))
    peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16)
    return values | {
        "copy, bytes read and written, TB/s": f"{2 * source.numel() / seconds / 1e12:.2f}",
        "dense bf16 peak of the datasheet, TFLOP/s": "not known" if peak is None else f"{peak / 1e12:,.0f}",
        "memory, GiB": f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f}",
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
    }


def step_of(architecture: str, attention: Attention, world: World, visit: Visit) -> Values:
    """Two steps of a small model on the device and on the CPU; how far they differ, relative to the CPU."""
    precision = Precision.bf16 if attention is Attention.packed else Precision.fp32
    case = Case(architecture=architecture, attention=attention, precision=precision)
    expected = take_steps(on_cpu(world), case.load(on_cpu(world)), case.loss, steps=2)
    model = case.load(world)
    actual = take_steps(world, model, case.loss, steps=2)
    tolerance = TOLERANCES[precision]
    values = _differences(actual, expected) | {"allowed, of the loss": tolerance}
    texts = next((note for note in model.notes if note.startswith("texts are ")), "-")
    measure.require(
        values["loss"] <= tolerance and values["gradient norm"] <= 5 * tolerance and values["update"] <= 10 * tolerance,
        f"the device differs from the CPU: {values}",
    )
    return {**values, "texts": texts}


def waits_of(name: str, world: World, visit: Visit) -> Values:
    """What makes the host wait for the device in the second step of a tiny model, besides the step's one event."""
    sized = tiny(sized_named(name))
    with saved(sized, torch.device("cpu")) as folder:
        loaded = load(folder, world, options=("compile=false",), kind=sized.kind)
    context = make_step_context(loaded, world, loss=loss_of(sized.kind))
    batch = rank_batch(RandomTexts(sized.pairs, seed=0), context, loaded, sized.chunk_tokens, 600)
    train_step(context, batch)
    with recorded_waits(world.device) as waits:
        train_step(context, batch)
    measure.require(not waits, f"the host waits at {', '.join(waits)}")
    return {"waits": len(waits)}


def _differences(actual: Result, expected: Result) -> dict[str, float]:
    """The largest relative differences of the steps."""
    pairs = {"loss": (actual.losses, expected.losses), "gradient norm": (actual.grad_norms, expected.grad_norms)}
    found = {name: max(abs(a - b) / abs(b) for a, b in zip(*both, strict=True)) for name, both in pairs.items()}
    found["update"] = float((actual.update - expected.update).norm() / expected.update.norm())
    return found


def in_process(world: World) -> Callable[..., list[Any]]:
    """What the fixtures `ranks` and `device_ranks` are to a test, with one rank: this process."""

    def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 0.0) -> list[Any]:
        assert size == 1, "a check of several ranks"
        return [function(world, *arguments)]

    return run


def check(test: Callable[..., None], *arguments: Any) -> Callable[[World, Visit], Values]:
    """A test of tests/gpu that takes `device_ranks` and these arguments."""

    def run(world: World, visit: Visit) -> Values:
        test(in_process(world), *arguments)
        return {}

    return run


def compared_check(test: Callable[..., None], *arguments: Any) -> Callable[[World, Visit], Values]:
    """A test of tests/gpu that takes `ranks`, on the CPU, `device_ranks` and these arguments."""

    def run(world: World, visit: Visit) -> Values:
        test(in_process(on_cpu(world)), in_process(world), *arguments)
        return {}

    return run


def every_loss(world: World, visit: Visit) -> Values:
    """Values and gradients of every loss; the first one that differs does not hide the others."""
    names, wrong = list(LOSSES)[:: 8 if visit.small else 1], []
    for name in names:
        try:
            test_losses.test_losses_equal_those_on_the_cpu(in_process(on_cpu(world)), in_process(world), name)
        except Exception as error:
            wrong.append(f"{name}: {error or type(error).__name__}")
    measure.require(not wrong, "; ".join(wrong))
    return {"losses": len(names)}


def run_of_kind(name: str, precision: str, tolerance: float, world: World, visit: Visit) -> Values:
    """A whole run, three steps with evaluation, checkpoint and export, on the device and on the CPU."""
    inputs = visit.subfolder("kinds")
    if not any(inputs.iterdir()):
        write_inputs(inputs)
    folder = visit.subfolder(re.sub(r"\W+", "-", f"{name} {precision}"))  # a comma would begin another value
    test_kinds.test_runs_equal_those_on_the_cpu(
        in_process(on_cpu(world)), in_process(world), inputs, Path(folder), name, precision, tolerance
    )
    return {}


def fused_kernels(architecture: str, world: World, visit: Visit) -> Values:
    """Two steps with liger-kernel on the device, recomputed between products, and without it on the CPU."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skipped("liger-kernel is not installed")
    if world.device.type != "cuda":
        raise Skipped("liger-kernel needs a CUDA device")
    return compared_check(test_step.test_fused_kernels, architecture)(world, visit)


KERNEL, MASKED = (
    test_attention.test_packed_texts_equal_single_texts,
    test_attention.test_tokens_that_are_not_attended_to,
)
LAYOUTS_OF_ONE = [name for name, (size, _) in test_step.LAYOUTS.items() if size == 1]
PRECISIONS = (("fp32", 1e-3), ("bf16", 5e-2))
CHEAPEST = next(name for name in KINDS if name.startswith("static embeddings"))
ENTRIES = (
    Entry(name="machine", measure=machine),
    *(
        Entry(
            name=f"packed attention, size and numbers of heads {shape}",
            measure=check(KERNEL, shape),
            varied=shape[0] != 64,
        )
        for shape in sorted(test_attention.SHAPES, key=lambda shape: shape[0] not in (64, 128))
    ),
    Entry(name="packed attention, tokens without attention", measure=check(MASKED, (64, 4, 4))),
    *(
        Entry(
            name=f"two steps of {architecture}, {attention.value}",
            measure=partial(step_of, architecture, attention),
            varied=architecture not in ("modernbert", "qwen3"),
        )
        for attention, architecture in product((Attention.packed, Attention.padded), ARCHITECTURES)
    ),
    *(
        Entry(
            name=f"a run of {name}, {precision}",
            measure=partial(run_of_kind, name, precision, tolerance),
            varied=precision == "bf16" or name != CHEAPEST,
        )
        for (precision, tolerance), name in product(PRECISIONS[:1], KINDS)
    ),
    *(
        Entry(name=f"waits of a step, {name}", measure=partial(waits_of, name), varied=name != OTHER_KINDS[1])
        for name in ("XLM-R-large", *OTHER_KINDS)
    ),
    Entry(name="every loss", measure=every_loss),
    *(
        Entry(name=f"layout: {name}", measure=compared_check(test_step.test_layouts, name), varied=name != "ddp")
        for name in LAYOUTS_OF_ONE
    ),
    *(
        Entry(
            name=f"dropout is replayed: {architecture}",
            measure=check(test_step.test_dropout_is_replayed, architecture, Attention.auto),
            varied=architecture != "xlm-roberta",
        )
        for architecture in ("xlm-roberta", "modernbert", "qwen3")
    ),
    *(
        Entry(
            name=f"fused kernels: {architecture}",
            measure=partial(fused_kernels, architecture),
            varied=architecture != "qwen3",
            unpretended=True,
        )
        for architecture in ("qwen3", "llama", "gemma3_text")
    ),
    Entry(
        name="compiled blocks",
        measure=compared_check(test_step.test_compiled_blocks),
        varied=True,
        unpretended=True,
    ),
    *(
        Entry(
            name=f"a run of {name}, {precision}",
            measure=partial(run_of_kind, name, precision, tolerance),
            varied=True,
        )
        for (precision, tolerance), name in product(PRECISIONS[1:], KINDS)
    ),
)
