"""`embedtrain verify` with engines that are no Python libraries; `make test-engines` installs them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from embedtrain.commands.verify import engines
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError
from embedtrain.formats.verify import PROBES
from tests.conftest import ROOT
from tests.verify.serving_models import FAMILIES, exported_with_tokenizer
from tests.verify.test_verify import verify

pytestmark = pytest.mark.engines
NODE = ROOT / ".node-transformersjs"


def keep(monkeypatch, condition: Callable[[str], bool]) -> None:
    """Compare texts that meet the condition."""
    monkeypatch.setattr(engines, "PROBES", tuple(filter(condition, PROBES)))


def transformers_js(model: Path, folder: Path = NODE) -> dict[str, float]:
    if not folder.is_dir() or shutil.which("node") is None:
        pytest.skip(f"node or {NODE.name} does not exist: make test-engines installs the second")
    differences = verify(model, "engines=[transformers_js]", f"python={{transformers_js: {folder}}}")
    return differences["transformers_js"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_transformers_js_computes_the_vectors_of_the_encoder(tmp_path, architecture, monkeypatch):
    """Also of a text beyond the maximum length, whose end token its own truncation would cut off."""
    if architecture == "xlm-roberta":
        keep(monkeypatch, str.isascii)  # it has rules of its own instead of the character map of the tokenizer
    assert transformers_js(exported_with_tokenizer(tmp_path, architecture, "onnx"))["text"] < 1e-5


def test_transformers_js_computes_the_scores_of_a_reranker(tmp_path, monkeypatch):
    keep(monkeypatch, lambda text: len(text) < 50)
    model = exported_with_tokenizer(tmp_path, "bert", "onnx", kind="cross_encoder")
    assert transformers_js(model)["logits"] < 1e-5


def test_a_package_that_is_missing_is_named(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="transformers_js"):
        transformers_js(exported_with_tokenizer(tmp_path, "bert", "onnx"), tmp_path)
    assert "Cannot find package '@huggingface/transformers'" in capsys.readouterr().out


def of_environment(engine: str, environment: str, model: Path, *more: str) -> dict[str, float]:
    python = ROOT / environment / "bin" / "python"
    if not os.access(python, os.X_OK):
        pytest.skip(f"{environment} does not exist: make test-engines installs it")
    return verify(model, f"engines=[{engine}]", f"python={{{engine}: {python}}}", *more)[engine]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_vllm_computes_the_vectors_of_the_encoder(tmp_path, architecture):
    assert of_environment("vllm", ".venv-vllm", exported_with_tokenizer(tmp_path, architecture))["text"] < 1e-5


def test_vllm_computes_the_scores_of_a_reranker(tmp_path):
    model = exported_with_tokenizer(tmp_path, "xlm-roberta", kind="cross_encoder")
    differences = of_environment("vllm", ".venv-vllm", model)
    assert differences.keys() == {"logits", "activated"}
    assert max(differences.values()) < 1e-5


# How the converter would name the pre-tokenizer of the published vocabularies.
PRE_TOKENIZERS = {
    "bert": "bert-bge",
    "xlm-roberta": "",
    "modernbert": "modern-bert",
    "qwen3": "qwen2",
    "llama": "llama-bpe",
}


@pytest.mark.parametrize("architecture", PRE_TOKENIZERS)
def test_llama_cpp_computes_the_vectors_of_the_encoder(tmp_path, architecture, monkeypatch):
    """It rounds GELU to float16 in BERT and XLM-R."""
    if architecture == "bert":
        keep(monkeypatch, lambda text: "\u093f" not in text)
    if (
        architecture == "xlm-roberta"
    ):  # whose character map makes spaces of tabs and line ends; that of the tests does not
        keep(monkeypatch, lambda text: "\t" not in text)
    monkeypatch.setenv("LLAMA_CPP_PRE_TOKENIZER", PRE_TOKENIZERS[architecture])
    model = exported_with_tokenizer(tmp_path, architecture)
    assert of_environment("llama_cpp", ".venv-llamacpp", model)["text"] < 1e-4


def test_llama_cpp_attends_in_both_directions(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_PRE_TOKENIZER", "llama-bpe")
    model = exported_with_tokenizer(tmp_path, "llama", bidirectional=True, pooling=Pooling.mean)
    assert of_environment("llama_cpp", ".venv-llamacpp", model)["text"] < 1e-4


def test_llama_cpp_computes_the_scores_of_a_reranker(tmp_path, monkeypatch):
    keep(monkeypatch, lambda text: len(text) < 50 and "\t" not in text)
    model = exported_with_tokenizer(tmp_path, "xlm-roberta", kind="cross_encoder")
    assert of_environment("llama_cpp", ".venv-llamacpp", model, "tolerance=1e-3")["logits"] < 1e-3


def test_llama_cpp_names_a_vocabulary_that_its_converter_does_not_know(tmp_path, capsys):
    model = exported_with_tokenizer(tmp_path, "qwen3")
    with pytest.raises(KeyError):
        of_environment("llama_cpp", ".venv-llamacpp", model)
    assert "BPE pre-tokenizer was not recognized" in capsys.readouterr().out
