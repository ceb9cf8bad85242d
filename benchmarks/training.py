"""A training step compared with sentence-transformers: same model, texts, batch, loss and optimizer."""

from collections.abc import Sequence

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from benchmarks.comparison import (
    SCALE,
    TOLERANCE,
    Batches,
    OurSteps,
    StepRunner,
    TheirSteps,
    comparison_cells,
    padding_factor,
)
from benchmarks.inputs import MINILM, load_minilm, precisions
from benchmarks.measure import ROUNDS, markdown, unit
from benchmarks.products import LIMIT_HEADER, limit_cells, measure_shares
from benchmarks.trainer import trainer_row
from benchmarks.workloads import Workload, equal_lengths, question_passage, short_pairs, web
from embedtrain.config.recipe import Precision, TrainConfig
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions

TITLE = "A training step, all-MiniLM-L6-v2, against sentence-transformers"
WORKLOADS = (question_passage(), short_pairs(), web(), equal_lengths())
# The default of train.chunk_tokens holds a whole batch of these texts.
CHUNK_OPTIONS = ChunkOptions(TrainConfig().chunk_tokens)
# Our precision, and theirs.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


def measure(workloads: Sequence[Workload] = WORKLOADS) -> str:
    with joined_world() as world:
        rows = [row for workload in workloads for row in _rows(world, workload)]
        rows.append([*trainer_row(world, workloads[0], CHUNK_OPTIONS), *[""] * len(LIMIT_HEADER)])
    return markdown([*header(), *LIMIT_HEADER], rows)


def header() -> list[str]:
    per_s = f"real tokens / {unit()}"
    padding = ("computed / real tokens, ours", "computed / real tokens, theirs")
    return ["texts", "ours", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss difference", *padding]


def _rows(world: World, workload: Workload) -> list[list[str]]:
    data = workload.data(ROUNDS * workload.steps, load_minilm(world, Precision.fp32).tokenizer)
    batches = Batches(data, workload.steps)
    available = precisions()
    runners: list[StepRunner] = [our_training_steps(world, precision, batches) for precision in available]
    for precision in available:
        model = SentenceTransformer(MINILM, device=str(world.device))
        model.max_seq_length = workload.max_length
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
        runners.append(TheirSteps(model, loss, precision, batches))
    measured = measure_shares(*runners, size=lambda results: results.computed)
    ours = dict(zip(available, measured[: len(available)], strict=True))
    theirs = dict(zip(available, measured[len(available) :], strict=True))
    rows = []
    for our_precision, their_precision in COMPARED:
        if our_precision in ours and their_precision in theirs:
            tolerance = max(TOLERANCE[our_precision], TOLERANCE[their_precision])
            our, their = ours[our_precision], theirs[their_precision]
            cells = comparison_cells(f"training, {workload.name}", our.rounds, their.rounds, tolerance)
            names = [f"{workload.num_pairs} pairs, {workload.name}", our_precision.value, their_precision.value]
            factors = [padding_factor(our.rounds), padding_factor(their.rounds)]
            rows.append([*names, *cells, *factors, *limit_cells(our, their)])
    return rows


def our_training_steps(
    world: World, precision: Precision, batches: Batches, cached: float = 1.0, options: ChunkOptions = CHUNK_OPTIONS
) -> OurSteps:
    """Our training steps of all-MiniLM-L6-v2."""
    return OurSteps(load_minilm(world, precision), world, batches, options, cached)
