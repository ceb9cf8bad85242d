"""Clusters that run for all tests of a module, the training data, and the result of an uninterrupted run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import training_result
from tests.slurm.cluster import Cluster, running, why_not
from tests.slurm.jobs import OPTIONS, Jobs, torchrun
from tests.small import save_small, small_model, write_beir, write_rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    write_rows(folder / "train.jsonl", 60)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "model")
    return folder


@pytest.fixture(scope="session")
def uninterrupted(folder):
    """Final weights and rows of an uninterrupted run on two ranks, without SLURM."""
    torchrun(folder, 2, *OPTIONS, "output_dir=uninterrupted")
    return training_result(folder / "uninterrupted")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Signals reach every process of a step, and jobs get their signal before a preemption."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with running(proctrack="linuxproc", sends_user_signal=True, node_timeout=15) as started:
        yield started


@pytest.fixture(scope="module")
def plain_cluster() -> Iterator[Cluster]:
    """Signals reach only the tasks of a step, as with cgroups; preemption starts with SIGTERM; lost nodes show late."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with running(proctrack="pgid", sends_user_signal=False, node_timeout=900) as started:
        yield started


@pytest.fixture
def jobs(cluster, folder) -> Iterator[Jobs]:
    yield Jobs(cluster, folder)
    cluster.calm()


@pytest.fixture
def plain_jobs(plain_cluster, folder) -> Iterator[Jobs]:
    yield Jobs(plain_cluster, folder)
    plain_cluster.calm()
