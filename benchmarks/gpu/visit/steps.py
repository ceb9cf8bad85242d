"""Training steps of XLM-R-large and Qwen3-0.6B: eager, compiled, recomputed, with fused kernels, and beside theirs."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.comparison import Batches, OurSteps, comparison_cells
from benchmarks.gpu.models import Sized, load, sized_named
from benchmarks.gpu.theirs import AUTOCAST, LOSS_TOLERANCE, their_steps
from benchmarks.gpu.training import COMPILED, SELECTIVE, Model, Variant, free_memory, train
from benchmarks.gpu.visit.entries import Entry, Skipped, Values, Visit, batch_share
from benchmarks.measure import interleave, unit
from benchmarks.workloads import question_passage
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.planning.flops import peak_flops
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead

MODELS = ("XLM-R-large", "Qwen3-0.6B")
LENGTH = 512
WARM, STEPS = 3, 8
EAGER = ("compile=false",)
VARIANTS = (
    Variant(name="eager"),
    Variant(name="compiled", options=(COMPILED,)),
    Variant(name="selective recomputation", options=(*EAGER, SELECTIVE)),
    Variant(name="compiled, selective recomputation", options=(COMPILED, SELECTIVE)),
    Variant(name="no graphs cached", cached=0.0),
    Variant(name="eager, batches prepared meanwhile", prepares=True),
)
# Skipped without liger-kernel, and on devices without CUDA.
FUSED = Variant(name="fused kernels", options=(*EAGER, "fused_kernels=true"))


def step_time(name: str, variant: Variant, world: World, visit: Visit) -> Values:
    """Steps on texts of LENGTH tokens."""
    sized = sized_named(name, small=visit.small).of_length(LENGTH)
    sized = replace(sized, pairs=max(2, int(sized.pairs * batch_share(world.device))))
    return train_values(sized, variant, world, visit)


def train_values(sized: Sized, variant: Variant, world: World, visit: Visit) -> Values:
    """Cost of steps of a model; Skipped if a recipe does not have the variant's options."""
    warm, steps = (1, 1) if visit.small else (WARM, STEPS)
    folder = visit.model(sized, world.device)
    try:
        cost = train(Model(sized), variant, folder, world, warm=warm, steps=steps)
    except ConfigError as error:
        raise Skipped(str(error)) from error
    finally:
        free_memory()
    rate = cost.flops / cost.seconds
    peak = None
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device), torch.bfloat16)
    return {
        "tokens a step": f"{cost.real / cost.steps:,.0f}",
        "s a step": f"{cost.seconds / cost.steps:.3f}",
        "real tokens / s": f"{cost.real / cost.seconds:,.0f}",
        "model TFLOP/s": f"{rate / 1e12:,.3g}",
        "MFU": "-" if peak is None else f"{rate / peak:.1%}",
        "graphs cached": f"{cost.cached:.0%}",
        "GiB while loading": f"{cost.loading / 2**30:.1f}",
        "GiB in training": f"{cost.peak / 2**30:.1f}",
        "KiB a cached token": f"{cost.bytes_per_token / 1024:,.0f}",
        "loss": f"{cost.loss:.4f}",
    }


def beside_theirs(name: str, options: tuple[str, ...], world: World, visit: Visit) -> Values:
    """Steps of both on the same texts, alternating; both models are in memory, so batches are half as large."""
    sized = sized_named(name, small=visit.small)
    pairs = max(2, int(sized.pairs * batch_share(world.device) / 2))
    workload = question_passage(num_pairs=pairs, steps=1 if visit.small else 2)
    folder = visit.model(sized, world.device)
    try:
        loaded = load(folder, world, options=options)
        batches = Batches(workload.data(3 * workload.steps, loaded.tokenizer), workload.steps)
        overhead = pass_overhead(on_gpu=world.device.type == "cuda", sharded=False)
        ours = OurSteps(loaded, world, batches, ChunkOptions(sized.chunk_tokens, pass_overhead_tokens=overhead))
        theirs = their_steps(AUTOCAST, workload, folder, world, batches)
        cells = comparison_cells(name, *interleave(ours, theirs), LOSS_TOLERANCE)
        del loaded, ours, theirs
    finally:
        free_memory()
    names = (f"ours, real tokens / {unit()}", f"theirs, real tokens / {unit()}", "ratio", "loss difference")
    return {"pairs": pairs, **dict(zip(names, cells, strict=True))}


def _entries(name: str) -> list[Entry]:
    eager, compiled, *rest = (
        Entry(
            name=f"{name}, {variant.name}",
            measure=partial(step_time, name, variant),
            unpretended=COMPILED in variant.options or variant is FUSED,
        )
        for variant in (*VARIANTS, *([FUSED] if name == MODELS[1] else []))
    )
    theirs = [
        Entry(
            name=f"{name} beside sentence-transformers, {label}",
            measure=partial(beside_theirs, name, options),
            varied=options != EAGER,
            unpretended=True,
        )
        for label, options in (("eager", EAGER), ("compiled", (COMPILED,)))
    ]
    return [eager, compiled, theirs[0], *rest, theirs[1]]


ENTRIES = tuple(entry for name in MODELS for entry in _entries(name))
