"""Runs with low-rank adapters: checkpoints without the base, resuming on other ranks, merged exports, PEFT's format."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as main
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.models.adapters import Merger
from embedtrain.utils.files import write_checksums
from tests.checkpoint.tei_rules import open_as_tei
from tests.commands import call
from tests.runs import losses, rewind_run, run
from tests.small import save_small, small_model, write_beir, write_rows

TEXTS = ["alpha beta gamma", "delta", "epsilon zeta eta theta iota"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Rows, an evaluation set, and a small Llama and XLM-R."""
    folder = tmp_path_factory.mktemp("adapted")
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 12)
    for name in ("llama", "xlm-roberta"):
        save_small(small_model(name), folder / name)
    return folder


def options(workshop: Path, out: Path, *more: str, model: str = "llama") -> tuple[str, ...]:
    return (
        f"model.path={workshop / model}", f"data.train=[{workshop / 'train.jsonl'}]", f"output_dir={out}",
        "model.lora.rank=4", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "optim.lr=2e-2",
        f"model.pooling={'last' if model == 'llama' else 'mean'}", *more,
    )  # fmt: skip


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a full checkpoint's weights."""
    tensors = {}
    for path in folder.glob("weights*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_checkpoints_resuming_and_exports(ranks, workshop, tmp_path):
    """6 steps on 2 ranks; resumed from step 2 on 2 ranks, and from 4 on 1: the same losses and vectors."""
    uninterrupted = tmp_path / "uninterrupted"
    common = (
        "export.check=true",
        "export.formats=[adapter]",
        "checkpoint.layout=full",
        "model.lora.modules_to_save=[norms]",
    )
    output = ranks(2, run, *options(workshop, uninterrupted, *common))[0]
    assert "LoRA: rank 4, alpha 8, on 14 linear layers, 5 modules in full" in output
    names = stored(uninterrupted / "checkpoints" / "step-00000006").keys()
    assert all("lora_" in name or "norm" in name for name in names), "checkpoints do not contain the frozen model"
    assert len(names) == 2 * 14 + 5
    expected = losses(uninterrupted)
    assert expected[6] < expected[1]

    again = rewind_run(uninterrupted, tmp_path / "again", 2)
    ranks(2, run, *options(workshop, again, *common))
    assert losses(again) == expected
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (again / "model" / name).read_bytes() == (uninterrupted / "model" / name).read_bytes(), name
    resumed = rewind_run(uninterrupted, tmp_path / "on-1", 4)
    ranks(1, run, *options(workshop, resumed, *common))
    assert losses(resumed) == pytest.approx(expected, rel=1e-5)

    model = SentenceTransformer(str(uninterrupted / "model"), device="cpu")
    vectors = model.encode(TEXTS)
    assert not np.allclose(vectors, _vectors(workshop / "llama"), atol=1e-2), "training changes the vectors"
    base = AutoModel.from_pretrained(workshop / "llama")
    adapter = peft.PeftModel.from_pretrained(base, uninterrupted / "model" / "adapter")
    model[0].auto_model = adapter
    np.testing.assert_allclose(model.encode(TEXTS), vectors, atol=1e-5)
    with safe_open(uninterrupted / "model" / "model.safetensors", framework="pt") as file:
        assert not [key for key in file.keys() if "lora" in key or "base_layer" in key]  # noqa: SIM118


def _vectors(path: Path) -> np.ndarray:
    from sentence_transformers import models

    backbone = models.Transformer(str(path))
    pooling = models.Pooling(backbone.get_word_embedding_dimension(), pooling_mode="lasttoken")
    vectors: np.ndarray = SentenceTransformer(modules=[backbone, pooling, models.Normalize()], device="cpu").encode(
        TEXTS
    )
    return vectors


def export(*arguments: str) -> None:
    """Run the command in this process."""
    main(compose_export(list(arguments)))


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_any_step_is_exported_from_its_files_and_the_base(ranks, workshop, tmp_path, layout):
    """By the command, in one process, after training with a bf16 base; a base that has changed is an error."""
    out, base = tmp_path / "run", tmp_path / "base"
    save_small(small_model("xlm-roberta"), base)
    more = (
        f"model.path={base}",
        f"checkpoint.layout={layout}",
        "model.lora.base_dtype=bf16",
        "export.formats=[adapter]",
    )
    ranks(2, run, *options(workshop, out, *more, "export.check=true", model="xlm-roberta"))
    live = load_file(out / "model" / "model.safetensors")
    export(f"run={out}", f"output_dir={tmp_path / 'to'}")
    assert open_as_tei(tmp_path / "to").task == "embedding"  # merged weights have the names of the base
    from_files = load_file(tmp_path / "to" / "model.safetensors")
    assert from_files.keys() == live.keys()
    for name, tensor in live.items():
        # The run stored its base in bf16; the export reads the original.
        torch.testing.assert_close(from_files[name], tensor, rtol=5e-3, atol=5e-3, msg=name)
    export(f"run={out}", "step=2", f"output_dir={tmp_path / 'two'}", "dtype=bf16")
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(CheckpointError, match="adapters"):
        export(f"run={out}", f"output_dir={tmp_path / 'other'}")
    resumed = rewind_run(out, tmp_path / "resumed", 4)
    with pytest.raises(AssertionError, match="other weights"):
        ranks(2, run, *options(workshop, resumed, *more, model="xlm-roberta"))


@pytest.mark.slow
def test_new_heads_beside_adapters(ranks, workshop, tmp_path):
    """Trained in full with a learning rate of their own, resumed on another number of ranks, and in both exports."""
    out = tmp_path / "run"
    heads = "[{out: 48}, {out: 24, bias: true, init: normal}]"
    more = (
        f"model.heads={heads}",
        "model.pooling=mean",
        "optim.groups=[{match: ^dense, lr: 1e-2}]",
        "train.steps=4",
        "export.check=true",
    )
    output = ranks(2, run, *options(workshop, out, *more, model="xlm-roberta"))[0]
    assert "new heads 32 -> 48 -> 24" in output
    expected, folders = losses(out), ("2_Dense", "3_Dense")
    resumed = rewind_run(out, tmp_path / "resumed", 2)
    ranks(1, run, *options(workshop, resumed, *more, model="xlm-roberta"))
    assert losses(resumed) == pytest.approx(expected, rel=1e-5)
    export(f"run={out}", f"output_dir={tmp_path / 'to'}")
    for folder in folders:
        weights = [load_file(path / folder / "model.safetensors") for path in (out / "model", tmp_path / "to")]
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)
    assert not torch.equal(load_file(out / "model/2_Dense/model.safetensors")["linear.weight"][:32], torch.eye(32))
    other = "model.heads=[{out: 48}, {out: 24, init: normal}]"
    with pytest.raises(AssertionError, match=r"model\.heads\[1\]\.bias"):
        ranks(1, run, *options(workshop, resumed, *more, other, model="xlm-roberta"))


@pytest.mark.slow
def test_training_continues_from_an_exported_adapter(ranks, workshop, tmp_path):
    first = tmp_path / "first"
    ranks(2, run, *options(workshop, first, "export.formats=[adapter]", "export.check=true"))
    second = ("train.steps=2", f"model.lora.path={first / 'model' / 'adapter'}", "model.lora.rank=null")
    output = ranks(2, run, *options(workshop, tmp_path / "second", *second, "parallel.strategy=ddp"))[0]
    assert f"adapter: read from {first / 'model' / 'adapter'}" in output
    assert losses(tmp_path / "second")[1] < losses(first)[1], "it starts from the trained adapter"
    settings = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    evaluate = ("sets=[" + str(workshop / "dev") + "]", "pooling=last", f"output_dir={tmp_path / 'figures'}")
    metrics = []
    unmerged_model = [f"model={workshop / 'llama'}", f"adapter={first / 'model' / 'adapter'}"]
    for model in (unmerged_model, [f"model={first / 'model'}"]):
        call("evaluate", *model, *evaluate)
        rows = (tmp_path / "figures" / "metrics.jsonl").read_text().splitlines()
        metrics.append({name: value for name, value in json.loads(rows[-1]).items() if name != "model"})
    assert metrics[0] == metrics[1], "base with adapter and merged model"


def unmerged(world: World, *arguments: str) -> str:
    """A run whose export leaves out the adapters."""
    merged_rows, Merger.rows = Merger.rows, lambda self, name, rows, first: rows.float()  # type: ignore[method-assign]
    try:
        return run(world, *arguments)
    finally:
        Merger.rows = merged_rows  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_export_without_the_effect_of_the_adapters_fails(ranks, workshop, tmp_path, dtype):
    """Also in bf16 after little training, where the difference is below the tolerance for rounding."""
    more = ("export.check=true", f"export.dtype={dtype}", "optim.lr=1e-3", "train.steps=3")
    with pytest.raises(AssertionError, match=r"adapters|encoder"):
        ranks(2, unmerged, *options(workshop, tmp_path / "run", *more))
    ranks(2, run, *options(workshop, tmp_path / "good", *more))


def test_exported_adapter_has_no_settings_added_to_a_run(ranks, workshop, tmp_path):
    """PEFT interprets more settings than are supported; somebody else may have changed the run directory."""
    out = tmp_path / "run"
    ranks(1, run, *options(workshop, out, "train.steps=1", "export.formats=[adapter]"))
    path = out / "adapter" / "adapter_config.json"
    original = json.loads(path.read_text())
    assert json.loads((out / "model" / "adapter" / "adapter_config.json").read_text()) == original
    mapping = {"base_model_class": "system", "parent_library": "os"}
    path.write_text(json.dumps(original | {"auto_mapping": mapping, "runtime_config": {}, "eva_config": {"rho": 2}}))
    write_checksums(path.parent)
    export(f"run={out}", f"output_dir={tmp_path / 'to'}")
    assert json.loads((tmp_path / "to" / "adapter" / "adapter_config.json").read_text()) == original


@pytest.fixture(scope="module")
def task_runs(ranks, workshop, tmp_path_factory):
    """Two runs on one base, with different prompts, ranks and modules trained in full; one on changed weights."""
    folder = tmp_path_factory.mktemp("tasks")
    common = ("train.steps=2", "export.check=false", "export.formats=[sentence_transformers]")
    common += ("model.lora.modules_to_save=[norms]",)
    prompts = ("model.query_prompt='alpha '", "model.document_prompt='beta '")
    ranks(1, run, *options(workshop, folder / "a", *common, *prompts))
    more = ("model.lora.rank=2", "optim.ema=0.9", "seed=3")
    ranks(1, run, *options(workshop, folder / "b", *common, *more))
    return folder


@pytest.mark.slow
def test_adapters_of_several_tasks(workshop, task_runs, tmp_path):
    """One directory, opened as its card says, has the vectors of each run, of the base, and the prompts of both."""
    to = tmp_path / "joint"
    export(
        f"adapters={{retrieval: {task_runs / 'a'}, clustering: {task_runs / 'b'}}}", f"output_dir={to}", "check=true"
    )
    expected = [SentenceTransformer(str(task_runs / name / "model"), device="cpu").encode(TEXTS) for name in "ab"]
    code = (to / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code.replace("path/of/this/directory", str(to)), names)
    model = names["model"]
    for task, vectors in zip(("retrieval", "clustering", "retrieval"), (*expected, expected[0]), strict=True):
        model.set_adapter(task)
        np.testing.assert_allclose(model.encode(TEXTS, prompt=""), vectors, rtol=0, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    prompts = {"query": "", "document": "", "retrieval_query": "alpha ", "retrieval_document": "beta "}
    assert model.prompts == prompts | {"clustering_query": "", "clustering_document": ""}
    model.disable_adapters()
    np.testing.assert_allclose(model.encode(TEXTS, prompt=""), _vectors(workshop / "llama"), rtol=0, atol=1e-6)
    loaded = AutoModel.from_pretrained(to)
    loaded.load_adapter(str(to / "adapters" / "clustering"), adapter_name="clustering")
    evaluate = (f"sets=[{workshop / 'dev'}]", f"output_dir={tmp_path / 'figures'}")
    call("evaluate", f"model={to}", f"adapter={to / 'adapters' / 'retrieval'}", *evaluate)
    call("evaluate", f"model={task_runs / 'a' / 'model'}", *evaluate)
    rows = [json.loads(row) for row in (tmp_path / "figures" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["ndcg@10"] == rows[1]["ndcg@10"]


@pytest.mark.slow
def test_adapters_that_cannot_share_a_base_are_refused(ranks, workshop, task_runs, tmp_path):
    """The message names both runs: another pooling, maximal length or base; an adapter with its effect lost fails."""
    other = save_small(small_model("llama"), tmp_path / "base", seed=1)
    common = ("train.steps=1", "export.check=false", "model.lora.modules_to_save=[norms]")
    cases = {
        "mean": ("model.pooling=mean", "pooling is 'mean', not 'last'"),
        "short": ("model.max_length=12", "maximum length is 12, not"),
        "base": (f"model.path={other}", "the weights of .*base and .*llama"),
        "norms": ("model.lora.modules_to_save=[]", "trained .*norm.* in full"),
        "whole": ("model.lora={rank: null, modules_to_save: []}", "has no adapter"),
    }
    for name, (option, message) in cases.items():
        ranks(1, run, *options(workshop, tmp_path / name, *common, option))
        pair = f"adapters={{first: {task_runs / 'a'}, {name}: {tmp_path / name}}}"
        with pytest.raises((CheckpointError, ConfigError, ModelError), match=message) as raised:
            export(pair, f"output_dir={tmp_path / 'no'}")
        assert f"adapters.{name}={tmp_path / name}" in str(raised.value)
        assert name == "whole" or f"adapters.first={task_runs / 'a'}" in str(raised.value)
    assert not (tmp_path / "no").exists()
