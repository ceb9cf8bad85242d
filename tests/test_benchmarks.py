"""What the benchmarks rely on: texts of the shapes that are told, sides that are compared, rows that fail alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import gpu, gpu_models
from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, Timed, WrongResult
from benchmarks.sides import Took, compared
from benchmarks.workloads import Workload, equal_lengths, question_passage, short_pairs, web
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("workload", "padding"),
    [(question_passage(), (1.9, 2.2)), (short_pairs(), (1.9, 2.3)), (web(), (2.5, 3.1)), (equal_lengths(), (1.0, 1.0))],
    ids=lambda given: given.name if isinstance(given, Workload) else "",
)
def test_texts_have_the_shape_that_is_told(workload: Workload, padding: tuple[float, float]) -> None:
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    steps, found = ROUNDS * workload.steps, []
    data = workload.data(steps, tokenizer)
    assert data.plan.steps_per_epoch == steps
    for step in range(steps):
        lengths = data.batch(step).tokens.lengths.reshape(2, workload.num_pairs)
        assert lengths.max() <= workload.max_length
        found.append(workload.num_pairs * lengths.max(axis=1).sum() / lengths.sum())
    assert padding[0] <= np.mean(found) <= padding[1]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [(Took((1.0, 2.1), 10, 20), r"losses are 0\.1"), (Took((1.0, 2.0), 11, 20), "not the same tokens")],
)
def test_sides_that_differ_stop_the_run(theirs: Took, said: str) -> None:
    ours = [Timed(Took((1.0, 2.0), 10, 12), 1.0)]
    assert compared("a table", ours, [Timed(ours[0].value, 3.0)], 1e-5)[2].startswith("3.00")
    with pytest.raises(WrongResult, match=said):
        compared("a table", ours, [Timed(theirs, 3.0)], 1e-5)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Way]:
    """Two ways, and as few steps as there can be."""
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu, "STEPS", 1)
    return [gpu.WAYS[0], next(way for way in gpu.WAYS if way.keep is None)]


def test_a_row_without_memory_says_so_and_the_others_go_on(
    rows: list[gpu.Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, failures = gpu_models.tiny(gpu_models.MODELS[-1]), [torch.OutOfMemoryError("too much"), ConfigError("never")]
    load = gpu.load

    def scarce(*args: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return load(*args, **options)

    monkeypatch.setattr(gpu, "load", scarce)
    table = gpu.table([sized], [rows[0], *rows], matmul=64).splitlines()[-3:]
    assert "failed: never" in table[0]
    assert "out of memory" in table[1]
    kept = int(table[2].split(" | ")[3].removesuffix("%"))
    assert 40 <= kept <= 75


def test_a_loss_that_differs_is_no_speed(rows: list[gpu.Way], monkeypatch: pytest.MonkeyPatch) -> None:
    step, reports = gpu.train_step, []

    def wrong_later(*given: Any) -> Any:
        reports.append(step(*given))
        return replace(reports[-1], loss=reports[-1].loss * (1.0 if len(reports) <= 3 else 1.1))

    monkeypatch.setattr(gpu, "train_step", wrong_later)
    sized = gpu_models.tiny(gpu_models.MODELS[0])
    table = gpu.table([sized], [rows[0], rows[0]], matmul=64).splitlines()[-2:]
    assert "wrong" not in table[0]
    assert "wrong: its loss is" in table[1]
