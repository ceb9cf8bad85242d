"""What comes out of a run opens elsewhere, whole, and gives the same vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from embedtrain.checkpoint.directory import write_architecture
from embedtrain.checkpoint.export import (
    PROBES,
    Exported,
    plain_vectors,
    plan_export,
    reopened_vectors,
    stored_encoder,
    stored_pieces,
)
from embedtrain.checkpoint.folder import read_manifest
from embedtrain.checkpoint.snapshot import WEIGHTS
from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.config.schema import ModelConfig
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.models.build import assemble, initialise
from embedtrain.models.source import open_source
from embedtrain.models.tokenizer import load_tokenizer, text_length
from tests.small import ARCHITECTURES, POOLINGS, save_small, small_model, write_rows
from tests.test_run import run


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains_resumes_and_comes_out(ranks, rows, tmp_path, architecture):
    """Two steps on two ranks, a third after resuming; transformers finds nothing missing or left over."""
    model = save_small(small_model(architecture), tmp_path / "model")
    pooling = POOLINGS.get(architecture)
    common = [f"model.path={model}", f"model.pooling={pooling.value if pooling else 'mean'}", f"data.train=[{rows}]"]
    common += [f"output_dir={tmp_path / 'run'}", "model.query_prompt='beta '"]
    ranks(2, run, *common, "train.steps=2")
    before = load_file(tmp_path / "run" / "model" / "model.safetensors")
    told, _ = ranks(2, run, *common, "train.steps=3")
    assert "resuming from" in told
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    started = load_file(model / "model.safetensors")
    assert after.keys() == before.keys() == started.keys()
    moved = {name for name in after if not torch.equal(after[name], started[name])}
    assert {name for name in after if "pooler" not in name and "bias" not in name} <= moved
    assert not {name for name in moved if "pooler" in name}
    _, report = AutoModel.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    opened = SentenceTransformer(str(tmp_path / "run" / "model"))
    assert opened.prompts["query"] == "beta "
    with_prompt = opened.encode(["beta alpha gamma"])
    assert np.allclose(opened.encode_query(["alpha gamma"]), with_prompt, atol=1e-6)


def test_a_sentence_transformers_directory_goes_in_and_comes_out(ranks, rows, tmp_path, minilm_dir):
    """The real all-MiniLM-L6-v2: it ends in Normalize, has a pooler, and takes 256 tokens."""
    arguments = [f"model.path={minilm_dir}", "model.pooling=null", f"data.train=[{rows}]", "train.steps=2"]
    ranks(2, run, *arguments, "optim.lr=1e-6", f"output_dir={tmp_path / 'run'}")
    before, after = SentenceTransformer(str(minilm_dir)), SentenceTransformer(str(tmp_path / "run" / "model"))
    assert after.max_seq_length == before.max_seq_length == 256
    assert [type(module).__name__ for module in after] == ["Transformer", "Pooling", "Normalize"]
    probes = [*PROBES]
    difference = np.abs(before.encode(probes) - after.encode(probes)).max()
    assert 0 < difference < 1e-2, "two steps at 1e-6 move the vectors, a little"
    kept = load_file(minilm_dir / "model.safetensors")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(kept["pooler.dense.weight"], written["pooler.dense.weight"])


def architecture_of(directory: Path, model: ModelConfig) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    """The architecture of a source, its weights, and its own vectors of the probes."""
    source = open_source(model)
    loaded = load_tokenizer(source)
    tokenizer = TextTokenizer(loaded, text_length(source, loaded))
    state = initialise(source, seed=0)
    write_architecture(directory, source, tokenizer)
    encoder = assemble(source)
    encoder.load_state_dict(state)
    return directory, state, plain_vectors(encoder, tokenizer)


def export_model(
    to: Path,
    architecture: Path,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    expected: torch.Tensor,
    tolerance: float,
    card: str = "",
    largest: str = "5GB",
) -> Exported:
    """Export weights that lie whole in this process."""
    export = plan_export(to, architecture, {n: TensorSpec.of(t) for n, t in state.items()}, dtype, largest)
    export.begin()
    export.write(((name, 0, tensor) for name, tensor in state.items()), main=True)
    return export.finish(card, expected=expected, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_prompts_and_types_are_kept(tmp_path, dtype):
    """A directory with a dense head and no normalisation, through the export twice, in each type."""
    model = save_small(small_model("bert"), tmp_path / "model")
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    torch.manual_seed(0)
    modules = [Transformer(str(model)), Pooling(32, "mean"), Dense(32, 12)]
    made = SentenceTransformer(modules=modules, prompts={"query": "alpha "})
    made.save(str(tmp_path / "made"))
    expected = torch.as_tensor(made.encode(list(PROBES), prompt=""))
    architecture, state, vectors = architecture_of(tmp_path / "architecture", ModelConfig(path=str(tmp_path / "made")))
    assert torch.allclose(vectors, expected, atol=1e-5)
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    exported = export_model(
        tmp_path / "out", architecture, state, dtype=dtype, expected=vectors, tolerance=tolerance, card="# card"
    )
    assert exported.difference <= tolerance
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = open_source(ModelConfig(path=str(tmp_path / "out")))
    assert (len(again.dense), again.normalize, again.prompts["query"]) == (1, False, "alpha ")
    assert torch.allclose(reopened_vectors(tmp_path / "out"), expected, atol=tolerance)


def test_an_export_that_does_not_match_fails_and_replaces_nothing(tmp_path):
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    architecture, state, vectors = architecture_of(
        tmp_path / "architecture", ModelConfig(path=str(model), pooling=small_model("xlm-roberta").pooling)
    )
    options = {"dtype": torch.float32, "expected": vectors, "tolerance": 1e-4, "card": ""}
    export_model(tmp_path / "out", architecture, state, **options)
    good = (tmp_path / "out" / "model.safetensors").read_bytes()
    broken = {name: tensor * 1.5 if "word_embeddings" in name else tensor for name, tensor in state.items()}
    with pytest.raises(CheckpointError, match="its vectors differ from the encoder's by"):
        export_model(tmp_path / "out", architecture, broken, **options)
    pooling = '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true}'
    (architecture / "1_Pooling" / "config.json").write_text(pooling)
    with pytest.raises(CheckpointError, match="its vectors differ from the encoder's by"):
        export_model(tmp_path / "out", architecture, state, **options)
    (architecture / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match="sentence-transformers cannot open"):
        export_model(tmp_path / "out", architecture, state, **options)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == good


def test_large_models_are_split_into_files(tmp_path):
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    architecture, state, vectors = architecture_of(
        tmp_path / "architecture", ModelConfig(path=str(model), pooling=small_model("xlm-roberta").pooling)
    )
    options = {"dtype": torch.float32, "expected": vectors, "tolerance": 1e-4, "card": ""}
    export_model(tmp_path / "out", architecture, state, **options, largest="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    again = initialise(open_source(ModelConfig(path=str(tmp_path / "out"))), seed=1)
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_a_checkpoint_is_read_whole_in_one_process(ranks, rows, tmp_path, layout):
    model = save_small(small_model("llama"), tmp_path / "model")
    arguments = [f"model.path={model}", "model.pooling=last", f"data.train=[{rows}]", "train.steps=2"]
    ranks(3, run, *arguments, f"output_dir={tmp_path / 'run'}", f"checkpoint.layout={layout}")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    source = open_source(ModelConfig(path=str(tmp_path / "run" / "model")))
    with read_manifest(tmp_path / "run" / "checkpoints" / "step-00000002").tensors(WEIGHTS) as stored:
        state = stored_encoder(source, stored).state_dict()
    assert {name.removeprefix("backbone.") for name in state} == written.keys()
    assert all(torch.equal(written[name.removeprefix("backbone.")], tensor) for name, tensor in state.items())


def test_bf16_weights_go_in_and_come_out_as_bf16(ranks, rows, tmp_path):
    """Masters are fp32 in between; the file is no larger than the one that came."""
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    arguments = [f"model.path={model}", f"data.train=[{rows}]", "train.steps=1", f"output_dir={tmp_path / 'run'}"]
    ranks(2, run, *arguments, "parallel.precision=bf16")
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    with read_manifest(tmp_path / "run" / "checkpoints" / "step-00000001").tensors(WEIGHTS) as stored:
        specs, _ = stored_pieces(stored)
    assert {spec.dtype for spec in specs.values()} == {torch.float32}
