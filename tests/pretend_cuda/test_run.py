"""A whole run on the pretended device: evaluation, timing, profile, tracking, checkpoints, resuming and export."""

import pytest

from embedtrain.distributed.world import World
from embedtrain.planning import flops
from tests import runs
from tests.pretend_cuda.steps import on_cpu
from tests.runs import evaluation_metrics, losses, metric_rows, options, rewind_run


def run(world: World, cpu: bool, *arguments: str) -> str:
    """The run's output; the matrices that measure the device are small."""
    flops.SIZES, flops.SECONDS = {"cuda": (64,), "cpu": (64,)}, {"cuda": 0.01, "cpu": 0.01}
    return runs.run(on_cpu(world) if cpu else world, *arguments)


def test_train_evaluate_profile_resume_and_export(cuda_ranks, run_inputs, tmp_path):
    """In fp32; the device's run, and the same resumed from its first checkpoint, have the numbers of the CPU's."""
    arguments = (
        "train.steps=4", "evaluation.every=2", "evaluation.at_start=true", "checkpoint.every=2", "checkpoint.keep=9",
        "tracking.profile=[2]", "tracking.report=true",
    )  # fmt: skip
    for name, cpu in (("device", False), ("cpu", True)):
        cuda_ranks(2, run, cpu, *options(run_inputs, tmp_path / name, *arguments))
    rewind_run(tmp_path / "device", tmp_path / "resumed", 2)
    output = cuda_ranks(2, run, False, *options(run_inputs, tmp_path / "resumed", *arguments))[0]
    assert "resuming from" in output
    for name in ("device", "resumed"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)
        for step, metrics in evaluation_metrics(tmp_path / "cpu").items():
            assert evaluation_metrics(tmp_path / name)[step] == pytest.approx(metrics, rel=1e-4)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "device")
    assert list((tmp_path / "device").rglob("*rank-0.json.gz")), "the profile's trace"
    assert metric_rows(tmp_path / "device")[-2]["memory_gib"] == 1.0, "what torch.cuda reports"
