"""Gradient caching compared with CachedMultipleNegativesRankingLoss, by the fraction of graphs that are cached."""

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

from benchmarks.comparison import SCALE, TOLERANCE, Batches, OurSteps, TheirSteps, comparison_cells
from benchmarks.inputs import MINILM, load_minilm, precisions
from benchmarks.measure import ROUNDS, markdown, ratio, unit
from benchmarks.products import LIMIT_HEADER, limit_cells, measure_shares
from benchmarks.training import our_training_steps
from benchmarks.workloads import Workload, question_passage
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions

MINI_BATCH = 32  # the default of CachedMultipleNegativesRankingLoss
CHUNK_TOKENS = 2048  # about the tokens of 32 such texts, so both implementations process equally many at a time
CACHED_FRACTIONS = {"none": 0.0, "half": 0.5, "all": 1.0}  # fraction of the tokens whose graphs are cached
TITLE = (
    f"Gradient caching, all-MiniLM-L6-v2, train.chunk_tokens={CHUNK_TOKENS}, "
    f"against CachedMultipleNegativesRankingLoss, mini_batch_size={MINI_BATCH}, fp32"
)


def measure(workload: Workload | None = None) -> str:
    with joined_world() as world:
        rows = _rows(world, workload or question_passage(steps=1))
    per_s = f"real tokens / {unit()}"
    header = ["ours", "graphs cached", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss difference"]
    return markdown([*header, "times ours, none cached", *LIMIT_HEADER], rows)


def _rows(world: World, workload: Workload) -> list[list[str]]:
    batches = Batches(
        workload.data(ROUNDS * workload.steps, load_minilm(world, Precision.fp32).tokenizer), workload.steps
    )
    our_steps: dict[tuple[Precision, str], OurSteps] = {
        (precision, label): our_training_steps(world, precision, batches, fraction, ChunkOptions(CHUNK_TOKENS))
        for precision in precisions()
        for label, fraction in CACHED_FRACTIONS.items()
    }
    model = SentenceTransformer(MINILM, device=str(world.device))
    model.max_seq_length = workload.max_length
    loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=MINI_BATCH)
    their_steps = TheirSteps(model, loss, Precision.fp32, batches)
    theirs, *measured = measure_shares(their_steps, *our_steps.values(), size=lambda results: results.computed)
    ours = dict(zip(our_steps, measured, strict=True))
    return [
        [
            precision.value,
            label,
            *comparison_cells(f"caching, {label} cached", our.rounds, theirs.rounds, TOLERANCE[precision]),
            ratio(our.rounds, ours[precision, "none"].rounds),
            *limit_cells(our, theirs),
        ]
        for (precision, label), our in ours.items()
    ]
