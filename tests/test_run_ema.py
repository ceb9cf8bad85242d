"""A moving average of the weights in whole runs: values, resume, evaluation and export."""

import shutil

import torch
from safetensors.torch import load_file
from torch import Tensor

from embedtrain.commands.export import ExportOptions
from embedtrain.commands.export import run as export_main
from embedtrain.config.recipe import WeightsOf
from embedtrain.tracking.metrics import metrics_at
from tests.runs import evaluation_metrics, losses, options, rewind_run, run

DECAY, STEPS = 0.5, 4


def tensors(directory, kind: str) -> dict[str, Tensor]:
    (file,) = directory.glob(f"{kind}*.safetensors")
    return load_file(file)


def test_the_average_is_evaluated_exported_and_resumed(ranks, run_inputs, tmp_path):
    """By hand from the weights of each step on two ranks; resumed on one; losses are those of a run without it."""
    # With the usual eps, Adam takes whole steps by gradients that are nothing but rounding.
    common = (
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "checkpoint.layout=full",
        f"train.steps={STEPS}",
        "optim.eps=1e-3",
    )
    start = (*common, f"optim.ema={DECAY}", "evaluation.every=2", "evaluation.trained_weights=true")
    whole = tmp_path / "whole"
    ranks(2, run, *options(run_inputs, whole, *start))
    checkpoints = [whole / "checkpoints" / f"step-{step:08d}" for step in range(1, STEPS + 1)]
    initial = load_file(run_inputs / "model" / "model.safetensors")
    live = [tensors(checkpoint, "weights") for checkpoint in checkpoints]
    averages = {name: initial[name.removeprefix("encoder.backbone.")].double() for name in live[0] if "encoder" in name}
    for step, weights in enumerate(live):
        decay = min(DECAY, (1 + step) / (10 + step))
        averages = {name: decay * value + (1 - decay) * weights[name].double() for name, value in averages.items()}
    saved = tensors(checkpoints[-1], "ema")
    for name, value in averages.items():
        torch.testing.assert_close(saved[name].double(), value, rtol=1e-6, atol=1e-7, msg=name)
    exported = load_file(whole / "model" / "model.safetensors")
    for name in averages:
        assert exported[name.removeprefix("encoder.backbone.")].equal(saved[name]), name
    assert any(not value.equal(live[-1][name]) for name, value in saved.items())

    resumed = rewind_run(whole, tmp_path / "resumed", 2)
    ranks(1, run, *options(run_inputs, resumed, *start))
    again = tensors(resumed / "checkpoints" / f"step-{STEPS:08d}", "ema")
    for name, value in saved.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert evaluation_metrics(resumed)[STEPS].keys() == evaluation_metrics(whole)[STEPS].keys()

    after = metrics_at(whole, STEPS)
    assert after["dev@trained"].keys() == after["dev"].keys()
    assert "dev@trained" not in (whole / "model" / "README.md").read_text()

    # A run that begins to average at step 2 starts from the weights, and training is not affected.
    plain = tmp_path / "plain"
    ranks(2, run, *options(run_inputs, plain, *common))
    assert losses(plain) == losses(whole)
    assert metrics_at(plain, STEPS)["dev"] == after["dev@trained"]
    later = rewind_run(plain, tmp_path / "later", 2)
    ranks(2, run, *options(run_inputs, later, *start))
    assert losses(later) == losses(whole)
    begun = tensors(later / "checkpoints" / "step-00000003", "ema")
    name = next(iter(averages))
    decay = min(DECAY, 3 / 12)
    torch.testing.assert_close(begun[name], decay * live[1][name] + (1 - decay) * live[2][name], rtol=1e-5, atol=1e-7)

    trained = export_main(
        ExportOptions(run=str(whole), output_dir=str(tmp_path / "trained"), weights_of=WeightsOf.trained, check=False)
    )
    stored = load_file(trained / "model.safetensors")
    assert all(stored[name.removeprefix("encoder.backbone.")].equal(live[-1][name]) for name in averages)
    shutil.rmtree(whole / "model")
    directory = export_main(ExportOptions(run=str(whole), check=False))
    again = load_file(directory / "model.safetensors")
    assert all(again[name].equal(value) for name, value in exported.items())
