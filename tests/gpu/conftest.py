"""The checks of `make test-gpu` also run on the CPU, as slow tests: on a GPU only the device differs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Like `ranks`, with a GPU for each rank; skips where there are fewer."""
    pool = RankPool(nccl=True)

    def run(world_size: int, *arguments: Any, **options: Any) -> list[Any]:
        if world_size > torch.cuda.device_count():
            pytest.skip(f"needs {world_size} CUDA devices, and there is {torch.cuda.device_count()}")
        return pool.run(world_size, *arguments, **options)

    yield run
    pool.stop()


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device_ranks(request: pytest.FixtureRequest) -> Any:
    """`ranks` on the CPU, `gpu_ranks` among the tests marked gpu. `ranks` itself stays on the CPU, as the reference."""
    return request.getfixturevalue("ranks" if request.param == "cpu" else "gpu_ranks")
