"""Whole runs with low-rank adapters: saved alone, resumed on other ranks, merged, and exported as PEFT reads them."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError
from embedtrain.export.__main__ import act
from embedtrain.export.options import compose_export
from embedtrain.models.adapters import Delta
from tests.runs import losses, rewind_run, run
from tests.small import save_small, small_model, write_beir, write_rows
from tests.test_doors import call

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
    """Every tensor in the files of a checkpoint's weights, whole files only."""
    found = {}
    for path in folder.glob("weights*.safetensors"):
        found |= load_file(path)
    return found


def test_saved_alone_resumed_on_other_ranks_and_exported(ranks, workshop, tmp_path):
    """6 steps on 2 ranks; taken back to step 2, on with 3 ranks to 4, then 1: the same losses and vectors."""
    whole = tmp_path / "whole"
    common = (
        "export.check=true",
        "export.formats=[adapter]",
        "checkpoint.layout=full",
        "model.lora.modules_to_save=[norms]",
    )
    told = ranks(2, run, *options(workshop, whole, *common))[0]
    assert "LoRA: rank 4, alpha 8, on 14 linear layers, and 5 modules whole" in told
    names = stored(whole / "checkpoints" / "step-00000006").keys()
    assert all("lora_" in name or "norm" in name for name in names), "the frozen model is in no checkpoint"
    assert len(names) == 2 * 14 + 5
    expected = losses(whole)
    assert expected[6] < expected[1]

    again = rewind_run(whole, tmp_path / "again", 2)
    ranks(2, run, *options(workshop, again, *common))
    assert losses(again) == expected
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (again / "model" / name).read_bytes() == (whole / "model" / name).read_bytes(), name
    for size, step, before in ((3, 4, "whole"), (1, 2, "whole")):
        other = rewind_run(tmp_path / before, tmp_path / f"on-{size}", step)
        ranks(size, run, *options(workshop, other, *common))
        assert losses(other) == pytest.approx(expected, rel=1e-5)

    model = SentenceTransformer(str(whole / "model"), device="cpu")
    vectors = model.encode(TEXTS)
    assert not np.allclose(vectors, _vectors(workshop / "llama"), atol=1e-2), "training has moved them"
    base = AutoModel.from_pretrained(workshop / "llama")
    adapter = peft.PeftModel.from_pretrained(base, whole / "model" / "adapter")
    model[0].auto_model = adapter
    np.testing.assert_allclose(model.encode(TEXTS), vectors, atol=1e-5)
    with safe_open(whole / "model" / "model.safetensors", framework="pt") as file:
        assert not [key for key in file.keys() if "lora" in key or "base_layer" in key]  # noqa: SIM118


def _vectors(path: Path) -> np.ndarray:
    import sentence_transformers.models as parts

    backbone = parts.Transformer(str(path))
    pooling = parts.Pooling(backbone.get_word_embedding_dimension(), pooling_mode="lasttoken")
    found: np.ndarray = SentenceTransformer(modules=[backbone, pooling, parts.Normalize()], device="cpu").encode(TEXTS)
    return found


def export(*arguments: str) -> None:
    """As the door does, in this process."""
    act(compose_export(list(arguments)))


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_any_step_is_exported_from_its_files_and_the_base(ranks, workshop, tmp_path, layout):
    """By the door, without ranks, and the base held in bf16 before; a base that has changed is refused."""
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
    from_files = load_file(tmp_path / "to" / "model.safetensors")
    assert from_files.keys() == live.keys()
    for name, tensor in live.items():
        # The run held its base in bf16; the export reads it as it is.
        torch.testing.assert_close(from_files[name], tensor, rtol=5e-3, atol=5e-3, msg=name)
    export(f"run={out}", "step=2", f"output_dir={tmp_path / 'two'}", "dtype=bf16")
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds adapters of other weights than .* has now: bring its old files"):
        export(f"run={out}", f"output_dir={tmp_path / 'other'}")
    resumed = rewind_run(out, tmp_path / "resumed", 4)
    with pytest.raises(AssertionError, match="was written on other weights than model"):
        ranks(2, run, *options(workshop, resumed, *more, model="xlm-roberta"))


def test_going_on_from_an_adapter_that_was_exported(ranks, workshop, tmp_path):
    first = tmp_path / "first"
    ranks(2, run, *options(workshop, first, "export.formats=[adapter]", "export.check=true"))
    second = ("train.steps=2", f"model.lora.path={first / 'model' / 'adapter'}", "model.lora.rank=null")
    told = ranks(2, run, *options(workshop, tmp_path / "second", *second, "parallel.strategy=ddp"))[0]
    assert f"adapter: read from {first / 'model' / 'adapter'}" in told
    assert losses(tmp_path / "second")[1] < losses(first)[1], "it goes on from what was learnt"
    settings = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    evaluate = ("sets=[" + str(workshop / "dev") + "]", "pooling=last", f"output_dir={tmp_path / 'figures'}")
    figures = []
    beside = [f"model={workshop / 'llama'}", f"adapter={first / 'model' / 'adapter'}"]
    for given in (beside, [f"model={first / 'model'}"]):
        call("embedtrain.evaluate", *given, *evaluate)
        rows = (tmp_path / "figures" / "metrics.jsonl").read_text().splitlines()
        figures.append({name: value for name, value in json.loads(rows[-1]).items() if name != "model"})
    assert figures[0] == figures[1], "base and adapter are worth as much as the merged model"


def unmerged(world: World, *arguments: str) -> str:
    """A run whose export forgets the adapters."""
    merged_rows, Delta.merged_rows = Delta.merged_rows, lambda self, rows, first: rows.float()  # type: ignore[method-assign]
    try:
        return run(world, *arguments)
    finally:
        Delta.merged_rows = merged_rows  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_without_the_adapters_effect_fails(ranks, workshop, tmp_path, dtype):
    """Also in bf16 with little learnt, where the difference is below what rounding is allowed."""
    more = ("export.check=true", f"export.dtype={dtype}", "optim.lr=1e-3", "train.steps=3")
    with pytest.raises(AssertionError, match=r"of what its adapters change is in its vectors|differ from the encoder"):
        ranks(2, unmerged, *options(workshop, tmp_path / "run", *more))
    ranks(2, run, *options(workshop, tmp_path / "good", *more))


def test_an_exported_adapter_says_nothing_that_was_put_into_a_run(ranks, workshop, tmp_path):
    """PEFT obeys more of its settings than is trained here; a run may have been somebody else's meanwhile."""
    out = tmp_path / "run"
    ranks(1, run, *options(workshop, out, "train.steps=1", "export.formats=[adapter]"))
    path = out / "adapter" / "adapter_config.json"
    honest = json.loads(path.read_text())
    assert json.loads((out / "model" / "adapter" / "adapter_config.json").read_text()) == honest
    mapping = {"base_model_class": "system", "parent_library": "os"}
    path.write_text(json.dumps(honest | {"auto_mapping": mapping, "runtime_config": {}, "eva_config": {"rho": 2}}))
    export(f"run={out}", f"output_dir={tmp_path / 'to'}")
    assert json.loads((tmp_path / "to" / "adapter" / "adapter_config.json").read_text()) == honest
