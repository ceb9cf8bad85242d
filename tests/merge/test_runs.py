"""Merging what runs leave behind: checkpoints of a run, runs, adapters; weights that evaluation sets choose."""

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.tracking.metrics import metrics_at
from tests.merge.models import is_pooler, merge, merge_on_rank, split_weights, state_of
from tests.runs import BASE, options, run, run_without_base, write_run_inputs
from tests.safety.payloads import MARKER, edit, plant_module
from tests.small import save_guide, save_language_model, small_model, write_beir


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_run_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(ranks, inputs):
    """A run on two ranks with the steps 1 to 3 as sharded checkpoints."""
    more = ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=9", "evaluation.every=1", "optim.lr=1e-2"]
    ranks(2, run, *options(inputs, inputs / "run", *more))
    return inputs / "run"


def exported(run_dir, step, folder):
    from embedtrain.commands.export import compose
    from embedtrain.commands.export import run as main

    main(compose([f"run={run_dir}", f"step={step}", f"output_dir={folder / f'step{step}'}"]))
    return state_of(folder / f"step{step}")


def test_checkpoints_of_a_run(finished, tmp_path):
    """The mean of the last two steps is that of their exports; a list, a path and the run itself name them as well."""
    states = [exported(finished, step, tmp_path) for step in (2, 3)]
    mean = {name: ((states[0][name].double() + states[1][name].double()) / 2).float() for name in states[0]}
    merge(f"run={finished}", "steps=last-2", f"output_dir={tmp_path / 'last'}")
    assert all(torch.equal(tensor, mean[name]) for name, tensor in state_of(tmp_path / "last").items())
    path = finished / "checkpoints" / "step-00000002"
    merge(f"models=[{path},{finished}]", f"output_dir={tmp_path / 'paths'}", "check=false")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "paths" / name).read_bytes() == (tmp_path / "last" / name).read_bytes()
    # Their unused pooler is that of the start, and stays; with a model of another one, neither is in the file.
    other, start = shutil.copytree(finished / "model", tmp_path / "other"), states[0]
    (other / "embedtrain.json").unlink()
    state = {name: tensor + 1 if is_pooler(name) else tensor for name, tensor in state_of(other).items()}
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    merge(f"models=[{path},{other}]", f"output_dir={tmp_path / 'mixed'}", "check=false")
    for name in filter(is_pooler, start):
        assert torch.equal(state_of(tmp_path / "last")[name], start[name])
        assert not state_of(tmp_path / "mixed")[name].any()
    assert any(map(is_pooler, start))
    record = json.loads((tmp_path / "last" / "merge.json").read_text())
    assert [model["model"] for model in record["models"]] == [
        str(finished / "checkpoints" / f"step-{step:08d}") for step in (2, 3)
    ]
    merge(
        f"run={finished}", "steps=best-1", "best_metric=dev/ndcg@10", f"output_dir={tmp_path / 'best'}", "check=false"
    )
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    best = max((row for row in rows if row.get("set") == "dev"), key=lambda row: (row["ndcg@10"], -row["step"]))
    (chosen,) = json.loads((tmp_path / "best" / "merge.json").read_text())["models"]
    assert chosen["model"].endswith(f"step-{best['step']:08d}")
    for steps, message in {
        "[2,9]": r"9 is missing.* 1, 2, 3", "last-9": "there are only 3", "best-1": "checkpoint.best_metric",
        "newest": "last-N",
    }.items():  # fmt: skip
        with pytest.raises((ConfigError, CheckpointError), match=message):
            merge(f"run={finished}", f"steps={steps}", f"output_dir={tmp_path / 'no'}")


def test_a_damaged_checkpoint_is_rejected(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "run")
    file = copy / "checkpoints" / "step-00000002" / "weights-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"step-00000002.* is damaged"):
        merge(f"run={copy}", "steps=last-2", f"output_dir={tmp_path / 'out'}")


def test_adapters(ranks, inputs, tmp_path):
    """A run's checkpoints and its adapter alone: merged with the base first, because factors have no mean."""
    more = ["model.lora.rank=4", "train.steps=2", "checkpoint.every=1", "optim.lr=2e-2", "export.formats=[adapter]"]
    ranks(2, run, *options(inputs, tmp_path / "run", *more, "checkpoint.keep=9"))
    merge(f"run={tmp_path / 'run'}", "steps=[1,2]", f"output_dir={tmp_path / 'steps'}")
    states = [exported(tmp_path / "run", step, tmp_path) for step in (1, 2)]
    for name, tensor in state_of(tmp_path / "steps").items():
        assert (tensor - (states[0][name] + states[1][name]) / 2).abs().max() < 1e-6, name
    adapter, base = tmp_path / "run" / "model" / "adapter", inputs / "model"
    merge(f"models=[{adapter},{base}]", "weights=[1,0]", "pooling=mean", f"output_dir={tmp_path / 'alone'}")
    expected = peft.PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter).merge_and_unload().state_dict()
    actual = AutoModel.from_pretrained(tmp_path / "alone").state_dict()
    assert all((actual[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items() if "pooler" not in name)
    # The user trusts the models that he names, and not the base model that the adapter's file names.
    theirs, other = shutil.copytree(base, tmp_path / "theirs"), shutil.copytree(adapter, tmp_path / "adapter")
    plant_module(theirs, tmp_path / MARKER)
    edit(theirs / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    edit(other / "adapter_config.json", base_model_name_or_path=str(theirs))
    with pytest.raises(ModelError, match="auto_map"):
        merge(f"models=[{other},{base}]", "pooling=mean", "trust_remote_code=true", f"output_dir={tmp_path / 'no'}")
    assert not (tmp_path / MARKER).exists()


@pytest.mark.slow
def test_averages_and_factors_of_adapters(ranks, inputs, tmp_path):
    """The moving averages, and the product of the mean factors, by hand from the files of two checkpoints."""
    more = ["model.lora.rank=4", "train.steps=2", "checkpoint.every=1", "optim.lr=2e-2", "optim.ema=0.5"]
    more.append("evaluation.every=1")
    run_dir = tmp_path / "run"
    ranks(2, run, *options(inputs, run_dir, *more, "checkpoint.keep=9", "checkpoint.layout=full"))
    base = load_file(inputs / "model" / "model.safetensors")
    for kind, option in (
        ("weights", "lora=factors"),
        ("ema", "weights_of=ema lora=factors"),
        ("ema", "weights_of=ema"),
    ):
        parts = [load_file(run_dir / f"checkpoints/step-{step:08d}/{kind}.safetensors") for step in (1, 2)]
        to = tmp_path / option.replace(" ", "-").replace("=", "-")
        merge(f"run={run_dir}", "steps=[1,2]", "weights=[1,3]", *option.split(), f"output_dir={to}")
        actual, number = state_of(to), 0
        for name in (name for name in parts[0] if name.endswith(".lora_A.default.weight")):
            a, b = ([part[other].double() for part in parts] for other in (name, name.replace("lora_A", "lora_B")))
            mean = (a[0] + 3 * a[1]) / 4, (b[0] + 3 * b[1]) / 4
            product = mean[1] @ mean[0] if "factors" in option else (b[0] @ a[0] + 3 * b[1] @ a[1]) / 4
            key = name.removeprefix("encoder.backbone.").replace(".lora_A.default", "")
            assert (actual[key] - (base[key] + 2 * product)).abs().max() < 1e-6, name  # alpha / rank = 2
            number += 1
        assert number == 12
    searched = (
        "weights_of=ema",
        "lora=factors",
        "find.method=coordinate",
        "find.steps=2",
        f"find.sets=[{inputs / 'dev'}]",
    )
    merge(f"run={run_dir}", "steps=[1,2]", *searched, f"output_dir={tmp_path / 'searched'}")
    measured = json.loads((tmp_path / "searched" / "merge.json").read_text())["search"]["members"]
    assert [values["dev"] for values in measured.values()] == pytest.approx(
        [metrics_at(run_dir, step)["dev"]["ndcg@10"] for step in (1, 2)]
    )
    for arguments, message in {
        (f"models=[{run_dir},{inputs / 'model'}]", "lora=factors", "pooling=mean"): "not checkpoints of one run",
        (f"models=[{inputs / 'model'}]", "weights_of=ema", "pooling=mean"): "no model is a run or a checkpoint",
        (f"run={run_dir}", "steps=[1,2]", "lora=factors", "method=slerp"): "lora=factors: .*method=linear",
    }.items():
        with pytest.raises(ConfigError, match=message):
            merge(*arguments, f"output_dir={tmp_path / 'no'}")


def run_of_kind(world, *arguments):
    return run_without_base(world, *(option for option in BASE if "pooling" not in option), *arguments)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late_interaction", "sparse", "m3"])
def test_models_of_other_kinds(ranks, inputs, tmp_path, kind):
    """Checkpoints and exported directories; the command compares the outputs of the libraries that open the model."""
    model, own = inputs / "model", {
        "late_interaction": ["model.dimension=8", "model.query_expansion=min", "model.expansion_length=7"],
        "sparse": ["sparsity.query_weight=0.01", "sparsity.document_weight=0.01"],
        "m3": ["loss=m3", "model.dimension=8"],
    }  # fmt: skip
    if kind == "sparse":
        model = save_language_model(small_model("bert", kind="sparse", pooling=None), tmp_path / "model")
    common = [f"model.kind={kind}", f"model.path={model}", f"data.train=[{inputs / 'train.jsonl'}]", *own[kind]]
    more = [
        "train.steps=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "optim.lr=1e-2",
        f"output_dir={tmp_path / 'run'}",
    ]
    ranks(1, run_of_kind, *common, *more)
    for step in (1, 2):
        exported(tmp_path / "run", step, tmp_path)
    merge(f"run={tmp_path / 'run'}", "steps=[1,2]", f"output_dir={tmp_path / 'checkpoints'}")
    merge(f"models=[{tmp_path / 'step1'},{tmp_path / 'step2'}]", f"output_dir={tmp_path / 'directories'}")
    files = sorted(path.relative_to(tmp_path / "step1") for path in (tmp_path / "step1").rglob("*.safetensors"))
    changed = 0
    for file in files:
        first, second = (load_file(tmp_path / name / file) for name in ("step1", "step2"))
        for name, tensor in first.items():
            mean = (tensor.double() + second[name].double()) / 2
            changed += int(not tensor.equal(second[name]))
            for merged in ("checkpoints", "directories"):
                assert (load_file(tmp_path / merged / file)[name] - mean).abs().max() < 1e-6, (file, name, merged)
    assert changed > 10 and len(files) == {"late_interaction": 2, "sparse": 1, "m3": 3}[kind]


@pytest.fixture(scope="module")
def candidates(inputs, finished, tmp_path_factory):
    """Two steps of the run, and one of them with noise in its weights."""
    folder = tmp_path_factory.mktemp("candidates")
    shutil.copytree(finished / "model", folder / "damaged")
    (folder / "damaged" / "embedtrain.json").unlink()
    state = load_file(folder / "damaged" / "model.safetensors")
    torch.manual_seed(0)
    noise = {name: torch.randn(t.shape) * 3 if t.is_floating_point() else t for name, t in state.items()}
    split_weights(folder / "damaged", noise)
    write_beir(folder / "other", 12)
    return [folder / "damaged", finished / "checkpoints" / "step-00000002", finished]


def test_greedy_leaves_a_damaged_model_out(ranks, inputs, candidates, tmp_path):
    """On any number of ranks; every model's metric is printed and recorded, and the held-out set does not choose."""
    arguments = [
        f"models=[{','.join(map(str, candidates))}]", "find.method=greedy", f"find.sets=[{inputs / 'dev'}]",
        f"find.held_out=[{candidates[0].parent / 'other'}]", "find.metric=ndcg@10",
    ]  # fmt: skip
    output = merge(*arguments, f"output_dir={tmp_path / 'one'}")
    record = json.loads((tmp_path / "one" / "merge.json").read_text())
    weights, search = [model["weight"] for model in record["models"]], record["search"]
    assert weights[0] == 0
    assert sum(weights) == pytest.approx(1)
    assert search["chosen_on"] == ["dev"]
    members = search["members"]
    assert members[str(candidates[0])]["dev"] < members[str(candidates[1])]["dev"] - 0.05
    assert search["merged"]["dev"] >= max(values["dev"] for values in members.values())
    assert all(f"{values['other']:.4f}" in output for values in members.values())
    assert "no test sets" in output
    card = (tmp_path / "one" / "README.md").read_text()
    assert f"{search['merged']['other']:.4f}" in card
    measured = SentenceTransformer(str(tmp_path / "one"))
    assert measured.encode(["alpha"]).shape == (1, 32)
    ranks(2, merge_on_rank, *arguments, f"output_dir={tmp_path / 'two'}")
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


def test_other_searches(inputs, candidates, tmp_path):
    """Grid and coordinate are never worse than the models; cocktail prefers better models."""
    values, weights = {}, {}
    sets = f"find.sets=[{inputs / 'dev'}]"
    for method, models in {"grid": candidates[:2], "coordinate": candidates, "cocktail": candidates}.items():
        named = [f"models=[{','.join(map(str, models))}]", f"find.method={method}", "find.steps=4", "find.rounds=1"]
        merge(*named, sets, f"output_dir={tmp_path / method}", "check=false")
        record = json.loads((tmp_path / method / "merge.json").read_text())
        weights[method] = [model["weight"] for model in record["models"]]
        values[method] = record["search"]
    of_models = {m: [v["dev"] for v in actual["members"].values()] for m, actual in values.items()}
    assert values["grid"]["merged"]["dev"] >= max(of_models["grid"])
    tried = [candidate["value"] for candidate in values["coordinate"]["candidates"]]
    assert values["coordinate"]["merged"]["dev"] == max(tried)
    assert len(tried) > 4
    worst, second, third = weights["cocktail"]
    assert 0 < worst < min(second, third)
    with pytest.raises(ConfigError, match=r"find\.method=grid"):
        merge(f"models=[{','.join(map(str, candidates))}]", "find.method=grid", sets, f"output_dir={tmp_path / 'no'}")


def test_cross_encoders(inputs, tmp_path):
    """The head of the score is merged with the backbone, and the command compares the scores of other libraries."""
    from tests.mine.models import save_cross_encoder

    paths = [save_cross_encoder(tmp_path / f"{index}") for index in range(2)]
    state = load_file(paths[1] / "model.safetensors")
    head = next(name for name in state if name.startswith("classifier") and name.endswith("weight"))
    save_file(
        {n: t * 2 if n == head else t for n, t in state.items()}, paths[1] / "model.safetensors", {"format": "pt"}
    )
    merge(f"models=[{paths[0]},{paths[1]}]", f"output_dir={tmp_path / 'out'}")
    assert (state_of(tmp_path / "out")[head] - 1.5 * state[head]).abs().max() < 1e-6


def test_models_of_different_kinds_are_rejected(inputs, tmp_path):
    from tests.mine.models import save_cross_encoder

    embedder, reranker = save_guide(small_model("bert"), tmp_path / "m", 1), save_cross_encoder(tmp_path / "r")
    with pytest.raises(ModelError, match=r"has the tensor head\.\S+ and 3 more, which .* lacks"):
        merge(f"models=[{embedder},{reranker}]", f"output_dir={tmp_path / 'out'}")
