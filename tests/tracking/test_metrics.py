"""metrics.jsonl: one consistent history, whatever happens to the run."""

import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from embedtrain.errors import DataError
from embedtrain.tracking.metrics import (
    DatasetInfo,
    FirstStage,
    MetricsFile,
    VectorSize,
    datasets_at,
    evaluation_row,
    main_changes,
    metrics_at,
    read_metrics,
)
from embedtrain.tracking.pages import vector_rows


def test_every_row_is_in_the_file_immediately(tmp_path):
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    metrics.append({"step": 1, "loss": 2.5})
    metrics.append({"step": 1, "set": "开发集\u2028", "ndcg@10": 0.5})
    assert read_metrics(metrics.path) == [
        {"step": 1, "loss": 2.5},
        {"step": 1, "set": "开发集\u2028", "ndcg@10": 0.5},
    ]


def test_the_same_row_is_not_added_twice(tmp_path):
    row = {"step": 0, "set": "dev", "model": "a\u2028b", "ndcg@10": 0.5}
    for _ in range(2):
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        for each in (row, row | {"ndcg@10": 0.25}, row):
            metrics.append_new(each)
        metrics.close()
    assert read_metrics(metrics.path) == [row, row | {"ndcg@10": 0.25}]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "deep": {"list": [-float("inf"), 1.0]}})
    metrics.append({"step": 2, "loss": np.float32(0.5), "grad_norm": torch.tensor(float("nan"))})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in metrics.path.read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": None, "grad_norm": None, "deep": {"list": [None, 1.0]}},
        {"step": 2, "loss": 0.5, "grad_norm": None},
    ]


def test_a_resumed_run_leaves_the_history_of_an_uninterrupted_one(tmp_path):
    def train(path, first, last, resumed_step=None):
        metrics = MetricsFile(path)
        if resumed_step is not None:
            metrics.truncate_after(resumed_step)
        for step in range(first, last + 1):
            metrics.append({"step": step, "loss": 1 / step})
            if step % 2 == 0:
                metrics.append({"step": step, "set": "dev", "ndcg@10": step / 10})
        metrics.close()

    train(tmp_path / "whole.jsonl", 1, 8)
    train(tmp_path / "stopped.jsonl", 1, 6)
    train(tmp_path / "stopped.jsonl", 5, 8, resumed_step=4)
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "set": "开', "\x00\x00\x00", "3"])
def test_an_incomplete_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn.encode()[:-1] + torn.encode()[-1:])
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    MetricsFile(path).append({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_complete_last_line_without_a_line_break_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    MetricsFile(path).append({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_an_invalid_line_in_the_middle_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 "):
        MetricsFile(path)


@pytest.mark.parametrize("line", ['{"step": "x"}', '{"step": -1}', '{"step": 1, "set": [1]}', "[" * 100_000, "[1]"])
def test_a_line_of_other_types_is_no_row(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 3}}\n')
    for read in (lambda: MetricsFile(tmp_path / "metrics.jsonl"), lambda: metrics_at(tmp_path, 3)):
        with pytest.raises(DataError, match=r"metrics\.jsonl:1 "):
            read()


def test_results_of_a_step_are_the_finite_numbers(tmp_path):
    rows = [{"step": 3, "set": "a", "ndcg@10": 0.5, "mrr@10": None, "model": "x"}, {"set": "b", "ndcg@10": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert metrics_at(tmp_path, 3) == {"a": {"ndcg@10": 0.5}}
    assert main_changes(tmp_path, 3) == []


def test_changes_are_from_the_first_evaluated_step_to_the_exported_one(tmp_path):
    """The main metric is the first of a row, whatever it is called."""
    dataset = {"kind": "pair_classification", "pairs": 9, "subset": False}
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, ap in ((4, 0.25), (8, 0.75), (12, 0.5)):
        metrics.append({"step": step, "set": "pairs", "dataset": dataset, "ap": ap, "f1": 0.5})
    metrics.append({"step": 8, "set": "once", "ap": 0.5})
    assert [str(change) for change in main_changes(tmp_path, 8)] == ["pairs: ap 0.2500 at step 4, 0.7500 at step 8"]
    assert [str(change) for change in main_changes(tmp_path, 9)] == ["pairs: ap 0.2500 at step 4, 0.5000 at step 12"]


def test_a_reranked_set_says_what_its_first_stage_reached(tmp_path):
    """Otherwise a reranker that is worse than BM25 reads as a success."""
    dataset = DatasetInfo("reranking", {"queries": 3}, subset=False, first_stage=FirstStage("bm25", "ndcg@10", 0.75))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, value in ((0, 0.25), (4, 0.5)):
        metrics.append(evaluation_row(step, "dev", {"ndcg@10": value}, dataset))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["dataset"]["first_stage"] == {"name": "bm25", "ndcg@10": 0.75}
    assert datasets_at(tmp_path, 4) == {"dev": dataset}
    assert dataset.size == "3 queries, ndcg@10 0.7500 in the order of BM25"
    (change,) = main_changes(tmp_path, 4)
    assert str(change).endswith(", 0.5000 at step 4 (worse than ndcg@10 0.7500 in the order of BM25)")
    metrics.append(evaluation_row(5, "dev", {"ndcg@10": 0.7501}, dataset))
    assert str(main_changes(tmp_path, 5)[0]).endswith("(better than ndcg@10 0.7500 in the order of BM25)")
    only = tmp_path / "only"
    MetricsFile(only / "metrics.jsonl").append(evaluation_row(9, "dev", {"ndcg@10": 0.75}, dataset))
    (line,) = map(str, main_changes(only, 9))
    assert line == "dev: ndcg@10 0.7500 at step 9 (the same as ndcg@10 0.7500 in the order of BM25)"


def test_rows_of_compressed_vectors_have_their_bytes(tmp_path):
    infos = {
        "dev": DatasetInfo("retrieval", {"queries": 3}, subset=False, vectors=VectorSize("16", 64, 0)),
        "dev@binary-x2": DatasetInfo("retrieval", {"queries": 3}, subset=False, vectors=VectorSize("binary-x2", 2, 16)),
    }
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    results = {"dev": {"ndcg@10": 0.8}, "dev@binary-x2": {"ndcg@10": 0.6}}
    for name, values in results.items():
        metrics.append(evaluation_row(4, name, values, infos[name]))
    assert datasets_at(tmp_path, 4) == infos
    whole, form = vector_rows(results, infos)
    assert (whole.label, whole.bytes, whole.kept, whole.rescoring) == ("16 (float)", 64, "100.0%", "")
    assert (form.set_name, form.label, form.smaller, form.rescoring, form.kept) == (
        "dev", "binary-x2", 32, "16", "75.0%",
    )  # fmt: skip
    assert vector_rows({"dev": {"ndcg@10": 0.8}}, infos) == [], "nothing to compare"


def test_a_row_says_what_was_measured(tmp_path):
    dataset = DatasetInfo("retrieval", {"queries": 300, "documents": 4800}, subset=True, precision="bf16")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(evaluation_row(3, "dev", {"ndcg@10": 0.5}, dataset))
    metrics.append({"step": 3, "set": "old", "ndcg@10": 0.5})
    metrics.append({"step": 3, "set": "odd", "dataset": ["retrieval"], "ndcg@10": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == {
        "step": 3,
        "set": "dev",
        "dataset": {"kind": "retrieval", "queries": 300, "documents": 4800, "subset": True, "precision": "bf16"},
        "ndcg@10": 0.5,
    }
    assert metrics_at(tmp_path, 3) == {name: {"ndcg@10": 0.5} for name in ("dev", "old", "odd")}
    assert datasets_at(tmp_path, 3) == {"dev": dataset}
    assert datasets_at(tmp_path, 4) == {}
    assert (dataset.label, dataset.size) == ("retrieval (subset)", "300 queries, 4,800 documents, bf16")


def test_a_row_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    pid = os.fork()
    if pid == 0:  # a file size limit stands for the full disk; it would stay with this process forever
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            metrics = MetricsFile(path)
            metrics.append({"step": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
            try:
                metrics.append({"step": 2})
            except OSError:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                metrics.append({"step": 3})
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_run_killed_while_writing_leaves_a_readable_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys; from embedtrain.tracking.metrics import MetricsFile\n"
        "metrics, step = MetricsFile(sys.argv[1]), 0\n"
        "while True:\n    step += 1\n    metrics.append({'step': step, 'loss': 1.0})\n    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    last = [int(process.stdout.readline()) for _ in range(100)][-1]
    process.kill()
    process.wait()
    rows = read_metrics(path)
    assert len(rows) >= last
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
