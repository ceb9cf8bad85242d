"""`python -m embedtrain merge`: weights against float64, bytes at any number of ranks, what is rejected."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from embedtrain.errors import ConfigError, ModelError
from tests.merge.models import (
    is_pooler,
    karcher,
    merge,
    merge_on_rank,
    require_equal,
    save_models,
    slerp,
    split_weights,
    state_of,
    ties,
)
from tests.small import small_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models near each other."""
    return save_models(tmp_path_factory.mktemp("models"), 3)


def combined(states, formula):
    """The formula of each tensor in float64; poolers, which differ and which no encoder uses, are zeros."""
    return {
        name: tensor if not tensor.is_floating_point() else formula([state[name].double() for state in states])
        for name, tensor in states[0].items()
        if not is_pooler(name)
    } | no_pooler(states[0])


def no_pooler(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items() if is_pooler(name)}


def options(models, output_dir, *more):
    return [f"models=[{','.join(map(str, models))}]", f"output_dir={output_dir}", *more]


def test_weighted_mean(models, tmp_path):
    """Rounded once, with all that a model directory has, and a record of what was merged."""
    output = merge(*options(models, tmp_path / "out", "weights=[2,1,1]"))
    states = [state_of(model) for model in models]
    require_equal(tmp_path / "out", combined(states, lambda t: 0.5 * t[0] + 0.25 * t[1] + 0.25 * t[2]))
    record = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert [model["weight"] for model in record["models"]] == [0.5, 0.25, 0.25]
    assert len({model["digest"] for model in record["models"]}) == 3
    flat = [torch.cat([s[n].double().flatten() for n in sorted(s) if not is_pooler(n)]) for s in states]
    cosine = float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))
    assert record["cosines"][0][1] == pytest.approx(cosine, abs=1e-12)
    assert f"{cosine:.6f}" in output
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged from 3 models" in card
    assert record["models"][1]["digest"] in card
    assert str(models[0].parent) not in card
    assert SentenceTransformer(str(tmp_path / "out")).encode(["alpha"]).shape == (1, 32)


def test_slerp(models, tmp_path):
    states = [state_of(model) for model in models]
    merge(*options(models[:2], tmp_path / "two", "method=slerp", "t=0.3", "check=false"))
    require_equal(tmp_path / "two", combined(states[:2], lambda t: slerp(*t, 0.3)), 1e-7)
    merge(*options(models, tmp_path / "chain", "method=slerp", "check=false"))
    require_equal(tmp_path / "chain", combined(states, lambda t: slerp(slerp(t[0], t[1], 0.5), t[2], 1 / 3)), 1e-7)
    weights = [0.5, 0.3, 0.2]
    more = ["method=slerp", "order=karcher", f"weights={weights}", "check=false"]
    merge(*options(models, tmp_path / "karcher", *more))
    require_equal(tmp_path / "karcher", combined(states, lambda t: karcher(t, weights)), 1e-6)
    merge(*options(models[:2], tmp_path / "model", "method=slerp", "scope=model", "t=0.3", "check=false"))
    names = [name for name in states[0] if not is_pooler(name)]
    flat = [torch.cat([state[name].double().flatten() for name in names]) for state in states[:2]]
    whole = slerp(*flat, 0.3).split([states[0][name].numel() for name in names])
    expected = {name: part.view(states[0][name].shape) for name, part in zip(names, whole, strict=True)}
    require_equal(tmp_path / "model", states[0] | expected | no_pooler(states[0]), 1e-7)


def test_ends_and_self_merges_are_the_models_bit_for_bit(models, tmp_path):
    states = [state_of(model) for model in models]
    for t, state in ((0, states[0]), (1, states[1])):
        merge(*options(models[:2], tmp_path / f"{t}", "method=slerp", f"t={t}", "check=false"))
        require_equal(tmp_path / f"{t}", state | no_pooler(state))
    half = save_models(tmp_path / "half", 2)[1]
    split_weights(half, {name: tensor.bfloat16() for name, tensor in state_of(half).items()})
    for index, more in enumerate(
        (["weights=[1,5,3]"], ["method=slerp"], ["method=slerp", "order=karcher"], ["method=slerp", "scope=model"])
    ):
        merge(*options([half] * 3, tmp_path / f"self{index}", "check=false", *more))
        require_equal(tmp_path / f"self{index}", state_of(half))


def test_sixteen_bits_are_rounded_once(models, tmp_path):
    """Halfway cases of bfloat16 that two roundings get wrong: 1 + 2^-8 plus less than float32 resolves."""
    states = [state_of(model) for model in models[:2]]
    name = next(name for name in states[0] if name.endswith("query.weight"))
    paths = []
    for index, (state, value) in enumerate(zip(states, (1 + 2**-8, 2**-24), strict=True)):
        paths.append(shutil.copytree(models[index], tmp_path / f"{index}"))
        state[name].fill_(value)
        split_weights(paths[-1], state)
    more = ["normalize_weights=false", "weights=[1,1]", "dtype=bf16", "check=false"]
    merge(*options(paths, tmp_path / "out", *more))
    assert state_of(tmp_path / "out")[name].unique().tolist() == [1 + 2**-7]
    merge(*options(paths, tmp_path / "below", "normalize_weights=false", "weights=[1,-1]", *more[2:]))
    assert state_of(tmp_path / "below")[name].unique().tolist() == [1.0]


def test_task_arithmetic_and_ties(models, tmp_path):
    states = [state_of(model) for model in models]
    base = f"base={models[0]}"
    more = ["method=task_arithmetic", "scale=0.7", "weights=[1,3]", base, "check=false"]
    merge(*options(models[1:], tmp_path / "task", *more))
    mean = combined(states, lambda t: t[0] + 0.7 * (0.25 * (t[1] - t[0]) + 0.75 * (t[2] - t[0])))
    require_equal(tmp_path / "task", mean, 1e-7)
    merge(*options(models[1:], tmp_path / "ties", "method=ties", "density=0.3", "scale=1.5", base, "check=false"))
    expected = combined(states, lambda t: ties(t[1:], t[0], [0.5, 0.5], 0.3, 1.5))
    require_equal(tmp_path / "ties", expected, 1e-7)
    record = json.loads((tmp_path / "ties" / "merge.json").read_text())
    assert record["base"]["model"] == str(models[0])
    assert len(record["models"]) == 2


def test_weights_of_parts(models, tmp_path):
    parts = r"parts=[{names: 'layer\.[1-9]\.', weights: [0, 1]}, {names: embeddings, weights: [1, 0]}]"
    merge(*options(models[:2], tmp_path / "out", parts, "check=false"))
    states = [state_of(model) for model in models[:2]]
    expected = combined(states, lambda t: (t[0] + t[1]) / 2)
    for name in expected:
        if "layer.1." in name or name.startswith("embeddings."):
            expected[name] = states["layer.1." in name][name]
    require_equal(tmp_path / "out", expected)
    with pytest.raises(ConfigError, match=r"parts\[0\].*nothing"):
        merge(*options(models[:2], tmp_path / "no", "parts=[{names: nothing, weights: [0, 1]}]"))
    assert not list(tmp_path.glob("no*"))


@pytest.mark.quick("ties")
@pytest.mark.parametrize("method", ["slerp", "ties"])
def test_bytes_are_the_same_on_three_ranks(ranks, models, tmp_path, method):
    more = ["method=ties", f"base={models[0]}"] if method == "ties" else ["method=slerp", "max_file_size=40KB"]
    merge(*options(models, tmp_path / "one", "weights=[1,2,4]", *more))
    ranks(3, merge_on_rank, *options(models, tmp_path / "three", "weights=[1,2,4]", *more))
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert sum(path.suffix == ".safetensors" for path in files) > (method == "slerp")
    for file in files - {path for path in files if path.name in ("README.md", "embedtrain.json")}:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "three" / file).read_bytes(), file


def test_models_that_do_not_fit_are_rejected(models, tmp_path):
    """Before anything is written, with the name of what differs."""
    copies = {
        name: shutil.copytree(models[1], tmp_path / name) for name in ("shape", "nan", "pooling", "tokens", "rope")
    }
    state = state_of(models[1])
    name = "encoder.layer.0.attention.self.query.weight"
    split_weights(copies["nan"], state | {name: torch.full_like(state[name], float("nan"))})
    for case, file, old, new in (
        ("shape", "config.json", '"intermediate_size": 48', '"intermediate_size": 64'),
        ("rope", "config.json", '"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-05'),
        ("pooling", "1_Pooling/config.json", '"mean"', '"cls"'),
    ):
        text = (copies[case] / file).read_text()
        assert old in text
        (copies[case] / file).write_text(text.replace(old, new))
    wide = {n: torch.zeros([64 if d == 48 else d for d in t.shape]) for n, t in state.items()}
    split_weights(copies["shape"], wide)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["omega"])
    tokenizer.save_pretrained(copies["tokens"])
    for case, message in {
        "shape": r"intermediate\.dense\.(weight|bias) has the shape \[64",
        "nan": rf"{name} are not finite",
        "pooling": "pooling is 'cls', not 'mean'",
        "tokens": "'omega'",
        "rope": "layer_norm_eps in config.json is 1e-05",
    }.items():
        with pytest.raises(ModelError, match=message):
            merge(*options([models[0], copies[case]], tmp_path / "out"))
    assert not list(tmp_path.glob("*out*"))


def test_differences_that_only_warn(models, tmp_path):
    """Prompts, which settings_from chooses, and weights that are far apart."""
    other = shutil.copytree(models[1], tmp_path / "other")
    settings = json.loads((other / "config_sentence_transformers.json").read_text())
    settings["prompts"] = {"query": "find: ", "document": ""}
    (other / "config_sentence_transformers.json").write_text(json.dumps(settings))
    split_weights(other, {name: -tensor for name, tensor in state_of(other).items()})
    output = merge(*options([models[0], other], tmp_path / "out", "settings_from=1", "weights=[3,1]"))
    assert "the prompt query" in output
    assert "far apart" in output
    assert SentenceTransformer(str(tmp_path / "out")).prompts["query"] == "find: "


def test_options_that_cannot_work(models, tmp_path):
    for more, message in {
        ("t=0.5",): "t=0.5: is for two models",
        ("weights=[1,2]",): r"weights=\[1.0,2.0\]: there are 3",
        ("weights=[1,-1,0]",): "sum above 0",
        ("method=ties",): "base=null",
        ("density=0.5",): "density=0.5",
        ("steps=last-3",): "steps=last-3",
        ("find.method=greedy",): r"find\.sets",
        ("formats=[adapter]",): r"formats=\[adapter\]",
        (f"output_dir={models[0].parent}",): "output_dir",
    }.items():
        with pytest.raises(ConfigError, match=message):
            merge(*options(models, tmp_path / "out", *more))
    with pytest.raises(ModelError, match=r"models\[1\]=\./no-such"):
        merge(*options([models[0], "./no-such"], tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_old_formats_are_read(models, tmp_path):
    """A pickle of tensors, which can only be read as a whole."""
    old = shutil.copytree(models[1], tmp_path / "old")
    state = state_of(old)
    for path in old.glob("model*"):
        path.unlink()
    torch.save(state, old / "pytorch_model.bin")
    merge(*options([models[0], old], tmp_path / "out", "check=false"))
    require_equal(tmp_path / "out", combined([state_of(models[0]), state], lambda t: (t[0] + t[1]) / 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "out"]


def test_heads_are_merged(models, tmp_path):
    from sentence_transformers import models as parts

    paths = []
    for index in range(2):
        model = SentenceTransformer(str(models[index]), device="cpu")
        torch.manual_seed(index)
        dense = parts.Dense(32, 8, activation_function=torch.nn.Tanh())
        modules = [model[0], model[1], dense, model[2]]
        SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / f"{index}"))
        paths.append(tmp_path / f"{index}")
    merge(*options(paths, tmp_path / "out"))
    heads = [load_file(path / "2_Dense" / "model.safetensors") for path in (*paths, tmp_path / "out")]
    assert torch.equal(heads[2]["linear.weight"], (heads[0]["linear.weight"] + heads[1]["linear.weight"]) / 2)
    vectors = SentenceTransformer(str(tmp_path / "out")).encode(["alpha beta"])
    assert vectors.shape == (1, 8)
    assert np.isfinite(vectors).all()
    save_file(
        {"linear.weight": torch.zeros(9, 32), "linear.bias": torch.zeros(9)}, paths[1] / "2_Dense/model.safetensors"
    )
    with pytest.raises(ModelError, match=r"linear\.weight"):
        merge(*options(paths, tmp_path / "no"))
