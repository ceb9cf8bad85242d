"""What all trainings of a comparison have in common."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.inputs import QUICKSTART
from benchmarks.rivals.libraries import DENSE, KINDS, LATE_INTERACTION, RERANKER, SPARSE

SEEDS = (1, 2, 3)
# The faster of these is chosen for each library by the table of speed.
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the trainings of one kind of model, and the options that are equal for all libraries.

    Attributes:
        steps: steps of a comparison at equal steps.
        global_batch: rows per step.
        negatives: hard negatives of a row.
        lr: peak learning rate, tuned for none of the libraries.
        temperature: divisor of the scores.
    """

    steps: int
    global_batch: int
    negatives: int
    lr: float
    temperature: float
    query_max_length: int = 32
    document_max_length: int = 64
    warmup: float = 0.1
    weight_decay: float = 0.01


SHAPES = {
    DENSE: Shape(steps=30, global_batch=64, negatives=0, lr=5e-4, temperature=0.05),
    RERANKER: Shape(steps=30, global_batch=16, negatives=3, lr=2e-4, temperature=1.0),
    LATE_INTERACTION: Shape(steps=30, global_batch=32, negatives=0, lr=3e-4, temperature=1.0),
    SPARSE: Shape(steps=30, global_batch=32, negatives=0, lr=1e-4, temperature=1.0),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a comparison reads and writes, and what it compares.

    Attributes:
        output: directory of everything that is made and measured; a comparison resumes there.
        model: a sentence-transformers directory to start dense models from; None: half of all-MiniLM-L6-v2's layers.
        train: JSONL file of training rows.
        in_domain, out_of_domain: evaluation sets in BEIR's layout.
        libraries: names of those to compare.
        kinds: kinds of models.
        ranks: ranks of every training.
        epochs: of the trainings with nothing but the data.
    """

    output: Path
    libraries: tuple[str, ...]
    model: str | None = None
    train: Path = QUICKSTART / "train-en.jsonl.gz"
    in_domain: tuple[Path, ...] = (QUICKSTART / "dev-en",)
    out_of_domain: tuple[Path, ...] = ()
    kinds: tuple[str, ...] = KINDS
    seeds: tuple[int, ...] = SEEDS
    ranks: int = 2
    epochs: int = 1
    shapes: dict[str, Shape] = field(default_factory=lambda: dict(SHAPES))
