"""What rows of `embedtrain synthesize` teach a model that has few rows of its own: nDCG@10, over several seeds.

The documents are descriptions of Debian packages without their synopses. The language model is a rule that makes lines
like a synopsis out of a description, behind a server of OpenAI's protocol: it tests the whole pipeline with the same
queries on any machine, and says nothing about language models.
"""

import gzip
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import markdown
from embedtrain.commands.synthesize.checks import TITLES
from embedtrain.config.hydra_files import folder
from tests.synthesize.stub_server import Stub

SEEDS = 3
FEW, DOCUMENTS = 1000, 3000  # pairs that the start model is trained on, and descriptions of other packages
PER_DOCUMENT = 2
KEEP_RANK = 50
SET = "dev-en"
METRIC = "ndcg@10"
TITLE = (
    f"Rows of `synthesize`: {METRIC} on {SET} of a model with {FEW:,} rows of its own, mean and standard deviation of "
    f"{SEEDS} seeds"
)
_TRAINING = [
    *("train.steps=40", "train.global_batch_size=128", "train.chunk_tokens=32768", "loss.temperature=0.07"),
    *("optim.schedule=linear", "optim.warmup=0.1", "parallel.precision=fp32", "checkpoint.every=100"),
    *("evaluation.at_start=false", "evaluation.every=0", "export.check=false"),
]
# The start model that finds negatives is weak: it also finds documents that answer the query, and scores them high.
_MINING = ("negatives=1", "rank_max=50", "relative_margin=0.2")
# Rows of the table: a label, the run that is measured, and the one that it is compared with.
ROWS = (
    (f"start: random weights, trained on {FEW:,} rows", "start", None),
    ("trained further on the same rows", "few", "start"),
    ("trained further on synthetic rows: synthesize, filter, mine", "mined", "start"),
    ("the same without the round trip of filter", "unfiltered", "mined"),
    ("the same without mined negatives", "without-mining", "mined"),
)

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_BEGINNING = re.compile(
    r"^(?:this|the|these|it)?\s*(?:[\w.+-]+\s+){0,3}?(?:is|are|provides?|contains?|includes?|offers?|implements?|allows?"
    r"|installs?|adds?|supplies)\s+(?:the\s+|a\s+|an\s+)?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",?\s+(?:that|which|where|whose)\s")
_DOCUMENT = re.compile(r"Document:\n(.*?)\n\nWrite \d+ ", re.DOTALL)
_MAX_WORDS = 9


def synopses(description: str) -> list[str]:
    """Lines like a synopsis: what the first and the last sentence say of the package, without `This package is a`."""
    sentences = [text.strip() for text in _SENTENCE.split(description) if len(text.split()) > 3] or [description]
    lines = []
    for sentence in dict.fromkeys((sentences[0], sentences[-1])):
        text = _BEGINNING.sub("", sentence, count=1).rstrip(".!?:; ")
        words = _CLAUSE.split(text)[0].split()[:_MAX_WORDS]
        lines.append(" ".join(words).strip(" ,;:"))
    return [line for line in lines if line]


def answer(body: Mapping[str, Any]) -> str:
    """The answer of the language model to a request for queries."""
    found = _DOCUMENT.search(body["messages"][-1]["content"])
    assert found is not None
    return json.dumps({"queries": synopses(found[1])})


def measure() -> str:
    """Run everything with each seed, in the directory that SYNTHETIC_ROWS names, else in a temporary one."""
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as temporary:
        root = Path(os.environ.get("SYNTHETIC_ROWS", temporary))
        prepare(root)
        synthesize(root)
        results = [run_seed(root, seed) for seed in range(SEEDS)]
        filters = [_read_json(root / f"seed-{seed}" / "filtered-rows" / "summary.json") for seed in range(SEEDS)]
        sentence = describe(_read_json(root / "synthetic" / "synthesis.json"), filters)
    return f"{table(results)}\n\n{sentence}"


def prepare(root: Path) -> None:
    """Write the rows of the start model, and the documents."""
    with gzip.open(folder("recipes") / "quickstart" / "train-en.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: hashlib.sha256(f"synthetic:{row['query']}".encode()).hexdigest())
    few, others = rows[:FEW], rows[FEW : FEW + DOCUMENTS]
    root.mkdir(parents=True, exist_ok=True)
    _write(root / "few.jsonl", few)
    _write(root / "corpus.jsonl", ({"_id": f"d{i}", "text": row["pos"][0]} for i, row in enumerate(others)))


def synthesize(root: Path) -> None:
    """Write synthetic rows of the documents."""
    with Stub(answer) as server:
        _command(
            root / "synthesize.txt",
            *("synthesize", f"corpus={root / 'corpus.jsonl'}", f"output_dir={root / 'synthetic'}"),
            *("writer.backend=api", "writer.model=rules", f"writer.url={server.url}", "queries.kinds=title"),
            # The rule copies words; that of a language model should not.
            *(f"queries.per_document={PER_DOCUMENT}", "checks.max_copied_words=null"),
        )


def run_seed(root: Path, seed: int) -> dict[str, float]:
    """The metric of each run with this seed."""
    out, synthetic, results = root / f"seed-{seed}", root / "synthetic" / "rows.jsonl", dict[str, float]()
    start = out / "start"

    def train(name: str, rows: Path, *options: str, negatives: int = 0) -> None:
        data = f"data.train=[{{path: '{rows}', negatives: {negatives}}}]"
        sets = f"evaluation.sets=[{folder('recipes') / 'quickstart' / SET}]"
        named = [f"name={name}", f"seed={seed}", f"output_dir={out / name}", sets, data]
        _command(out / f"{name}.txt", "train", *options, *named, *_TRAINING)
        results[name] = _metric(out / name)

    def further(name: str, rows: Path, *, negatives: int = 0) -> None:
        model = [f"model.path={start / 'model'}", "model.max_length=48", "optim.lr=1e-3"]
        train(name, rows, *model, negatives=negatives)

    def search(command: str, rows: Path, to: str, *options: str) -> Path:
        data = [f"model={start / 'model'}", f"data=[{rows}]", f"corpus={root / 'corpus.jsonl'}"]
        _command(out / f"{to}.txt", command, *data, f"output_dir={out / to}", *options)
        return out / to / "rows.jsonl"

    out.mkdir(exist_ok=True)
    train("start", root / "few.jsonl", "recipe=quickstart")
    filtered = search("filter", synthetic, "filtered-rows", f"keep_rank={KEEP_RANK}")
    further("mined", search("mine", filtered, "mined-rows", *_MINING), negatives=1)
    further("without-mining", filtered)
    further("unfiltered", search("mine", synthetic, "mined-unfiltered-rows", *_MINING), negatives=1)
    further("few", root / "few.jsonl")
    return results


def table(results: Sequence[Mapping[str, float]]) -> str:
    """The table of all seeds."""
    rows = []
    for label, name, other in ROWS:
        difference = "" if other is None else _cell([result[name] - result[other] for result in results], "+")
        compared = next((label.partition(":")[0] for label, run, _ in ROWS if run == other), "")
        rows.append([label, _cell([result[name] for result in results]), compared, difference])
    return markdown(["model", METRIC, "compared with", "difference"], rows)


def describe(synthesis: Mapping[str, Any], filters: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the rows: by what `synthesize` and the filter of each seed have written beside them."""
    checks = synthesis["checks"]
    rejected = ", ".join(f"{count:,} {TITLES[check]}" for check, count in checks["rejected"].items())
    shares = [source["kept_rows"] / source["rows"] for each in filters for source in each["sources"].values()]
    return (
        f"{synthesis['documents']['documents']:,} documents, {synthesis['asked']:,} queries asked for, "
        f"{checks['written']:,} written, {synthesis['rows']:,} rows ({rejected}). With keep_rank={KEEP_RANK} filter "
        f"keeps {_cell([100 * share for share in shares], digits=1)} % of them."
    )


def _cell(values: Sequence[float], sign: str = "", digits: int = 4) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{deviation}"


def _metric(run: Path) -> float:
    """That of the last evaluation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float(next(row[METRIC] for row in reversed(rows) if row.get("set") == SET))


def _command(log: Path, *arguments: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        subprocess.run(
            [sys.executable, "-m", "embedtrain", *arguments], check=True, stdout=file, stderr=subprocess.STDOUT
        )


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
