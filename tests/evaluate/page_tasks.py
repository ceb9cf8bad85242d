"""Small copies of benchmarks of pages, in the layouts of their data sets, and mteb's own tasks that load them."""

import io
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as PilImage

from tests.small import text

LANGUAGES = ("english", "french")
NUM_PAGES = 14


def page(number: int) -> bytes:
    """The file of a picture; sizes and formats differ."""
    numbers = np.random.default_rng(900 + number)
    width, height = numbers.integers(30, 90, 2).tolist()
    blocks = numbers.integers(0, 255, (5, 4, 3), dtype=np.uint8)
    image = PilImage.fromarray(blocks).resize((width, height), PilImage.Resampling.NEAREST)
    file = io.BytesIO()
    if number % 4 == 1:
        image.convert("L").save(file, "PNG")
    elif number % 4 == 2:
        image.save(file, "JPEG", quality=90)
    else:
        image.save(file, "PNG")
    return file.getvalue()


def _table(path: Path, columns: dict[str, list[Any]], **types: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if "image" in columns:
        columns["image"] = [{"bytes": data, "path": None} for data in columns["image"]]
        types["image"] = Image()
    features = {name: types.get(name) or Value("string") for name in columns}
    Dataset.from_dict(columns, features=Features(features)).to_parquet(str(path))


def _write(folder: Path, tables: dict[str, tuple[dict[str, list[Any]], dict[str, Any]]]) -> Path:
    """A data set of several configurations."""
    lines = ["---", "configs:"]
    for name, (columns, types) in tables.items():
        _table(folder / name / "test-00000-of-00001.parquet", columns, **types)
        lines += [f"- config_name: {name}", "  data_files:", "  - split: test", f"    path: {name}/test-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def queries(language: str) -> list[str]:
    start = 400 + 50 * LANGUAGES.index(language)
    return [text(start + i, 2 + i % 6) for i in range(9)]


def judgements() -> list[tuple[int, int, int]]:
    """Query, page and score: three pages of each, one of them more relevant."""
    return [(q, (3 * q + i) % NUM_PAGES, 2 - bool(i)) for q in range(9) for i in range(3)]


def ocr(number: int) -> str:
    return text(700 + number, 3 + number % 5)


def save_v2(folder: Path) -> Path:
    """ViDoRe v1 and v2: ids are numbers, and queries name their language."""
    whole = Value("int64")
    pairs = [(language, query) for language in LANGUAGES for query in queries(language)]
    found = [(q + 9 * n, page, score) for n in range(len(LANGUAGES)) for q, page, score in judgements()]
    ids, pages, scores = map(list, zip(*found, strict=True))
    return _write(
        folder,
        {
            "corpus": (
                {
                    "corpus-id": list(range(NUM_PAGES)),
                    "image": [page(i) for i in range(NUM_PAGES)],
                    "doc-id": ["report"] * NUM_PAGES,
                },
                {"corpus-id": whole},
            ),
            "queries": (
                {
                    "query-id": list(range(len(pairs))),
                    "query": [query for _, query in pairs],
                    "language": [language for language, _ in pairs],
                },
                {"query-id": whole},
            ),
            "qrels": (
                {"query-id": ids, "corpus-id": pages, "score": scores, "answer": ["no"] * len(ids)},
                {"query-id": whole, "corpus-id": whole, "score": whole},
            ),
        },
    )


def save_v3(folder: Path, *, with_text: bool = False) -> Path:
    """ViDoRe v3 as mteb has it: tables for each language; those of v3.1 have the text of each page."""
    tables: dict[str, Any] = {}
    for language in LANGUAGES:
        corpus: dict[str, list[Any]] = {
            "id": [f"corpus-test-{i}" for i in range(NUM_PAGES)],
            "image": [page(i) for i in range(NUM_PAGES)],
        }
        if with_text:
            corpus["text"] = [ocr(i) for i in range(NUM_PAGES)]
        found = [(f"query-test-{q}", f"corpus-test-{page}", score) for q, page, score in judgements()]
        ids, pages, scores = map(list, zip(*found, strict=True))
        tables[f"{language}-corpus"] = (corpus, {})
        tables[f"{language}-queries"] = (
            {"id": [f"query-test-{i}" for i in range(9)], "text": queries(language)}, {},
        )  # fmt: skip
        tables[f"{language}-qrels"] = (
            {"query-id": ids, "corpus-id": pages, "score": scores}, {"score": Value("int64")},
        )  # fmt: skip
    return _write(folder, tables)


def save_jina(folder: Path) -> Path:
    """JinaVDR: a folder for each table."""
    ids, pages, scores = map(list, zip(*judgements(), strict=True))
    whole = Value("int64")
    _table(
        folder / "default/queries/test.parquet",
        {"query-id": list(range(9)), "query": queries("english")},
        **{"query-id": whole},
    )
    _table(
        folder / "default/corpus/test.parquet",
        {"corpus-id": list(range(NUM_PAGES)), "image": [page(i) for i in range(NUM_PAGES)]}, **{"corpus-id": whole},
    )  # fmt: skip
    _table(
        folder / "default/qrels/test.parquet", {"query-id": ids, "corpus-id": pages, "score": scores},
        **{"query-id": whole, "corpus-id": whole, "score": whole},
    )  # fmt: skip
    return folder


# The tasks of mteb, and what writes a copy of their data.
COPIES = {
    "Vidore2ESGReportsRetrieval": save_v2,
    "Vidore3FinanceEnRetrieval": save_v3,
    "Vidore3FinanceEnRetrieval.v2": lambda folder: save_v3(folder, with_text=True),
    "JinaVDRMedicalPrescriptionsRetrieval": save_jina,
}


def page_task(name: str, folder: Path) -> Any:
    """A task of mteb that reads the copy in a folder, in two languages where it has several."""
    task = type(mteb.get_task(name))
    of_data = task.metadata.model_copy(update={"dataset": {"path": str(folder), "revision": "local"}})
    if isinstance(of_data.eval_langs, dict):
        of_data = of_data.model_copy(update={"eval_langs": {key: of_data.eval_langs[key] for key in LANGUAGES}})
    return type(task.__name__, (task,), {"metadata": of_data})()
