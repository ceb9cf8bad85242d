"""The checks of `make test-gpu` run on the CPU in the ordinary suite, so that only the device is new on a GPU."""

from collections.abc import Iterator

import pytest

from embedtrain.distributed.world import World, joined_world


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of one rank, in this process."""
    with joined_world() as world:
        assert world.device.type == request.param
        yield world
