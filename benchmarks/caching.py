"""Gradient caching beside sentence-transformers' CachedMultipleNegativesRankingLoss, by what is kept of the graphs."""

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

from benchmarks.inputs import MINILM, minilm, precisions
from benchmarks.measure import ROUNDS, interleave, markdown, ratio, unit
from benchmarks.sides import SCALE, TOLERANCE, Batches, OurSteps, TheirSteps, compared
from benchmarks.training import ours
from benchmarks.workloads import Workload, question_passage
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions

MINI_BATCH = 32  # its default
CHUNK_TOKENS = 2048  # about what 32 such texts hold, so both hold as much at a time
KEEP = {"none": 0.0, "half": 0.5, "all": 1.0}  # share of the tokens whose graphs are kept
TITLE = (
    f"Gradient caching, all-MiniLM-L6-v2, train.chunk_tokens={CHUNK_TOKENS}, "
    f"against CachedMultipleNegativesRankingLoss, mini_batch_size={MINI_BATCH}, fp32"
)


def measure(workload: Workload | None = None) -> str:
    with joined_world() as world:
        rows = _rows(world, workload or question_passage(steps=1))
    per_s = f"real tokens / {unit()}"
    header = ["ours", "graphs kept", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss apart"]
    return markdown([*header, "times ours that keeps none"], rows)


def _rows(world: World, workload: Workload) -> list[list[str]]:
    batches = Batches(workload.data(ROUNDS * workload.steps, minilm(world, Precision.fp32).tokenizer), workload.steps)
    sides: dict[tuple[Precision, str], OurSteps] = {
        (precision, kept): ours(world, precision, batches, keep, ChunkOptions(CHUNK_TOKENS))
        for precision in precisions()
        for kept, keep in KEEP.items()
    }
    model = SentenceTransformer(MINILM, device=str(world.device))
    model.max_seq_length = workload.max_length
    loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=MINI_BATCH)
    theirs = TheirSteps(model, loss, Precision.fp32, batches)
    other, *timed = interleave(theirs, *sides.values())
    mine = dict(zip(sides, timed, strict=True))
    return [
        [
            precision.value,
            kept,
            *compared(f"caching, {kept} kept", rounds, other, TOLERANCE[precision]),
            ratio(rounds, mine[precision, "none"]),
        ]
        for (precision, kept), rounds in mine.items()
    ]
