"""Files of evaluation sets for tests."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.errors import EmbedtrainError
from embedtrain.evaluation.sets import read_set


def read(path, **options):
    """The set at a path."""
    return read_set(EvaluationSet(path=str(path), **options))


def error_of(path, **options) -> str:
    """The message of the error that reading a set raises."""
    with pytest.raises(EmbedtrainError) as caught:
        read(path, **options)
    return str(caught.value)


def jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def beir(folder: Path, corpus, queries, qrels: str, name: str = "test.tsv") -> Path:
    """A BEIR folder: texts by id, and the text of the file of judgements."""
    jsonl(folder / "corpus.jsonl", [{"_id": key, "text": text} for key, text in corpus.items()])
    jsonl(folder / "queries.jsonl", [{"_id": key, "text": text} for key, text in queries.items()])
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    (folder / "qrels" / name).write_text(qrels)
    return folder


def repository(folder: Path, tables: dict[str, dict[str, list]]) -> Path:
    """A copy of a Hub repository: rows by configuration and split."""
    configs = []
    for config, splits in tables.items():
        files = []
        for split, rows in splits.items():
            jsonl(folder / config / f"{split}.jsonl", rows)
            files.append(f"  - split: {split}\n    path: {config}/{split}.jsonl\n")
        configs.append(f"- config_name: {config}\n  data_files:\n" + "".join(files))
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    return folder
