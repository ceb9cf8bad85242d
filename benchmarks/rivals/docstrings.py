"""An evaluation set outside the domain of package descriptions, from libraries that are installed anyway.

A query is the summary line of a documented function or class of numpy, scipy, scikit-learn or torch, and its document
the prose that follows. The texts depend on the versions of these libraries.
"""

import gzip
import importlib
import inspect
import json
import random
import re
import warnings
from pathlib import Path

MODULES = {
    "numpy": ("linalg", "fft", "random"),
    "scipy": ("linalg", "optimize", "stats", "signal", "ndimage", "special", "sparse", "spatial", "interpolate",
              "integrate", "fft", "cluster.hierarchy", "io"),
    "sklearn": ("cluster", "linear_model", "metrics", "preprocessing", "ensemble", "decomposition", "model_selection",
                "feature_extraction.text", "datasets", "neighbors", "svm", "manifold", "impute"),
    "torch": ("nn", "nn.functional", "optim", "linalg", "distributed", "utils.data"),
}  # fmt: skip
NUM_QUERIES = 300
_SECTION = re.compile(
    r"(Parameters|Returns|Yields|Args|Arguments|Examples?|See Also|Attributes|Raises|References|Notes|Shape|Inputs)\b"
    r"|\.\. |>>>"
)


def pairs() -> list[tuple[str, str]]:
    """Summaries and descriptions; no text occurs twice."""
    found: dict[str, str] = {}
    names = [name for library, parts in MODULES.items() for name in (library, *(f"{library}.{part}" for part in parts))]
    for module in map(importlib.import_module, names):
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value) or not (text := inspect.getdoc(value)):
                continue
            summary, *paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
            end = next((n for n, part in enumerate(paragraphs) if _SECTION.match(part)), len(paragraphs))
            description = " ".join(paragraphs[:end])
            if 20 < len(summary) < 150 and "->" not in summary and "=" not in summary and len(description) > 80:
                found.setdefault(summary, description)
    distinct = {description: summary for summary, description in found.items()}
    return [(summary, description) for description, summary in distinct.items()]


def write_set(folder: Path) -> Path:
    """Write the set in BEIR's layout, with queries for some of its documents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = pairs()
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    queried = random.Random(0).sample(range(len(texts)), NUM_QUERIES)
    _write(
        folder / "corpus.jsonl.gz", [{"_id": f"d{n}", "title": "", "text": text} for n, (_, text) in enumerate(texts)]
    )
    _write(folder / "queries.jsonl.gz", [{"_id": f"q{n}", "text": texts[n][0]} for n in queried])
    lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in queried)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
