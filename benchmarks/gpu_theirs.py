"""On a GPU: training XLM-R-base with random weights in bf16, compared with sentence-transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from benchmarks.comparison import SCALE, Batches, OurSteps, StepRunner, TheirSteps, comparison_cells, padding_factor
from benchmarks.gpu import SKIPPED
from benchmarks.gpu_models import MODELS, Sized, load, saved
from benchmarks.measure import ROUNDS, interleave, markdown, unit
from benchmarks.workloads import Workload, question_passage, web
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead

TITLE = f"On a GPU: a training step in bf16, {MODELS[0].name} with random weights, against sentence-transformers"
WORKLOADS = (question_passage(num_pairs=512, steps=4), web(num_pairs=512, steps=4))
MINI_BATCH = 128
# Absolute, for a loss of about 6: weights are random, and theirs may compute the loss itself in bf16.
LOSS_TOLERANCE = 0.3
AUTOCAST, WEIGHTS, CACHED = "bf16=True: autocast", "bf16 weights", f"Cached, mini_batch_size={MINI_BATCH}, autocast"
# Ours, by the fraction of tokens whose graphs are cached, and theirs.
COMPARED = ((1.0, AUTOCAST), (1.0, WEIGHTS), (0.0, CACHED), (0.5, CACHED))


def measure() -> str:
    return table(MODELS[0], WORKLOADS) if torch.cuda.is_available() else SKIPPED


def table(sized: Sized, workloads: Sequence[Workload]) -> str:
    """Like `measure`, on any device."""
    with joined_world() as world, saved(sized, world.device) as folder:
        rows = [row for workload in workloads for row in _rows(sized, workload, folder, world)]
    per_s = f"real tokens / {unit()}"
    header = [
        "texts",
        "ours, graphs cached",
        "theirs",
        f"ours, {per_s}",
        f"theirs, {per_s}",
        "ratio",
        "loss difference",
    ]
    return markdown([*header, "computed / real tokens, ours", "computed / real tokens, theirs"], rows)


def _rows(sized: Sized, workload: Workload, folder: Path, world: World) -> list[list[str]]:
    data = workload.data(ROUNDS * workload.steps, load(folder, world).tokenizer)
    batches = Batches(data, workload.steps)
    overhead = pass_overhead(on_gpu=world.device.type == "cuda", sharded=False)
    ours: dict[float, StepRunner] = {
        cached: OurSteps(
            load(folder, world), world, batches, ChunkOptions(sized.chunk_tokens, pass_overhead_tokens=overhead), cached
        )
        for cached in dict.fromkeys(cached for cached, _ in COMPARED)
    }
    theirs: dict[str, StepRunner] = {
        name: _theirs(name, workload, folder, world, batches) for name in (AUTOCAST, WEIGHTS, CACHED)
    }
    timed = interleave(*ours.values(), *theirs.values())
    our_rounds = dict(zip(ours, timed[: len(ours)], strict=True))
    their_rounds = dict(zip(theirs, timed[len(ours) :], strict=True))
    return [
        [
            f"{workload.num_pairs} pairs, {workload.name}",
            f"{cached:.0%}",
            name,
            *comparison_cells(
                f"gpu_theirs, {workload.name}, {name}", our_rounds[cached], their_rounds[name], LOSS_TOLERANCE
            ),
            padding_factor(our_rounds[cached]),
            padding_factor(their_rounds[name]),
        ]
        for cached, name in COMPARED
    ]


def _theirs(name: str, workload: Workload, folder: Path, world: World, batches: Batches) -> TheirSteps:
    dtype = torch.bfloat16 if name == WEIGHTS else torch.float32
    model = SentenceTransformer(str(folder), device=str(world.device), model_kwargs={"dtype": dtype})
    model.max_seq_length = workload.max_length
    if name == CACHED:
        loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=MINI_BATCH)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
    return TheirSteps(model, loss, Precision.fp32 if name == WEIGHTS else Precision.bf16, batches)
