"""On a GPU: training an XLM-R-base with random weights beside sentence-transformers, all in bf16."""

from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from benchmarks.gpu import LEFT_OUT
from benchmarks.gpu_models import MODELS, Sized, load, saved
from benchmarks.measure import ROUNDS, interleave, markdown, unit
from benchmarks.sides import SCALE, Batches, OurSteps, Side, TheirSteps, compared, computed
from benchmarks.workloads import Workload, question_passage, web
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead

TITLE = f"On a GPU: a training step in bf16, {MODELS[0].name} with random weights, against sentence-transformers"
WORKLOADS = (question_passage(num_pairs=512, steps=4), web(num_pairs=512, steps=4))
MINI_BATCH = 128
# Random weights, and theirs may compute the loss itself in bf16: of a loss of about 6.
LOSS_APART = 0.3
AUTOCAST, WEIGHTS, CACHED = "bf16=True: autocast", "bf16 weights", f"Cached, mini_batch_size={MINI_BATCH}, autocast"
# Ours, by the share of tokens whose graphs are kept, and theirs that it is held against.
COMPARED = ((1.0, AUTOCAST), (1.0, WEIGHTS), (0.0, CACHED), (0.5, CACHED))


def measure() -> str:
    return table(MODELS[0], WORKLOADS) if torch.cuda.is_available() else LEFT_OUT


def table(sized: Sized, workloads: Sequence[Workload]) -> str:
    """The same on any device."""
    with joined_world() as world, saved(sized, world.device) as folder:
        rows = [row for workload in workloads for row in _rows(sized, workload, folder, world)]
    per_s = f"real tokens / {unit()}"
    header = ["texts", "ours, graphs kept", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss apart"]
    return markdown([*header, "computed a real token, ours", "theirs"], rows)


def _rows(sized: Sized, workload: Workload, folder: Path, world: World) -> list[list[str]]:
    data = workload.data(ROUNDS * workload.steps, load(folder, world).tokenizer)
    batches = Batches(data, workload.steps)
    cost = pass_overhead(on_gpu=world.device.type == "cuda", sharded=False)
    mine: dict[float, Side] = {
        keep: OurSteps(
            load(folder, world), world, batches, ChunkOptions(sized.chunk_tokens, pass_overhead_tokens=cost), keep
        )
        for keep in dict.fromkeys(keep for keep, _ in COMPARED)
    }
    theirs: dict[str, Side] = {
        name: _theirs(name, workload, folder, world, batches) for name in (AUTOCAST, WEIGHTS, CACHED)
    }
    timed = interleave(*mine.values(), *theirs.values())
    ours = dict(zip(mine, timed[: len(mine)], strict=True))
    others = dict(zip(theirs, timed[len(mine) :], strict=True))
    return [
        [
            f"{workload.num_pairs} pairs, {workload.name}",
            f"{keep:.0%}",
            name,
            *compared(f"gpu_theirs, {workload.name}, {name}", ours[keep], others[name], LOSS_APART),
            computed(ours[keep]),
            computed(others[name]),
        ]
        for keep, name in COMPARED
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
