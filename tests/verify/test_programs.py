"""`embedtrain verify` with engines that are no Python libraries; `make test-engines` installs them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from embedtrain.checkpoint.export.verify import PROBES
from embedtrain.config.recipe import ModelKind
from embedtrain.errors import CheckpointError
from embedtrain.verify import probes
from tests.conftest import ROOT
from tests.verify.serving_models import FAMILIES, exported_with_tokenizer
from tests.verify.test_verify import verify

pytestmark = pytest.mark.engines
NODE = ROOT / ".node-transformersjs"


def keep(monkeypatch, condition: Callable[[str], bool]) -> None:
    """Compare texts that meet the condition."""
    monkeypatch.setattr(probes, "PROBES", tuple(filter(condition, PROBES)))


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
    model = exported_with_tokenizer(tmp_path, "bert", "onnx", kind=ModelKind.cross_encoder)
    assert transformers_js(model)["logits"] < 1e-5


def test_a_package_that_is_missing_is_named(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="transformers_js"):
        transformers_js(exported_with_tokenizer(tmp_path, "bert", "onnx"), tmp_path)
    assert "Cannot find package '@huggingface/transformers'" in capsys.readouterr().out
