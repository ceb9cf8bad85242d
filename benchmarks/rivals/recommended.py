"""nDCG@10 of all-MiniLM-L6-v2 after one epoch, when a user gives nothing but the data.

Every library has the settings that its documentation recommends (the first lines of its script name them), ours its
defaults. Rows per rank are those of sentence-transformers' "Training Overview" for the others, whose examples have
few rows with many negatives instead.
"""

from pathlib import Path

from benchmarks.inputs import MINILM
from benchmarks.measure import markdown
from benchmarks.rivals.libraries import DENSE, OURS, Library
from benchmarks.rivals.quality import spread
from benchmarks.rivals.scripts.common import Training
from benchmarks.rivals.settings import Settings
from benchmarks.rivals.trainings import Comparison, Measured
from embedtrain.config.recipe import TrainConfig

ROWS = 3072
RANK_BATCH = 16
LIBRARIES = (OURS, "sentence-transformers", "FlagEmbedding", "tevatron")


def measure(settings: Settings) -> str:
    """A row for each library."""
    comparison = Comparison(settings, DENSE)
    sets = list(comparison.sets)
    before = comparison.before("minilm", Path(MINILM))
    lines = [["before training", *["-"] * 3, *(f"{before[name]:.4f}" for name in sets)]]
    for library in comparison.libraries:
        if library.name in LIBRARIES:
            measured = [_train(comparison, library, seed) for seed in settings.seeds]
            first = measured[0].training
            values = [spread([each.metrics[name] for each in measured], "{:.4f}") for name in sets]
            seconds = sum(each.seen.seconds for each in measured) / len(measured)
            lines.append([library.name, f"{first.global_batch}", f"{first.steps}", f"{seconds:.0f} s", *values])
    return markdown(["library", "rows per step", "steps", "wall time", *sets], lines)


def _train(comparison: Comparison, library: Library, seed: int) -> Measured:
    ranks, name = comparison.settings.ranks, f"recommended-{seed}"
    batch = TrainConfig().global_batch_size if library.name == OURS else RANK_BATCH * ranks
    recommended = dict.fromkeys(("lr", "warmup", "weight_decay", "temperature"))

    def training() -> Training:
        rows = min(ROWS, len(comparison.rows))
        sizes = {"rows": rows, "steps": rows // batch, "global_batch": batch}
        precision = comparison.precision(library)
        return comparison.training(library, name, seed=seed, precision=precision, model=MINILM, **sizes, **recommended)

    return comparison.measured(library, name, training, evaluated=True)
