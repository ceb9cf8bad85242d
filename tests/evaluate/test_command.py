"""`embedtrain.evaluate` end to end: sets, tasks of mteb, lost ranks, files on disk."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embedtrain.config.parsing import parse_sets
from tests.commands import ENVIRONMENT, call
from tests.small import save_guide, small_model, text, write_beir

MODULE = "evaluate"
NFCORPUS = """---
configs:
- {config_name: corpus, data_files: [{split: corpus, path: corpus.jsonl}]}
- {config_name: queries, data_files: [{split: queries, path: queries.jsonl}]}
- {config_name: default, data_files: [{split: test, path: qrels.jsonl}]}
---
"""


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A model, an evaluation set, and local copies of two of mteb's data sets where `datasets` looks for them."""
    folder = tmp_path_factory.mktemp("evaluate")
    save_guide(small_model("bert"), folder)
    write_beir(folder / "dev", 40)
    pairs = [{"sentence1": text(i, 4), "sentence2": text(i + i % 3, 5), "score": i % 6} for i in range(30)]
    write_lines(folder / "mteb" / "stsbenchmark-sts" / "test.jsonl", pairs)
    answers = folder / "mteb" / "nfcorpus"
    write_lines(answers / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": text(i, 6)} for i in range(50)])
    write_lines(answers / "queries.jsonl", [{"_id": f"q{i}", "text": text(i, 3)} for i in range(9)])
    write_lines(answers / "qrels.jsonl", [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1} for i in range(9)])
    (answers / "README.md").write_text(NFCORPUS)
    # Enough to be in the middle of it for a while, one text a pass.
    many = folder / "many"
    write_beir(many / "large", 4000)
    documents = [{"_id": f"d{i}", "title": "", "text": f"{i} {text(i, 6)}"} for i in range(4000)]
    write_lines(many / "mteb" / "nfcorpus" / "corpus.jsonl", documents)
    for name in ("queries.jsonl", "qrels.jsonl", "README.md"):
        (many / "mteb" / "nfcorpus" / name).write_bytes((answers / name).read_bytes())
    return folder


def rows(folder: Path) -> dict[str, dict]:
    return {row["set"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_sets_and_mteb_together(workshop, monkeypatch):
    """Two ranks, then one that finds the documents' vectors: the same metrics, in mteb's own files too."""
    monkeypatch.setitem(ENVIRONMENT, "HF_DATASETS_CACHE", str(workshop / "cache"))
    common = [MODULE, "model=guide", "sets=[dev]", "mteb=[STSBenchmark,NFCorpus,SciFact]", "vectors_dir=vectors"]
    printed = call(*common, "output_dir=two", "save_runs=true", ranks=2, cwd=workshop, code=1)
    missing = "mteb task SciFact: its data set mteb/scifact is not available"
    assert printed.count(f"warning: {missing}") == 1
    assert printed.count("error: 1 of mteb's tasks could not be run: ") == 1
    assert "embedtrain/" not in printed and "it/s" not in printed, printed
    assert re.search(r"^ +STSBenchmark +sts +[-.\d]+$", printed, re.MULTILINE), printed
    actual = rows(workshop / "two")
    assert actual["dev"]["dataset"] == {
        "kind": "retrieval", "queries": 40, "documents": 40, "subset": False, "precision": "fp32",
    }  # fmt: skip
    assert actual["NFCorpus"]["dataset"] == {"kind": "retrieval", "subset": False, "precision": "fp32"}
    assert set(actual) == {"dev", "STSBenchmark", "NFCorpus"}
    assert set(actual["NFCorpus"]) == {"step", "set", "dataset", "model", "ndcg_at_10"}
    assert {path.name for path in (workshop / "two" / "runs").iterdir()} == {"dev.run", "dev.qrels"}
    (kept,) = (workshop / "two" / "mteb" / "results").glob("*guide/*/NFCorpus.json")
    scores = json.loads(kept.read_text())["scores"]["test"][0]
    assert scores["ndcg_at_10"] == pytest.approx(actual["NFCorpus"]["ndcg_at_10"], abs=1e-6)
    stored = sorted((workshop / "vectors").rglob("*.safetensors"))
    assert len(list((workshop / "vectors").iterdir())) == 2, "of both corpora"
    call(*common, "output_dir=one", "unshard=model", "index.place=host", cwd=workshop, code=1)
    assert sorted((workshop / "vectors").rglob("*.safetensors")) == stored, "vectors were found, and none made again"
    for name, row in rows(workshop / "one").items():
        assert row.pop("dataset") == actual[name].pop("dataset")
        assert row == pytest.approx(actual[name], abs=1e-6), name


@pytest.mark.slow
def test_a_suite_of_mteb_and_the_same_sets(workshop, tmp_path, monkeypatch):
    """NanoBEIR from local copies, by mteb and as evaluation sets; what the Hub has to deliver without one of them."""
    monkeypatch.setitem(ENVIRONMENT, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = [each.path for each in parse_sets("nanobeir", "sets")]
    for number, name in enumerate(names):
        folder = tmp_path / name
        documents = [{"_id": f"d{i}", "title": "", "text": text(i + number, 6)} for i in range(20)]
        write_lines(folder / "corpus.jsonl", documents)
        write_lines(folder / "queries.jsonl", [{"_id": f"q{i}", "text": text(i + number, 3)} for i in range(5)])
        judged = [{"query-id": f"q{i}", "corpus-id": f"d{(i + number) % 20}", "score": 1} for i in range(5)]
        write_lines(folder / "qrels.jsonl", judged)
        (folder / "README.md").write_text(
            NFCORPUS.replace("split: corpus", "split: train")
            .replace("split: queries", "split: train")
            .replace("split: test", "split: train")
        )
    common = [MODULE, f"model={workshop / 'guide'}"]
    printed = call(*common, "suite=nanobeir", "output_dir=mteb-run", ranks=2, cwd=tmp_path)
    assert "suite nanobeir: NanoBEIR of mteb, mean nDCG@10 of 13 tasks" in printed
    figures = rows(tmp_path / "mteb-run")
    assert len(figures) == 14
    of_tasks = {name: figures[name.removeprefix("mteb/")]["ndcg_at_10"] for name in names}
    assert figures["nanobeir"]["ndcg_at_10"] == pytest.approx(np.mean(list(of_tasks.values())), abs=1e-9)
    assert figures["nanobeir"]["dataset"]["kind"] == "mean"
    assert re.search(r"^ +nanobeir +mean +[.\d]+$", printed, re.MULTILINE), printed
    call(*common, "sets=[nanobeir]", "output_dir=sets-run", cwd=tmp_path)
    of_sets = rows(tmp_path / "sets-run")
    for name, figure in of_tasks.items():
        assert of_sets[name.removeprefix("mteb/")]["ndcg@10"] == pytest.approx(figure, abs=1e-4), name  # mteb rounds
    shutil.rmtree(tmp_path / names[3])
    printed = call(*common, "suite=nanobeir", "output_dir=less", cwd=tmp_path, code=1)
    (sentence,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert "1 of mteb's tasks could not be run: " in sentence
    assert f"The Hub has to deliver {names[3]}: connect, or fetch" in sentence
    assert "nanobeir" not in rows(tmp_path / "less"), "no mean of a part"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sets=[nowhere]"], r"error: .*nowhere.*"),
        pytest.param(
            ["model=infinite", "sets=[dev]"],
            r"error: .*model=infinite: values of \d+ weights are not finite, the first of them embeddings\..*",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_errors_are_one_sentence_printed_once(workshop, arguments, sentence):
    if not (workshop / "infinite").exists():
        from shutil import copytree

        copytree(workshop / "guide", workshop / "infinite")
        path = workshop / "infinite" / "model.safetensors"
        weights = load_file(path)
        save_file({name: np.full_like(value, np.nan) for name, value in weights.items()}, path)
    printed = call(MODULE, "model=guide", *arguments, ranks=2, cwd=workshop, code=1)
    assert len(re.findall(f"^{sentence}$", printed, re.MULTILINE)) == 1, printed
    assert printed.count("error: ") == 1 and "evaluate/" not in printed, printed


def start_ranks(folder: Path, size: int, *arguments: str) -> list["subprocess.Popen[str]"]:
    """Ranks without torchrun: nobody ends the others when one is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    shared["HF_DATASETS_CACHE"] = str(folder / "cache")
    return [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "embedtrain", MODULE, f"model={folder.parent / 'guide'}", "chunk_tokens=32",
             *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
            env={**ENVIRONMENT, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "killed", "arguments", "begins", "meanwhile"),
    [
        (3, 1, ["sets=[../dev,large]"], "evaluating", " while evaluating large"),
        pytest.param(2, 0, ["mteb=[NFCorpus]"], "running NFCorpus", " while running NFCorpus", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed(workshop, size, killed, arguments, begins, meanwhile):
    """Every other rank ends within seconds, and one of them says which rank is lost; completed sets keep their rows."""
    ranks = start_ranks(workshop / "many", size, *arguments)
    try:
        assert ranks[0].stdout is not None
        printed = ""
        while begins not in printed:
            line = ranks[0].stdout.readline()
            assert line, printed
            printed += line
        metrics = workshop / "many" / "runs" / "evaluate" / "metrics.jsonl"
        while arguments[0].startswith("sets=") and not metrics.read_bytes():
            assert ranks[0].poll() is None
            time.sleep(0.01)
        time.sleep(0.2)  # a quick machine is done in a second
        os.kill(ranks[killed].pid, signal.SIGKILL)
        began, errors = time.monotonic(), []
        for rank, process in enumerate(ranks):
            rest, _ = process.communicate(timeout=60)
            if rank == killed:
                assert process.returncode == -signal.SIGKILL, rest
                continue
            assert process.returncode == 1, rest
            errors += [line for line in rest.splitlines() if "error: " in line]
            assert "Traceback" not in rest, rest
        assert errors == [f"error: rank {killed} on {socket.gethostname()} ended{meanwhile}"]
        assert time.monotonic() - began < 20
    finally:
        for process in ranks:
            process.kill()
