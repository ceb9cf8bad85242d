"""Two hosts, and the rows and the model of a small run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.launched import Launched
from tests.hosts.network import Network, why_not
from tests.small import save_small, small_model, write_beir, write_rows


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    network = Network(2, f"e{os.getpid() % 10**5}")
    try:
        network.up()
        yield network
    finally:
        network.down()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    write_rows(folder / "train.jsonl", 60)
    write_beir(folder / "dev", 20)
    write_beir(folder / "large", 6000)  # whose evaluation takes seconds
    save_small(small_model("xlm-roberta"), folder / "model")
    return folder


@pytest.fixture
def launched(network, folder) -> Iterator[Launched]:
    """The command on both hosts; whatever still runs at the end is killed."""
    launched = Launched(network, folder)
    yield launched
    launched.end()
