"""Training steps in bf16 with random weights, beside sentence-transformers on the same texts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from benchmarks.comparison import (
    SCALE,
    Batches,
    OurSteps,
    Rounds,
    StepRunner,
    TheirSteps,
    comparison_cells,
    padding_factor,
)
from benchmarks.gpu.models import Sized, load, saved, sized_named
from benchmarks.gpu.training import MATMUL, free_memory, matmul_rate
from benchmarks.measure import ROUNDS, WrongResult, interleave, markdown, unit
from benchmarks.workloads import Workload, question_passage, web
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.planning.flops import model_flops
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead

TITLE = "A training step in bf16 with random weights, against sentence-transformers"
STEPS = 4
MINI_BATCH = 32
# Absolute, for a loss of about 6: weights are random, and theirs may compute the loss itself in bf16.
LOSS_TOLERANCE = 0.3
AUTOCAST, WEIGHTS, CACHED = "bf16=True: autocast", "bf16 weights", f"Cached, mini_batch_size={MINI_BATCH}, autocast"
# Ours, by the fraction of tokens whose graphs are cached, and theirs.
COMPARED = ((1.0, AUTOCAST), (1.0, WEIGHTS), (0.0, CACHED), (0.5, CACHED))


def measure(name: str, *, small: bool = False) -> str:
    """Measure the model `name`; `small`: a tiny one of its architecture, on any device."""
    sized = sized_named(name, small=small)
    pairs, steps = (4, 1) if small else (sized.pairs, STEPS)
    workloads = [make(num_pairs=pairs, steps=steps) for make in (question_passage, web)]
    return table(sized, workloads[:1] if small else workloads, 64 if small else MATMUL)


def table(sized: Sized, workloads: Sequence[Workload], matmul: int = MATMUL) -> str:
    with joined_world() as world, saved(sized, world.device) as folder:
        rate = matmul_rate(world.device, matmul)
        rows = [row for workload in workloads for row in _rows(sized, workload, folder, world, rate)]
    per_s = f"real tokens / {unit()}"
    header = ["texts", "ours, graphs cached", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio",
              "loss difference",
              "fraction of the matmul rate, ours", "fraction of the matmul rate, theirs",
              "computed / real tokens, ours", "computed / real tokens, theirs"]  # fmt: skip
    return markdown(header, rows)


def _rows(sized: Sized, workload: Workload, folder: Path, world: World, rate: float) -> list[list[str]]:
    loaded = load(folder, world)
    batches = Batches(workload.data(ROUNDS * workload.steps, loaded.tokenizer), workload.steps)
    per_text = model_flops(loaded.encoder)
    flops = [
        sum(float(per_text.of(torch.from_numpy(batch.tokens.lengths))) for batch in batches(number) if batch.tokens)
        for number in range(1, ROUNDS + 1)
    ]
    del loaded
    overhead = pass_overhead(on_gpu=world.device.type == "cuda", sharded=False)
    options = ChunkOptions(sized.chunk_tokens, pass_overhead_tokens=overhead)
    makers: dict[float | str, Callable[[], StepRunner]] = {
        **{c: lambda c=c: OurSteps(load(folder, world), world, batches, options, c) for c in (1.0, 0.0, 0.5)},  # type: ignore[misc]
        **{n: lambda n=n: their_steps(n, workload, folder, world, batches) for n in (AUTOCAST, WEIGHTS, CACHED)},  # type: ignore[misc]
    }
    rounds = {name: _rounds(make) for name, make in makers.items()}
    label = f"{workload.num_pairs} pairs, {workload.name}"
    return [
        [label, f"{cached:.0%}", name, *_cells(rounds[cached], rounds[name], flops, rate)] for cached, name in COMPARED
    ]


def _rounds(make: Callable[[], StepRunner]) -> Rounds | None:
    """The rounds of one side, alone on the device: two large models do not fit. None: out of memory."""
    try:
        return interleave(make())[0]
    except torch.OutOfMemoryError:
        return None
    finally:
        free_memory()


def _cells(ours: Rounds | None, theirs: Rounds | None, flops: Sequence[float], rate: float) -> list[str]:
    if ours is None or theirs is None:
        sides = [name for name, rounds in (("ours", ours), ("theirs", theirs)) if rounds is None]
        return [f"out of memory: {' and '.join(sides)}", *["-"] * 7]
    try:
        cells = comparison_cells("theirs", ours, theirs, LOSS_TOLERANCE)
    except WrongResult as error:
        return [f"wrong: {str(error).split(': [')[0]}", *["-"] * 7]
    fractions = [
        max(count / timed.seconds for count, timed in zip(flops, rounds, strict=True)) / rate
        for rounds in (ours, theirs)
    ]
    return [*cells, *(f"{fraction:.1%}" for fraction in fractions), padding_factor(ours), padding_factor(theirs)]


def their_steps(name: str, workload: Workload, folder: Path, world: World, batches: Batches) -> TheirSteps:
    """The steps of sentence-transformers: AUTOCAST, WEIGHTS or CACHED."""
    dtype = torch.bfloat16 if name == WEIGHTS else torch.float32
    model = SentenceTransformer(str(folder), device=str(world.device), model_kwargs={"dtype": dtype})
    model.max_seq_length = workload.max_length
    if name == CACHED:
        loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=MINI_BATCH)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
    return TheirSteps(model, loss, Precision.fp32 if name == WEIGHTS else Precision.bf16, batches)
