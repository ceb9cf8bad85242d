"""What the defaults of training are chosen from: nDCG@10 after one epoch of three data sets, by option.

`python -m benchmarks defaults` trains all-MiniLM-L6-v2 once for each row and data set, two trainings at a time: some
hours on two cores. With `DEFAULTS=DIR` it stores each result in a directory and continues there.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.data import SHARED
from benchmarks.inputs import MINILM, QUICKSTART
from benchmarks.measure import markdown
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import RetrievalSet

TITLE = "Options of training: nDCG@10 after one epoch of 3,072 rows"
MAX_ROWS, MAX_LENGTH = 3072, 64
MAX_QUERIES, MAX_DOCUMENTS = 300, 1000  # of an evaluation set
SIDE_BY_SIDE = 2


@dataclass(frozen=True, slots=True)
class DataSet:
    """Training rows and the set that measures them."""

    train: Path
    evaluation: Path


DATA_SETS = {
    "packages": DataSet(QUICKSTART / "train-en.jsonl.gz", QUICKSTART / "dev-en"),
    "python-docs": DataSet(SHARED / "pydocs-zh-en" / "train.jsonl.gz", SHARED / "pydocs-zh-en" / "dev-zh2en"),
    "zh-qa": DataSet(SHARED / "zh-qa" / "train.jsonl.gz", SHARED / "cmrc2018"),
}
BATCHES, RATES = (16, 64, 256), (2e-5, 1e-4, 2e-4, 4e-4)
BASE = {"train.global_batch_size": 64, "optim.lr": 1e-4, "loss.temperature": 0.05}
# One option at a time, of BASE.
VARIATIONS: dict[str, list[object]] = {
    "seed": [1, 2],
    "loss.temperature": [0.02, 0.1],
    "optim.schedule": ["cosine", "constant"],
    "optim.warmup": [0.2],
    "optim.weight_decay": [0],
    "loss.mask_duplicates": ["false"],
    "loss.directions": ["[query_document,document_query]"],
    "parallel.precision": ["fp32"],
}


@dataclass(frozen=True)
class Row:
    """One training on each data set."""

    options: dict[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The options that it sets."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def grid() -> list[Row]:
    """Batch sizes and learning rates."""
    return [Row({"train.global_batch_size": size, "optim.lr": rate}) for size in BATCHES for rate in RATES]


def variations() -> list[Row]:
    """One option at a time."""
    return [Row(), *(Row({name: value}) for name, values in VARIATIONS.items() for value in values)]


def measure() -> str:
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as temporary:
        root = Path(os.environ.get("DEFAULTS", temporary))
        rows = [*grid(), *variations()]
        names = [name for name, data in DATA_SETS.items() if data.train.is_file()]
        for name in names:
            smaller_set(DATA_SETS[name].evaluation, root / name)
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            jobs = {(row.label, name): pool.submit(_train, root, row, name) for row in rows for name in names}
        values = {key: job.result() for key, job in jobs.items()}
    lines = [[row.label or "base", *(f"{values[row.label, name]:.4f}" for name in names)] for row in rows]
    return markdown(["options", *names], lines)


def smaller_set(source: Path, target: Path) -> Path:
    """A set in BEIR's layout with the first judged queries of `source`, their documents, and some others."""
    if not target.is_dir():
        loaded = read_set(EvaluationSet(path=str(source))).data
        assert isinstance(loaded, RetrievalSet)
        queries = loaded.judged_queries[:MAX_QUERIES]
        texts = dict(zip(loaded.documents.ids, loaded.documents.texts, strict=True))
        judged = [document for query in queries for document in loaded.judgements[query]]
        documents = list(dict.fromkeys([*judged, *texts]))[:MAX_DOCUMENTS]
        (target / "qrels").mkdir(parents=True)
        _write(target / "corpus.jsonl", [{"_id": key, "title": "", "text": texts[key]} for key in documents])
        _write(target / "queries.jsonl", [{"_id": key, "text": loaded.queries[key]} for key in queries])
        rows = [f"{q}\t{d}\t{grade}" for q in queries for d, grade in loaded.judgements[q].items() if d in texts]
        (target / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    return target


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _train(root: Path, row: Row, name: str) -> float:
    """nDCG@10 after the training, which is stored."""
    result = root / f"{name} {row.label or 'base'}.json".replace("/", "-")
    if not result.is_file():
        data = DATA_SETS[name]
        with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
            options = BASE | row.options | {
                "name": "defaults",
                "output_dir": folder,
                "model.path": MINILM,
                "model.max_length": MAX_LENGTH,
                "data.train": f"[{{path: {data.train}, max_rows: {MAX_ROWS}}}]",
                "train.epochs": 1,
                "evaluation.sets": f"[{smaller_set(data.evaluation, root / name)}]",
                "evaluation.at_start": "false",
                "tracking.geometry": "false",
                "export.check": "false",
            }  # fmt: skip
            command = [sys.executable, "-m", "embedtrain", *(f"{key}={value}" for key, value in options.items())]
            subprocess.run(command, check=True, capture_output=True, text=True)
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            found = [row for row in map(json.loads, lines) if "ndcg@10" in row]
        root.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(found[-1]))
    value: float = json.loads(result.read_text())["ndcg@10"]
    return value
