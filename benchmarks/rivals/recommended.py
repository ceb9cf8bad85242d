"""nDCG@10 of all-MiniLM-L6-v2 after one epoch or more, when a user gives nothing but the data.

Every library has the settings that its documentation recommends (the first lines of its script name them), ours its
defaults. Rows per rank are those of sentence-transformers' "Training Overview" for the others, whose examples have
few rows with many negatives instead. Every seed draws other rows.
"""

from pathlib import Path

from benchmarks.inputs import MINILM
from benchmarks.rivals.libraries import DENSE, OURS, Library
from benchmarks.rivals.quality import quality_table
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
    before = comparison.before("minilm", Path(MINILM))
    trainings: dict[Library, list[Measured]] = {
        library: [] for library in comparison.libraries if library.name in LIBRARIES
    }
    for seed, library in comparison.rounds():
        if library in trainings:
            trainings[library].append(_train(comparison, library, seed))
    return quality_table(before, trainings)


def _train(comparison: Comparison, library: Library, seed: int) -> Measured:
    ranks, epochs, name = comparison.settings.ranks, comparison.settings.epochs, f"recommended-{seed}"
    if epochs > 1:
        name += f"-{epochs}-epochs"
    batch = TrainConfig().global_batch_size if library.name == OURS else RANK_BATCH * ranks
    recommended = dict.fromkeys(("lr", "warmup", "weight_decay", "temperature"))

    def training() -> Training:
        rows = min(ROWS, len(comparison.rows))
        sizes = {"rows": rows, "steps": rows // batch * epochs, "global_batch": batch}
        precision = comparison.precision(library)
        return comparison.training(library, name, seed=seed, precision=precision, model=MINILM, **sizes, **recommended)

    return comparison.measured(library, name, training, evaluated=True)
