"""The CPU image is really built, and trains, exports and searches in it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.docker.builder import Builder, find_builder

TAG = "localhost/embedtrain:cpu-test"
pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def builder() -> Builder:
    builder = find_builder()
    if isinstance(builder, str):
        pytest.skip(builder)
    built = builder.build("docker/Dockerfile.cpu", TAG)
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    assert "0 problems" in built.stdout + built.stderr or "CACHED" in built.stderr or "Using cache" in built.stdout
    return builder


@pytest.mark.parametrize("user", [None, "4321:4321"])
def test_quickstart(builder, tmp_path, user):
    """On two ranks, as the image's own user and as one that it does not know, into a folder of the host."""
    uid = 1000 if user is None else 4321
    os.chown(tmp_path, uid, uid)
    who = builder.run(TAG, ["id", "-u"], user=user, mount=tmp_path)
    assert who.stdout.strip() == str(uid), who.stderr
    trained = builder.run(
        TAG,
        ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "embedtrain", "recipe=quickstart", "train.steps=6",
         "evaluation.at_start=false", "evaluation.subset=50", "output_dir=/workspace/runs/quickstart"],
        user=user, mount=tmp_path,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "quickstart on 2 ranks (cpu)" in trained.stdout
    model = tmp_path / "runs" / "quickstart" / "model"
    assert (model / "model.safetensors").stat().st_uid == uid
    corpus = _recipes(builder, tmp_path, user) + "/quickstart/dev-en"
    done = builder.run(
        TAG,
        ["python", "-m", "embedtrain", "search", "model=/workspace/runs/quickstart/model", f"corpus={corpus}",
         "top_k=3", "query=edit text"],
        user=user, mount=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line[:2] in ("0.", "-0", "1.")]) == 3, done.stdout


def test_doctor(builder, tmp_path):
    os.chown(tmp_path, 1000, 1000)
    done = builder.run(TAG, ["python", "-m", "embedtrain", "doctor", "quick=true"], mount=tmp_path)
    assert "0 problems" in done.stdout, done.stdout + done.stderr


def _recipes(builder: Builder, mount: Path, user: str | None) -> str:
    done: subprocess.CompletedProcess[str] = builder.run(
        TAG,
        ["python", "-c", "from embedtrain.config.hydra_files import folder; print(folder('recipes'))"],
        user=user,
        mount=mount,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
