"""Revisions of Hub data sets: rows, corpus, evaluation set and judgements, read over HTTP from two commits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import TrainSource
from embedtrain.data.sources.resolve import find_parts, resolve_parts
from embedtrain.errors import ConfigError
from embedtrain.evaluation.sets import read_set
from tests.conftest import ROOT
from tests.hub import hub

OLD, NEW = "a" * 40, "b" * 40

# In a process of its own: libraries read the Hub's address when they are imported.
READ = """
import json, sys
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import DataFormat, TrainSource
from embedtrain.data.sources.part_reader import raw_rows
from embedtrain.data.sources.part_reader import PartReader
from embedtrain.data.sources.resolve import find_parts
from embedtrain.errors import EmbedtrainError
from embedtrain.evaluation.sets import read_set

def first(source, parts):
    (part,) = parts
    pieces = PartReader()
    (piece,) = pieces.split(part, 1 << 20)
    assert pieces.digests(part)
    return [line.row for line in pieces.lines(piece)][0]

def rows(revision):
    source = TrainSource(path="org/rows", revision=revision)
    return first(source, find_parts(source).parts)["query"]

def documents(revision):
    source = TrainSource(path="org/named", documents="org/texts", documents_revision=revision)
    (part,) = find_parts(source).document_parts
    return next(iter(raw_rows(part)))[1]["text"]

def beir(revision):
    source = TrainSource(path="org/judged", format=DataFormat.beir, split="test", revision=revision)
    return [table.revision for table in find_parts(source).parts[0].tables]

def judged(revision, qrels_revision):
    data = read_set(EvaluationSet(path="org/set", revision=revision, qrels_revision=qrels_revision)).data
    return data.queries["q"], data.judgements["q"]["d"]

def refused(read):
    try:
        read()
    except EmbedtrainError as error:
        return str(error)

old, new = sys.argv[1:]
results = {
    "rows": [rows(None), rows(old), rows("main"), rows(new)],
    "documents": [documents(None), documents(old)],
    "beir": beir(old),
    "judged": [judged(None, None), judged(old, None), judged(None, old), judged(old, old)],
    "unknown": refused(lambda: rows("c" * 40)),
    "useless": refused(lambda: read_set(EvaluationSet(path="org/judged", qrels_revision=old))),
}
print(json.dumps(results))
"""


def write(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def card(folder: Path, **configs: str) -> None:
    """A README.md with the path of each configuration, whose split has the same name, or `test`."""
    splits = {name: "test" if name == "default" else name for name in configs}
    files = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: {splits[name]}\n    path: {path}\n"
        for name, path in configs.items()
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}---\n")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    """What is read from two commits; `main` is the newer one."""
    root = tmp_path_factory.mktemp("hub")
    sets = root / "datasets" / "org"
    for commit, word, gain in ((OLD, "old", 1), (NEW, "new", 2)):
        write(sets / "rows" / commit, [{"query": f"{word} query", "positive": "x"}])
        write(sets / "named" / commit, [{"query": "a", "positive_document_ids": ["d"]}])
        write(sets / "texts" / commit, [{"_id": "d", "text": f"{word} text"}])
        for name in ("set", "judged"):
            write(sets / name / commit, [{"_id": "d", "text": f"{word} document"}], "corpus.jsonl")
            write(sets / name / commit, [{"_id": "q", "text": f"{word} question"}], "queries.jsonl")
        judgements = [{"query-id": "q", "corpus-id": "d", "score": gain}]
        write(sets / "judged" / commit, judgements, "qrels.jsonl")
        card(sets / "judged" / commit, default="qrels.jsonl", corpus="corpus.jsonl", queries="queries.jsonl")
        card(sets / "set" / commit, corpus="corpus.jsonl", queries="queries.jsonl")
        write(sets / "set-qrels" / commit, judgements, "test.jsonl")
    for repository in sets.iterdir():
        (repository / "main").write_text(NEW)
    with hub(root) as endpoint:
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(root / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", READ, OLD, NEW],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_rows_of_a_pinned_commit(results):
    assert results["rows"] == ["new query", "old query", "new query", "new query"]
    assert results["unknown"].startswith("org/rows: neither a local file nor a data set that can be opened")
    assert f"revision {'c' * 40}" in results["unknown"]


def test_a_corpus_of_a_pinned_commit(results):
    assert results["documents"] == ["new text", "old text"]
    assert results["beir"] == [OLD, OLD, OLD]


def test_an_evaluation_set_and_its_judgements_have_separate_revisions(results):
    assert results["judged"] == [["new question", 2], ["old question", 2], ["new question", 1], ["old question", 1]]
    assert results["useless"].startswith(
        f"qrels_revision={OLD} is of a repository that only holds judgements, and org/judged"
    )


def test_local_files_have_no_revision(tmp_path):
    write(tmp_path, [{"query": "a", "positive": "b"}])
    for path in (tmp_path, tmp_path / "train.jsonl", tmp_path / "*.jsonl", "https://example.org/train.jsonl"):
        with pytest.raises(ConfigError, match="revision=main"):
            resolve_parts(TrainSource(path=str(path), revision="main"))
    write(tmp_path / "named", [{"query": "a", "positive_document_ids": ["d"]}])
    with pytest.raises(ConfigError, match="revision=main chooses"):
        find_parts(TrainSource(path=str(tmp_path / "named"), documents=str(tmp_path), documents_revision="main"))
    for option in ("revision", "qrels_revision"):
        with pytest.raises(ConfigError, match=rf"^{option}=main"):
            read_set(EvaluationSet(path=str(tmp_path), **{option: "main"}))
