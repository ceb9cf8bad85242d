"""Which tests see a GPU: those marked gpu and no others, whatever the machine has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embedtrain.distributed.world import World

TESTS = Path(__file__).parent


def visible_devices(world: World) -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()


def test_other_tests_and_their_ranks_see_no_gpu(ranks):
    assert ranks(2, visible_devices) == [("", 0)] * 2
    assert visible_devices(None) == ("", 0)


@pytest.mark.gpu
def test_tests_marked_gpu_see_one():
    assert torch.cuda.device_count() > 0
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize(
    ("selection", "visible"),
    [
        ("gpu", "-1"),
        pytest.param("not slow", "", marks=pytest.mark.slow),
    ],  # test_other_tests_and_their_ranks_see_no_gpu
)
def test_gpus_are_hidden_unless_only_tests_marked_gpu_run(tmp_path, selection, visible):
    """-1 hides them from torch as well, and is not what the ordinary tests are given."""
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n@pytest.mark.gpu\ndef test_it(): pass\n"
        "print('visible:', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-rs", "-m", selection, "-p", "tests.conftest"]
    output = subprocess.run(
        [*command, "-c", str(TESTS.parent.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        cwd=TESTS.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"visible: {visible}\n" in output
    assert "1 skipped" in output
    assert "no CUDA device" in output
