"""Sets laid out as on the Hub, read from local directories of the same layout."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.errors import DataError
from embedtrain.evaluation.sets import read_set
from embedtrain.evaluation.types import Corpus

CORPUS = [{"_id": "d1", "title": "Title", "text": "text"}, {"_id": "d2", "title": "", "text": "other"}]
QUERIES = [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def read(path, **options):
    return read_set(EvaluationSet(path=str(path), **options))


def error_of(path, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


def write_jsonl(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(folder: Path, split: str, rows) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")


def readme(folder: Path, files: dict[str, dict[str, str]]) -> None:
    configs = [
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {p}\n" for s, p in splits.items())
        for config, splits in files.items()
    ]
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")


@pytest.mark.parametrize("judgements", ["default", "qrels"])
def test_mteb_layout(tmp_path, judgements):
    folder = tmp_path / "mteb-set"
    write_jsonl(folder / "corpus.jsonl", CORPUS)
    write_jsonl(folder / "queries.jsonl", QUERIES)
    write_jsonl(folder / "qrels" / "test.jsonl", [{"query-id": "q1", "corpus-id": "d2", "score": 1.0}])
    write_jsonl(folder / "qrels" / "dev.jsonl", [{"query-id": "q2", "corpus-id": "d1", "score": 2}])
    readme(folder, {
        judgements: {"dev": "qrels/dev.jsonl", "test": "qrels/test.jsonl"},
        "corpus": {"corpus": "corpus.jsonl"},
        "queries": {"train": "queries.jsonl"},
    })  # fmt: skip
    data = read(folder).data
    assert data.name == "mteb-set"
    assert data.documents == Corpus(["d1", "d2"], ["Title text", "other"])
    assert data.queries == {"q1": "one", "q2": "two"}
    assert data.judgements == {"q1": {"d2": 1}}
    assert read(folder, split="dev").data.judgements == {"q2": {"d1": 2}}
    assert error_of(folder, split="train") == f"{folder} ({judgements}) holds no split 'train', only dev, test"


def test_c_mteb_layout(tmp_path):
    folder = tmp_path / "crosslingual"
    write_parquet(folder, "corpus", [{"id": "7", "text": "中文"}, {"id": "8", "text": "english"}])
    write_parquet(folder, "queries", [{"id": "q", "text": "query"}])
    assert error_of(folder).startswith(
        f"{folder} holds no judgements (a configuration called default or qrels), and there is no {folder}-qrels either"
    )
    write_parquet(tmp_path / "crosslingual-qrels", "dev", [{"qid": "q", "pid": "8", "score": 1}])
    for kind in (SetKind.auto, SetKind.retrieval):
        data = read(folder, kind=kind).data
        assert data.documents == Corpus(["7", "8"], ["中文", "english"])
        assert data.judgements == {"q": {"8": 1}}
    write_parquet(tmp_path / "crosslingual-qrels", "dev", [{"qid": "q", "pid": 9, "score": 1}])
    assert f"{folder}-qrels, judgements: none of its 1 documents is in {folder}, corpus" in error_of(folder)


def test_pairs(tmp_path):
    folder = tmp_path / "sts-set"
    rows = [{"sentence1": "a", "sentence2": "b", "score": 1.5}, {"sentence1": "c", "sentence2": "d", "score": 3.0}]
    write_parquet(folder, "train", rows[:1])
    write_parquet(folder, "validation", rows[::-1])
    data = read(folder).data
    assert (data.name, data.first, data.second, data.scores) == ("sts-set", ["c", "a"], ["d", "b"], [3.0, 1.5])
    assert "2 pairs" not in error_of(folder, split="train")
    write_parquet(folder, "test", [{"sentence1": "a", "sentence2": None, "score": 1.5}])
    assert error_of(folder).startswith(f"{folder} (default, test):1: sentence2 must be a text")
    write_parquet(folder, "test", rows)
    assert "score is 1.5, and relevance is a whole number" in error_of(folder, kind=SetKind.retrieval)


def test_a_hub_id_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = error_of("nobody/no-such-set")
    assert error.startswith("nobody/no-such-set: ") and "ConnectionError" in error
    assert error.endswith("(no file or folder is called nobody/no-such-set either)")
