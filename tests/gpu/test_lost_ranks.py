"""A killed or hanging rank under NCCL: the watchdog names it before NCCL ends the process, as it does under gloo."""

import signal
import socket

import pytest
import torch

from tests.faults.conftest import folder  # noqa: F401  a fixture
from tests.faults.hooks import InStep, SignalWhen
from tests.faults.runs import Run, start

pytestmark = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def require_two(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def only_error(run: Run, device: str) -> str:
    """The one message of the run, which NCCL's watchdog has not ended."""
    assert f"2 ranks ({device})" in run.text
    assert "taking the entire process down" not in run.text
    assert len(run.errors) == 1, run.text
    return run.errors[0]


def test_a_killed_rank(folder, device):  # noqa: F811
    require_two(device)
    run = start(folder, f"killed-{device}", hook=SignalWhen(1, "training", 4), forked=False)
    assert run.wait(180) == [1, -signal.SIGKILL], run.text
    assert f"rank 1 on {socket.gethostname()} ended while " in only_error(run, device)


def test_a_hanging_rank(folder, device):  # noqa: F811
    require_two(device)
    hook = InStep(rank=1, step=4, seconds=170)
    run = start(folder, f"hangs-{device}", "parallel.step_timeout=12", hook=hook, forked=False)
    assert run.wait(240) == [1, 1], run.text
    assert f'rank 1 on {socket.gethostname()} hangs: alive, but in "training, step 5"' in only_error(run, device)
