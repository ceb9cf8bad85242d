"""What the defaults of training are chosen from: nDCG@10 after one epoch of three data sets, by option.

`python -m benchmarks defaults` trains all-MiniLM-L6-v2 once for each row and data set, two trainings at a time: about
an hour on two cores. With `DEFAULTS=DIR` it stores each result in a directory and continues there.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import SHARED
from benchmarks.inputs import MINILM, QUICKSTART
from benchmarks.measure import markdown
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import RetrievalSet

TITLE = "Options of training: nDCG@10 after one epoch of 3,072 rows"
Options = dict[str, object]
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
OTHER = SHARED / "cranfield"  # no training has seen anything like it
BATCHES, RATES, TEMPERATURES = (32, 64, 256), (2e-5, 5e-5, 1e-4), (0.02, 0.05)
BASE: Options = {"train.global_batch_size": 64, "optim.lr": 5e-5, "loss.temperature": 0.02}
NEGATIVES, MINED = "negatives", 7  # of data.train; hard negatives that all-MiniLM-L6-v2 mines from the rows
# One option at a time, of BASE.
VARIATIONS: dict[str, list[object]] = {
    "seed": [1],
    "loss.temperature": [0.05, 0.1],
    "optim.schedule": ["cosine"],
    "optim.weight_decay": [0],
    "loss.mask_duplicates": ["false"],
    "loss.directions": ["[query_document,document_query]"],
    "parallel.precision": ["fp32"],
    NEGATIVES: [1, 3, MINED],
}


def rows() -> list[Options]:
    """Batch sizes, learning rates and temperatures; then one option at a time."""
    grid: list[Options] = [
        {"train.global_batch_size": size, "optim.lr": rate, "loss.temperature": temperature}
        for temperature in TEMPERATURES
        for size in BATCHES
        for rate in RATES
        if temperature == TEMPERATURES[0] or size == BATCHES[-1]
    ]
    return grid + [{name: value} for name, values in VARIATIONS.items() for value in values]


def label(options: Options) -> str:
    """The options as on a command line."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def measure() -> str:
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as temporary:
        root = Path(os.environ.get("DEFAULTS", temporary))
        names = [name for name, data in DATA_SETS.items() if data.train.is_file()]
        for name in names:
            smaller_set(DATA_SETS[name].evaluation, root / name)
            mined_rows(root, name)
        others = [smaller_set(OTHER, root / OTHER.name)] if OTHER.is_dir() else []
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            jobs = {
                (label(row), name): pool.submit(_train, root, row, name, others) for row in rows() for name in names
            }
        values = {key: [f"{value:.4f}" for value in job.result()] for key, job in jobs.items()}
    lines = [[label(row), *(" / ".join(values[label(row), name]) for name in names)] for row in rows()]
    return markdown(["options", *(f"{name} / {OTHER.name}" for name in names)], lines)


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


def _train(root: Path, row: Options, name: str, others: list[Path]) -> list[float]:
    """nDCG@10 of each evaluation set after the training, which is stored."""
    result = root / f"{name} {label(row)}.json".replace("/", "-")
    if not result.is_file():
        sets = [root / name, *others]
        source = _rows_of(name)
        if NEGATIVES in row:
            source |= {"path": mined_rows(root, name), NEGATIVES: row[NEGATIVES]}
        with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
            options = BASE | {key: value for key, value in row.items() if key != NEGATIVES} | {
                "name": "defaults",
                "output_dir": folder,
                "model.path": MINILM,
                "model.max_length": MAX_LENGTH,
                "data.train": _sources(source),
                "train.epochs": 1,
                "evaluation.sets": f"[{','.join(map(str, sets))}]",
                "evaluation.at_start": "false",
                "tracking.geometry": "false",
                "export.check": "false",
            }  # fmt: skip
            command = [sys.executable, "-m", "embedtrain", *(f"{key}={value}" for key, value in options.items())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            found = {row["set"]: row["ndcg@10"] for row in map(json.loads, lines) if "set" in row}
        result.write_text(json.dumps([found[path.name] for path in sets]))
    values: list[float] = json.loads(result.read_text())
    return values


def mined_rows(root: Path, name: str) -> Path:
    """All rows of a data set with hard negatives, mined once; a training draws its rows from them."""
    folder = root / f"mined-{name}"
    if not list(folder.glob("*.jsonl")):
        data, limits = f"data={_sources(_rows_of(name))}", [f"negatives={MINED}", f"max_length={MAX_LENGTH}"]
        command = [
            sys.executable,
            "-m",
            "embedtrain",
            "mine",
            f"model={MINILM}",
            data,
            f"output_dir={folder}",
            *limits,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.jsonl"))


def _rows_of(name: str) -> Options:
    return {"path": DATA_SETS[name].train, "max_rows": MAX_ROWS}


def _sources(source: Options) -> str:
    return f"[{{{', '.join(f'{key}: {value}' for key, value in source.items())}}}]"
