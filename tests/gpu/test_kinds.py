"""Runs of every kind of model on the device, packed where it packs, against the same runs on the CPU."""

import pytest

from tests.pretend_cuda.test_kinds import KINDS, OPTIONS, inputs, options_of  # noqa: F401  a fixture
from tests.runs import evaluation_metrics, losses, run_without_base


def run(_world, *arguments):
    run_without_base(_world, *OPTIONS, *arguments)


# Three steps in fp32 add rounding errors of another order of sums; in bf16 activations have 8 bits.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
@pytest.mark.parametrize("name", KINDS)
def test_runs_equal_those_on_the_cpu(ranks, device_ranks, inputs, tmp_path, name, precision, tolerance):  # noqa: F811
    options = options_of(KINDS[name], inputs, tmp_path)
    ranks(1, run, *options, f"output_dir={tmp_path / 'cpu'}")
    device_ranks(1, run, *options, f"parallel.precision={precision}", f"output_dir={tmp_path / 'device'}")
    assert losses(tmp_path / "device") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)
    found, expected = (evaluation_metrics(tmp_path / folder) for folder in ("device", "cpu"))
    assert found.keys() == expected.keys()
    if precision == "fp32":
        for step, metrics in expected.items():
            assert found[step] == pytest.approx(metrics, rel=tolerance)
