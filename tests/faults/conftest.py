"""Inputs of the runs, and the result of a run without faults."""

from pathlib import Path

import pytest

from tests.faults.runs import finish, training_result
from tests.small import save_small, small_model, write_beir, write_rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_rows(folder / "train.jsonl", 60)
    for name in ("dev", "dev2"):
        write_beir(folder / name, 20)
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "model")
    return folder


@pytest.fixture(scope="session")
def undisturbed(folder):
    """Final weights and metrics of a run of two ranks without faults."""
    finish(folder, "undisturbed")
    return training_result(folder / "undisturbed")
