"""The ONNX graphs of language models, and the smaller files of each kind of model."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from embedtrain.config.kind_settings import ScoreHead, SparseActivation, SparsePooling
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError
from embedtrain.formats.onnx import GRAPH
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.cross_encoder.files import formatted_pairs
from tests.checkpoint.exporting import Architecture, architecture_of, export_model
from tests.late_interaction_models import save_pylate
from tests.models.test_m3 import save_m3
from tests.small import model_options, save_language_model, save_small, small_model
from tests.token_rerankers import save_causal

onnxruntime = pytest.importorskip("onnxruntime")


def outputs(directory: Path, name: str, texts: list[str], documents: list[str] | None = None) -> np.ndarray:
    """An output of the graph for one padded batch, with nothing but onnxruntime and a tokenizer."""
    session = onnxruntime.InferenceSession(str(directory / GRAPH))
    tokens = AutoTokenizer.from_pretrained(directory)(
        texts, documents, padding=True, truncation=True, return_tensors="np"
    )
    (values,) = session.run([name], {given.name: tokens[given.name] for given in session.get_inputs()})
    return values


def require_alone_and_padded(directory: Path, name: str, expected: np.ndarray, *texts: list[str]) -> None:
    assert np.allclose(outputs(directory, name, *texts), expected, atol=1e-5)
    for row, one in enumerate(zip(*texts, strict=True)):
        assert np.allclose(outputs(directory, name, *([text] for text in one)), expected[row], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {}),
        ("llama", {"bidirectional": True, "pooling": Pooling.mean}),
        ("gemma3_text", {"bidirectional": True, "pooling": Pooling.mean}),
    ],
    ids=["qwen3", "llama-bidirectional", "gemma3-bidirectional"],
)
def test_embedders_from_language_models(tmp_path, architecture, options):
    """Padded on the left, as their tokenizers do, and on the right."""
    model = save_small(small_model(architecture), tmp_path / "model")
    built = architecture_of(
        tmp_path / "architecture", model_options(path=str(model), **{"pooling": Pooling.last} | options)
    )
    export_model(tmp_path / "out", built, formats=["onnx"])
    settings = tmp_path / "out" / "tokenizer_config.json"
    for side in ("left", "right"):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": side}))
        require_alone_and_padded(tmp_path / "out", "sentence_embedding", built.vectors.numpy(), list(PROBES))


@pytest.mark.slow
def test_rerankers_from_language_models(tmp_path):
    """From the tokens of a prompt with a template to the difference of two logits."""
    options: dict[str, Any] = {"pair_template": "qwen3", "score_head": ScoreHead.tokens}
    model = model_options(path=str(save_causal(tmp_path / "model")), kind="cross_encoder", **options)
    built = architecture_of(tmp_path / "architecture", model)
    export_model(tmp_path / "out", built, formats=["onnx"], check=False)
    # The template cuts the document of a pair that is too long, and the tokenizer the longer text.
    whole = slice(0, 7)
    queries, documents = map(list, zip(*formatted_pairs(built.source, PROBES)[whole], strict=True))
    require_alone_and_padded(tmp_path / "out", "logits", built.vectors[0, whole, None].numpy(), queries, documents)


def sparse(folder: Path, architecture: str = "bert", **options: Any) -> Architecture:
    kind = "sparse"
    model = save_language_model(small_model(architecture, kind=kind, pooling=None), folder / "model")
    return architecture_of(folder / "architecture", model_options(path=str(model), kind=kind, **options))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["modernbert", "qwen3"])
def test_sparse_models_of_other_pooling_and_architectures(tmp_path, architecture):
    options = {"pooling": SparsePooling.sum, "activation": SparseActivation.log1p_relu}
    built = sparse(tmp_path, architecture, **options if architecture == "qwen3" else {})
    export_model(tmp_path / "out", built, formats=["onnx"])
    expected = built.vectors[: len(PROBES)].numpy()
    require_alone_and_padded(tmp_path / "out", "sentence_embedding", expected, list(PROBES))
    assert outputs(tmp_path / "out", "logits", list(PROBES)).ndim == 3


def saved_architecture(kind: str, folder: Path) -> Architecture:
    model = folder / "model"
    match kind:
        case "sparse":
            return sparse(folder)
        case "m3":
            return architecture_of(folder / "architecture", model_options(path=str(save_m3(model)[0]), kind=kind))
        case "late_interaction":
            options = {}
            return architecture_of(
                folder / "architecture", model_options(path=str(save_pylate(model, "bert")), kind=kind, **options)
            )
        case _:
            pooling = Pooling.mean if kind == "dense" else None
            save_small(small_model("xlm-roberta", kind=kind), model)
            return architecture_of(folder / "architecture", model_options(path=str(model), kind=kind, pooling=pooling))


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cross_encoder", "late_interaction", "m3", "sparse")),
    ],
)
def test_smaller_files_are_measured(tmp_path, kind):
    """Each kind by its own output; the fp16 file is closer than the one of int8, which a strict bound rejects."""
    built = saved_architecture(kind, tmp_path)
    formats = ["onnx", "onnx_fp16", "onnx_int8", *(["openvino"] if find_spec("openvino") is not None else [])]
    export_model(tmp_path / "out", built, formats=formats, onnx_min_agreement=0.8, card="# Card\n")
    files = [tmp_path / "out" / "onnx" / f"{name}.onnx" for name in ("model", "model_fp16", "model_quantized")]
    sizes = [file.stat().st_size for file in files]
    assert sizes[0] > sizes[1]
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    measured = [float(line.split("|")[3]) for line in lines if line.startswith("| `o")]
    assert len(measured) == len(formats) - 1
    assert measured[0] > 0.999
    assert 0.8 < measured[1] <= 1
    assert min(measured[2:], default=1.0) > 0.9999
    with pytest.raises(CheckpointError, match=r"onnx_min_agreement=1.0"):
        export_model(tmp_path / "strict", built, formats=["onnx", "onnx_int8"], onnx_min_agreement=1.0)
