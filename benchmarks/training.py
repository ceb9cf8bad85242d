"""A training step beside sentence-transformers' own: the same model, texts, batch, loss and optimiser."""

from collections.abc import Sequence

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from benchmarks.inputs import MINILM, minilm, precisions
from benchmarks.measure import ROUNDS, interleave, markdown, unit
from benchmarks.sides import SCALE, TOLERANCE, Batches, OurSteps, Side, TheirSteps, compared, computed
from benchmarks.trainer import their_trainer
from benchmarks.workloads import Workload, equal_lengths, question_passage, short_pairs, web
from embedtrain.config.recipe import Precision, TrainConfig
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions

TITLE = "A training step, all-MiniLM-L6-v2, against sentence-transformers"
WORKLOADS = (question_passage(), short_pairs(), web(), equal_lengths())
# The default of train.chunk_tokens: a whole batch of these, but for its shapes.
CUTTING = ChunkOptions(TrainConfig().chunk_tokens)
# Ours, and theirs that it is held against.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


def measure(workloads: Sequence[Workload] = WORKLOADS) -> str:
    with joined_world() as world:
        rows = [row for workload in workloads for row in _rows(world, workload)]
        rows.append(their_trainer(world, workloads[0], CUTTING))
    return markdown(header(), rows)


def header() -> list[str]:
    per_s = f"real tokens / {unit()}"
    padding = ("computed a real token, ours", "theirs")
    return ["texts", "ours", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss apart", *padding]


def _rows(world: World, workload: Workload) -> list[list[str]]:
    data = workload.data(ROUNDS * workload.steps, minilm(world, Precision.fp32).tokenizer)
    batches = Batches(data, workload.steps)
    chosen = precisions()
    sides: list[Side] = [ours(world, precision, batches) for precision in chosen]
    for precision in chosen:
        model = SentenceTransformer(MINILM, device=str(world.device))
        model.max_seq_length = workload.max_length
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
        sides.append(TheirSteps(model, loss, precision, batches))
    timed = interleave(*sides)
    mine, others = (dict(zip(chosen, part, strict=True)) for part in (timed[: len(chosen)], timed[len(chosen) :]))
    rows = []
    for one, other in COMPARED:
        if one in mine and other in others:
            tolerance = max(TOLERANCE[one], TOLERANCE[other])
            cells = compared(f"training, {workload.name}", mine[one], others[other], tolerance)
            told = [f"{workload.num_pairs} pairs, {workload.name}", one.value, other.value, *cells]
            rows.append([*told, computed(mine[one]), computed(others[other])])
    return rows


def ours(
    world: World, precision: Precision, batches: Batches, keep: float = 1.0, cutting: ChunkOptions = CUTTING
) -> OurSteps:
    """Our side."""
    return OurSteps(minilm(world, precision), world, batches, cutting, keep)
