"""The benchmarks: texts have the documented lengths, results are compared, a failing row does not stop a table."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.comparison import StepResults, comparison_cells
from benchmarks.gpu import __main__ as gpu_main
from benchmarks.gpu import models as gpu_models
from benchmarks.gpu import training as gpu
from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, Timed, WrongResult
from benchmarks.workloads import Workload, equal_lengths, question_passage, short_pairs, web
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import ConfigError

QUICK = ("search",)


@pytest.mark.parametrize(
    ("workload", "padding"),
    [(question_passage(), (1.9, 2.2)), (short_pairs(), (1.9, 2.3)), (web(), (2.5, 3.1)), (equal_lengths(), (1.0, 1.0))],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_workloads_have_the_documented_padding(workload: Workload, padding: tuple[float, float]) -> None:
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    steps, factors = ROUNDS * workload.steps, []
    data = workload.data(steps, tokenizer)
    assert data.plan.steps_per_epoch == steps
    for step in range(steps):
        lengths = data.batch(step).tokens.lengths.reshape(2, workload.num_pairs)
        assert lengths.max() <= workload.max_length
        factors.append(workload.num_pairs * lengths.max(axis=1).sum() / lengths.sum())
    assert padding[0] <= np.mean(factors) <= padding[1]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (StepResults((1.0, 2.1), 10, 20), r"losses differ by 0\.1"),
        (StepResults((1.0, 2.0), 11, 20), "token counts differ"),
    ],
)
def test_different_results_raise(theirs: StepResults, message: str) -> None:
    ours = [Timed(StepResults((1.0, 2.0), 10, 12), 1.0)]
    assert comparison_cells("a table", ours, [Timed(ours[0].value, 3.0)], 1e-5)[2].startswith("3.00")
    with pytest.raises(WrongResult, match=message):
        comparison_cells("a table", ours, [Timed(theirs, 3.0)], 1e-5)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Variant]:
    """Two variants, and the minimal number of steps."""
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu, "STEPS", 1)
    return [gpu.VARIANTS[0], next(variant for variant in gpu.VARIANTS if variant.cached is None)]


def test_a_failing_row_reports_its_error_and_the_next_rows_run(
    variants: list[gpu.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, failures = gpu_models.tiny(gpu_models.MODELS[-1]), [torch.OutOfMemoryError("too much"), ConfigError("never")]
    load = gpu.load

    def failing_load(*args: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return load(*args, **options)

    monkeypatch.setattr(gpu, "load", failing_load)
    table = gpu.table([sized], [variants[0], *variants], matmul=64).splitlines()[-3:]
    assert "failed: never" in table[0]
    assert "out of memory" in table[1]
    cached = int(table[2].split(" | ")[3].removesuffix("%"))
    assert 40 <= cached <= 75


def test_a_variant_with_a_different_loss_is_reported_as_wrong(
    variants: list[gpu.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, reports = gpu.train_step, []

    def wrong_from_the_fourth_step(*args: Any) -> Any:
        reports.append(step(*args))
        return replace(reports[-1], loss=reports[-1].loss * (1.0 if len(reports) <= 3 else 1.1))

    monkeypatch.setattr(gpu, "train_step", wrong_from_the_fourth_step)
    sized = gpu_models.tiny(gpu_models.MODELS[0])
    table = gpu.table([sized], [variants[0], variants[0]], matmul=64).splitlines()[-2:]
    assert "wrong" not in table[0]
    assert "wrong: its loss is" in table[1]


def test_stored_tables_are_replaced_and_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "DEVICE.md"
    assert gpu_main.missing(path) == list(gpu_main.TABLES)
    gpu_main.store(path, "search", ("Search", "| 1 |"))
    gpu_main.store(path, "losses", ("Losses", "| 2 |"))
    gpu_main.store(path, "search", ("Search", "| 3 |"))
    text = path.read_text()
    assert text.startswith("# DEVICE\n")
    assert text.index("| 2 |") < text.index("| 3 |"), "tables keep their order"
    assert "| 1 |" not in text
    assert gpu_main.missing(path) == [name for name in gpu_main.TABLES if name not in ("search", "losses")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in gpu_main.TABLES]
)
def test_every_table_runs_with_tiny_models(name: str) -> None:
    """In a process of its own, as on a GPU: only the sizes and the device are new there."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", name]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    _, _, *rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert rows
    for problem in ("failed", "wrong", "out of memory", "nan"):
        assert problem not in "".join(rows)
