"""Memory and time of large losses beside the plain computation: InfoNCE, MaxSim, the head of sparse models."""

from functools import partial

import torch

from benchmarks import late_interaction, losses, sparse
from benchmarks.gpu.training import free_memory
from benchmarks.gpu.visit.entries import Entry, Values, Visit
from benchmarks.measure import require
from embedtrain.distributed.world import World

# Losses and gradient norms of products in TF32 beside fp32.
TF32_TOLERANCE = 1e-2
TILED, PLAIN = "tiled", "plain"


def infonce(queries: int, tf32: bool, names: tuple[str, ...], world: World, visit: Visit) -> Values:
    """InfoNCE of `queries` pairs: extra MiB / s of each computation that fits."""
    case = losses.Case(256 if visit.small else queries, 1, tf32=tf32)
    free = torch.cuda.mem_get_info()[0] if world.device.type == "cuda" else 2**40
    needed = losses.MATRICES * case.score_bytes()
    fitting = [name for name in names if needed < 0.8 * free or name not in (PLAIN, losses.THEIRS)]
    measured = {}
    for name in fitting:
        measured[name] = [losses.measure_here(case, name, world)]
        free_memory()
    losses.compare(case, measured, TF32_TOLERANCE if tf32 else 1e-4)
    cells = dict.fromkeys(names, f"- (needs {needed / 2**30:,.0f} GiB)")
    cells |= {name: f"{result.extra:,.0f} MiB / {result.seconds:.3f} s" for name, (result,) in measured.items()}
    return {"queries x documents": case.name(), **cells}


def maxsim(texts: int, world: World, visit: Visit) -> Values:
    """In-batch negatives by MaxSim beside sentence-transformers."""
    texts, values, norms = 16 if visit.small else texts, dict[str, object](), []
    for side in late_interaction.SIDES[:1] + late_interaction.SIDES[2:4]:
        result = late_interaction.measure_here(side, late_interaction.Shape(texts), world.device)
        values[side.name] = f"{result.extra:,.0f} MiB / {result.seconds:.3f} s"
        norms.append((result.loss, *result.norms))
        free_memory()
    require(all(abs(a / b - 1) <= 1e-3 for norm in norms for a, b in zip(norm, norms[0], strict=True)), f"{norms}")
    return {"queries x documents": f"{texts} x {texts}", **values}


def vocabulary_head(bias: float, world: World, visit: Visit) -> Values:
    """The head of a sparse model beside the logits of all tokens."""
    shape = (128, 128, sparse.WORDS, sparse.HIDDEN)
    if visit.small:
        shape, bias = (4, 8, 300, 32), -1.0
    active, extra, seconds, norms = sparse.measure_here(True, shape, bias, world.device)
    free_memory()
    _, plain_extra, plain_seconds, plain_norms = sparse.measure_here(False, shape, bias, world.device)
    pairs = list(zip(norms, plain_norms, strict=True))
    require(all(abs(a / b - 1) < 1e-3 for a, b in pairs), f"norms of gradients differ: {pairs}")
    return {
        "texts x tokens": f"{shape[0]} x {shape[1]}",
        "active words": f"{active:.1%}",
        "ours": f"{extra:,.0f} MiB / {seconds:.3f} s",
        "logits of all tokens": f"{plain_extra:,.0f} MiB / {plain_seconds:.3f} s",
    }


ENTRIES = (
    Entry(name="InfoNCE", measure=partial(infonce, 32_768, False, (TILED, PLAIN, losses.THEIRS, losses.CACHED))),
    Entry(name="InfoNCE, 65,536", measure=partial(infonce, 65_536, True, (TILED, PLAIN, "ring")), varied=True),
    Entry(name="InfoNCE, a million", measure=partial(infonce, 4**10, True, (TILED, PLAIN)), varied=True, limit=75),
    Entry(name="MaxSim", measure=partial(maxsim, 512)),
    Entry(name="MaxSim, larger", measure=partial(maxsim, 1024), varied=True),
    *(
        Entry(
            name=f"vocabulary head, bias {bias}",
            measure=partial(vocabulary_head, bias),
            varied=bias != sparse.BIASES[0],
        )
        for bias in sparse.BIASES
    ),
)
