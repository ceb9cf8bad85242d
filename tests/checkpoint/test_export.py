"""Exports open in other libraries, are complete, and give the same embeddings."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from embedtrain.checkpoint.snapshot import WEIGHTS
from embedtrain.checkpoint.step_directory import open_checkpoint
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats import export_record
from embedtrain.formats.export import checkpoint_weights, load_checkpoint_encoder
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import PROBES, export_tolerance, max_relative_difference, probe_outputs
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.checkpoint.exporting import Architecture, architecture_of, export_model
from tests.runs import run
from tests.small import model_options, save_small, small_model, write_rows

CHECKED = "export.check=true"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", 20)


@pytest.mark.slow  # with random weights: test_architectures.py
def test_a_sentence_transformers_directory_is_trained_and_exported(ranks, rows, tmp_path, minilm_dir):
    """The real all-MiniLM-L6-v2: it ends in Normalize, has a pooler, and takes 256 tokens."""
    arguments = [f"model.path={minilm_dir}", "model.pooling=null", f"data.train=[{rows}]", "train.steps=2"]
    ranks(2, run, *arguments, CHECKED, "optim.lr=1e-6", f"output_dir={tmp_path / 'run'}")
    before, after = SentenceTransformer(str(minilm_dir)), SentenceTransformer(str(tmp_path / "run" / "model"))
    assert after.max_seq_length == before.max_seq_length == 256
    assert [type(module).__name__ for module in after] == ["Transformer", "Pooling", "Normalize"]
    probes = [*PROBES]
    difference = np.abs(before.encode(probes) - after.encode(probes)).max()
    assert 0 < difference < 1e-2, "two steps at 1e-6 move the vectors, a little"
    kept = load_file(minilm_dir / "model.safetensors")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(kept["pooler.dense.weight"], written["pooler.dense.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_prompts_and_types_are_kept(tmp_path, dtype):
    """A directory with a dense head and no normalisation, through the export twice, in each type."""
    model = save_small(small_model("bert"), tmp_path / "model")
    from sentence_transformers.sentence_transformer.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling as Pool

    torch.manual_seed(0)
    modules = [Transformer(str(model)), Pool(32, "mean"), Dense(32, 12)]
    built = SentenceTransformer(modules=modules, prompts={"query": "alpha "})
    built.save(str(tmp_path / "made"))
    expected = torch.as_tensor(built.encode(list(PROBES), prompt=""))
    architecture = architecture_of(tmp_path / "architecture", model_options(path=str(tmp_path / "made")))
    assert torch.allclose(architecture.vectors, expected, atol=1e-5)
    exported = export_model(tmp_path / "out", architecture, dtype=dtype)
    assert exported.difference <= export_tolerance(dtype, exact_encoder=True)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = open_model_source(model_options(path=str(tmp_path / "out")))
    assert (len(again.vectors.dense), again.vectors.normalize, again.prompts["query"]) == (1, False, "alpha ")
    reopened = SentenceTransformer(str(tmp_path / "out"), model_kwargs={"dtype": "float32"})
    assert np.allclose(reopened.encode(list(PROBES), prompt=""), expected, atol=5e-2 if dtype.itemsize == 2 else 1e-4)


def in_bf16(built: Architecture) -> Architecture:
    """The same with the outputs of a run in bf16."""
    encoder = assemble_encoder(built.source)
    encoder.load_state_dict(built.state)
    tokenizer = bound_tokenizer(built.source, load_tokenizer(built.source))
    with torch.autocast("cpu", torch.bfloat16):
        return replace(built, vectors=probe_outputs(encoder, built.source, tokenizer))


def test_rounding_alone_fails_no_export_of_a_deep_model(tmp_path):
    """Of a decoder whose vectors in bf16 differ more from those in fp32 than the limit for all models."""
    model = small_model("qwen3")
    model = replace(model, config=model.config | {"num_hidden_layers": 24, "initializer_range": 0.5})
    path = str(save_small(model, tmp_path / "model"))
    built = architecture_of(tmp_path / "architecture", model_options(path=path, pooling=Pooling.last))
    trained = in_bf16(built)
    rounding, limit = (
        max_relative_difference(trained.vectors, built.vectors),
        export_tolerance(torch.float32, exact_encoder=False),
    )
    assert rounding > limit
    exported = export_model(tmp_path / "out", trained, in_bf16=True)
    assert exported.difference == pytest.approx(rounding, rel=1e-2)
    assert exported.difference <= exported.tolerance < 5 * rounding
    assert f"{exported.difference:.1e}" in exported.notes[0]
    assert f"{exported.tolerance:.1e}" in exported.notes[0]
    words = "backbone.embed_tokens.weight"
    other = replace(trained, state=built.state | {words: built.state[words].flip(0)})
    with pytest.raises(CheckpointError, match="differ"):
        export_model(tmp_path / "out", other, in_bf16=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_that_is_smaller_than_the_rounding_of_bf16(tmp_path, dtype):
    """The directory cuts texts one token earlier than the run, which the limit for the model's own rounding allows."""
    path = str(save_small(small_model("qwen3"), tmp_path / "model"))
    built = architecture_of(tmp_path / "architecture", model_options(path=path, pooling=Pooling.mean))
    trained = in_bf16(built)
    exported = export_model(tmp_path / "out", trained, dtype=dtype, in_bf16=True, tolerance=1e-3)
    assert exported.difference > 1e-3
    settings = built.directory / "tokenizer_config.json"
    of_tokenizer = json.loads(settings.read_text())
    settings.write_text(json.dumps(of_tokenizer | {"model_max_length": built.max_length - 1}))
    with pytest.raises(CheckpointError, match=r"transformers opens .* the same weights in fp32 by \d"):
        export_model(tmp_path / "out", trained, dtype=dtype, in_bf16=True, tolerance=1e-3)


@pytest.fixture
def small(tmp_path) -> Architecture:
    """The architecture of an XLM-R in `tmp_path/architecture`, and its weights."""
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    return architecture_of(tmp_path / "architecture", model_options(path=str(model), pooling=Pooling.mean))


def test_an_export_with_other_embeddings_fails_and_replaces_nothing(tmp_path, small):
    to = tmp_path / "out"
    export_model(to, small)
    good = (to / "model.safetensors").read_bytes()
    broken = {name: tensor * 1.5 if "word_embeddings" in name else tensor for name, tensor in small.state.items()}
    with pytest.raises(CheckpointError, match=r"transformers .* differ"):
        export_model(to, replace(small, state=broken))
    prompted = tmp_path / "prompted"
    shutil.copytree(small.directory, prompted)
    settings = json.loads((prompted / "config_sentence_transformers.json").read_text())
    (prompted / "config_sentence_transformers.json").write_text(json.dumps(settings | {"prompts": {"query": "q: "}}))
    with pytest.raises(CheckpointError, match=r"opens .* with the prompt query='q: ', not ''"):
        export_model(to, replace(small, directory=prompted))
    (prompted / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (prompted / "sentence_bert_config.json").write_text('{"max_seq_length": 5, "do_lower_case": false}')
    with pytest.raises(CheckpointError, match="5 tokens, not 48"):
        export_model(to, replace(small, directory=prompted))
    pooling = '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true}'
    (small.directory / "1_Pooling" / "config.json").write_text(pooling)
    with pytest.raises(CheckpointError, match=r"export to .*out .* differ"):
        export_model(to, small)
    (small.directory / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules.json cannot be read"):
        export_model(to, small)
    assert (to / "model.safetensors").read_bytes() == good


def test_shapes_are_compared_even_without_reopening(tmp_path, small):
    name = "backbone.encoder.layer.1.output.dense.weight"
    for state, sentence in (
        ({key: value for key, value in small.state.items() if key != name}, "output.dense.weight is missing"),
        (small.state | {name: torch.zeros(0)}, r"output.dense.weight has the shape \[0\], .* \[32, 48\]"),
        (small.state | {"backbone._orig_mod.x": torch.zeros(2)}, "_orig_mod.x is unexpected"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            export_model(tmp_path / "out", replace(small, state=state), check=False)
    assert not (tmp_path / "out").exists()


def test_large_models_are_split_into_files(tmp_path, small):
    export_model(tmp_path / "out", small, max_file_size="20KB")
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1
    largest = max(tensor.nbytes for tensor in small.state.values())
    assert all(file.stat().st_size < max(20_000, largest) + 3_000 for file in files)
    again = full_state_dict(open_model_source(model_options(path=str(tmp_path / "out"))), seed=1)
    assert all(torch.equal(again[name], tensor) for name, tensor in small.state.items())


def test_weights_beyond_the_range_of_the_type_are_rejected(tmp_path, small):
    name = "backbone.encoder.layer.0.output.LayerNorm.weight"
    state = small.state | {name: small.state[name] * 1e5}
    with pytest.raises(CheckpointError, match=r"LayerNorm\.weight .* 1e\+05.* float16 .* 65504"):
        export_model(tmp_path / "out", replace(small, state=state), dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export_model(tmp_path / "out", replace(small, state=state), dtype=torch.bfloat16, check=False)


def test_exports_to_one_directory_exclude_each_other_until_killed(tmp_path, small, monkeypatch):
    monkeypatch.setattr(export_record, "LOCK_TIMEOUT", 0.1)
    to = tmp_path / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"""
import time
from pathlib import Path
from embedtrain.formats.export_record import export_lock
to = Path({str(to)!r})
with export_lock(to) as unfinished:
    (unfinished / "onnx").mkdir(parents=True)
    (unfinished / "onnx" / "model.onnx").write_text("half")
    print(unfinished, flush=True)
    time.sleep(600)
"""],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    unfinished = Path(holder.stdout.readline().decode().strip())
    with pytest.raises(ConfigError, match=r"another export to .*out "):
        export_model(to, small)
    assert (unfinished / "onnx" / "model.onnx").read_text() == "half"
    holder.kill()
    holder.wait()
    export_model(to, small)
    assert not (to / "onnx").exists()
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]


@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.slow), "full"])
def test_a_checkpoint_is_loaded_in_one_process(ranks, rows, tmp_path, layout):
    model = save_small(small_model("llama"), tmp_path / "model")
    arguments = [f"model.path={model}", "model.pooling=last", f"data.train=[{rows}]", "train.steps=2"]
    ranks(3, run, *arguments, f"output_dir={tmp_path / 'run'}", f"checkpoint.layout={layout}")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    source = open_model_source(model_options(path=str(tmp_path / "run" / "model")))
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002").tensors(WEIGHTS) as reader:
        state = load_checkpoint_encoder(source, reader).state_dict()
    assert {name.removeprefix("backbone.") for name in state} == written.keys()
    assert all(torch.equal(written[name.removeprefix("backbone.")], tensor) for name, tensor in state.items())


def test_bf16_weights_are_exported_as_bf16(ranks, rows, tmp_path):
    """Training weights are fp32; the exported file has the type of the original."""
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    arguments = [f"model.path={model}", f"data.train=[{rows}]", "train.steps=1", f"output_dir={tmp_path / 'run'}"]
    ranks(2, run, *arguments, CHECKED, "parallel.precision=bf16")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001").tensors(WEIGHTS) as reader:
        specs = checkpoint_weights(reader).specs
    assert {spec.dtype for spec in specs.values()} == {torch.float32}


def test_a_difference_is_relative_to_the_mean_norm_of_vectors_below_it():
    expected = torch.diag(torch.tensor([2.0, 4.0, 9.0, 0.0]))  # of a sparse model, as the run that was rejected
    assert max_relative_difference(expected + 0.1 * torch.eye(4), expected) == pytest.approx(0.1 / 3.75)
    assert max_relative_difference(1.5 * expected, expected) == pytest.approx(0.5)
    assert max_relative_difference(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0
    assert max_relative_difference(torch.zeros(2, 3), torch.zeros(2, 4)) == float("inf")
