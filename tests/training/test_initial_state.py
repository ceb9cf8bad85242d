"""`train.init_from`: a new run starts with the weights and the optimizer state of an earlier one."""

import json

import pytest
from safetensors.torch import load_file

from tests.runs import run
from tests.small import save_small, small_model


@pytest.fixture(scope="module")
def train(ranks, tmp_path_factory):
    """Trains two equal rows on two ranks, so that all batches are the same, in a folder of this name."""
    folder = tmp_path_factory.mktemp("initial")
    row = {"query": "alpha beta", "positive": "gamma delta", "negatives": ["eta", "theta mu", "nu iota"]}
    (folder / "train.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    model = save_small(small_model("llama"), folder / "model")
    common = [
        f"data.train=[{folder / 'train.jsonl'}]", "model.pooling=last", "train.global_batch_size=2",
        "optim.schedule=constant", "optim.warmup=0", "loss.learn_temperature=true", "checkpoint.layout=full",
        "checkpoint.every=2", "optim.lr=1e-2",
    ]  # fmt: skip

    def call(name, steps, *more, path=model):
        ranks(2, run, *common, f"model.path={path}", f"train.steps={steps}", f"output_dir={folder / name}", *more)
        return folder / name

    call("whole", 4)
    call("first", 2)
    return call, folder


def tensors(output_dir, step, kind):
    return load_file(output_dir / f"checkpoints/step-{step:08d}/{kind}.safetensors")


def require_equal(output_dir, whole):
    for kind in ("weights", "optimizer"):
        actual, expected = tensors(output_dir, 2, kind), tensors(whole, 4, kind)
        assert actual.keys() == expected.keys()
        assert all(actual[name].equal(tensor) for name, tensor in expected.items()), kind


def test_two_runs_are_one_run_of_all_steps(train):
    """Bit for bit, with the optimizer and the learned temperature."""
    call, folder = train
    second = call("second", 2, f"train.init_from={folder / 'first'}", path=folder / "first" / "model")
    require_equal(second, folder / "whole")


@pytest.mark.slow
def test_a_branch_of_a_longer_run(train):
    call, folder = train
    require_equal(call("branch", 2, f"train.init_from={folder}/whole/checkpoints/step-00000002"), folder / "whole")
    fresh = tensors(call("fresh", 2, path=folder / "first" / "model"), 2, "weights")
    assert any(not fresh[name].equal(tensor) for name, tensor in tensors(folder / "whole", 4, "weights").items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optim.name=lion", r"first was trained with optim\.name=adamw, this run has optim\.name=lion"),
        ("loss.learn_temperature=false", r"first: .* loss\..* is missing in the model"),
        ("model.lora.rank=2", r"first trained adapters .*start from the same base model"),
    ],
)
def test_another_optimizer_or_model_is_rejected(train, option, message):
    call, folder = train
    with pytest.raises(AssertionError, match=r"train\.init_from=.*" + message):
        call("no", 2, f"train.init_from={folder / 'first'}", option)
