"""`embedtrain verify` with models of other kinds than one vector per text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedtrain.commands.verify import compose as compose_verify
from embedtrain.commands.verify import run as main
from embedtrain.commands.verify.engines import Probe, compare
from embedtrain.config.kind_settings import ScoreHead
from embedtrain.config.recipe import ModelConfig, Pooling
from tests.checkpoint.exporting import architecture_of, export_model
from tests.late_interaction_models import save_pylate
from tests.models.test_m3 import save_m3
from tests.small import model_options, save_language_model, save_small, small_model
from tests.token_rerankers import save_causal

pytest.importorskip("onnxruntime")

PROMPTS = {"query_prompt": "alpha ", "document_prompt": "beta "}


def save(kind: str, folder: Path) -> ModelConfig:
    """A model of a kind, and the options that it is opened with."""
    model = folder / "model"
    if kind == "cross_encoder":
        save_small(small_model("bert", kind="cross_encoder"), model)
    elif kind == "language_model":
        # A reranker that starts from the logits of two tokens, exported as a classifier with a chat template.
        options: dict[str, Any] = {"pair_template": "qwen3", "score_head": ScoreHead.tokens}
        return model_options(path=str(save_causal(model)), kind="cross_encoder", **options)
    elif kind == "late_interaction":
        save_pylate(model, "bert")
        return model_options(path=str(model), kind=kind)
    elif kind == "dense":
        save_small(small_model("bert"), model)
        return model_options(path=str(model), pooling=Pooling.mean, **PROMPTS)
    elif kind == "sparse":
        save_language_model(small_model("bert", kind="sparse", pooling=None), model)
    else:
        save_m3(model)
    return model_options(path=str(model), kind=kind, **PROMPTS)


def exported(kind: str, folder: Path, *formats: str) -> Path:
    built = architecture_of(folder / "architecture", save(kind, folder))
    export_model(folder / "out", built, formats=["sentence_transformers", *formats], check=False)
    return folder / "out"


def verified(model: Path, *more: str) -> dict[str, dict[str, float]]:
    outcomes = main(compose_verify([f"model={model}", *more]))
    return {outcome.engine: dict(outcome.differences or {}) for outcome in outcomes}


# The ways of encoding that each engine of this environment has; None: it is not compared.
TEXTS = {"text", "query", "document"}
WAYS: dict[str, tuple[set[str] | None, ...]] = {
    "cross_encoder": ({"logits", "activated"}, {"logits"}, {"logits"}),
    "language_model": ({"logits", "activated"}, {"logits"}, {"logits"}),
    "late_interaction": ({"query", "document"}, None, {"query", "document"}),
    "sparse": (TEXTS, {"text"}, {"text"}),
    "m3": (
        {f"vectors {way}" for way in TEXTS},
        {"vectors text"},
        {f"{part} text" for part in ("vectors", "word_weights", "token_vectors")},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WAYS)
def test_engines_compute_the_output_of_every_kind(tmp_path, kind, capsys):
    differences = verified(exported(kind, tmp_path, "onnx"))
    printed = capsys.readouterr().out
    for engine, ways in zip(("sentence_transformers", "transformers", "onnxruntime"), WAYS[kind], strict=True):
        if ways is None:
            assert f"{engine}: not compared, " in printed
        else:
            assert differences[engine].keys() == ways
            assert max(differences[engine].values()) < 1e-4


@pytest.mark.quick("m3", "cross_encoder")
@pytest.mark.parametrize("kind", [kind for kind in WAYS if kind != "language_model"])
def test_the_graph_computes_the_output_of_every_kind(tmp_path, kind):
    """With prompts, expansion, a skip list and texts that are too long."""
    differences = verified(exported(kind, tmp_path, "onnx"), "engines=[onnxruntime]")["onnxruntime"]
    assert differences.keys() == WAYS[kind][2]
    assert max(differences.values()) < 1e-5


def test_differences_of_parts_by_way_of_encoding():
    """Weights of words by their ids; numbers above 1 relative to themselves; other shapes and infinite numbers."""
    rows = [np.array([0.0, 2.0, 0.5], dtype=np.float32)]
    probe = Probe(None, {}, {"vectors": {"text": rows, "query": rows}, "word_weights": {"text": rows}})
    words = {"indices": [1, 2], "values": [2.2, 0.5]}
    computed = {"vectors": {"text": [[0.0, 2.0, 0.25]], "query": [[0.0, 2.0]]}, "word_weights": {"text": [words]}}
    assert compare(computed, probe) == pytest.approx(
        {"vectors text": 0.25, "vectors query": np.inf, "word_weights text": 0.1}
    )
    probe = Probe(None, {}, {"vectors": {"text": rows}})
    assert compare({"vectors": {"text": [[np.nan, 2.0, 0.5]]}}, probe) == {"text": np.inf}
    unknown = {"word_weights": {"text": [{"indices": [3], "values": [1.0]}]}}
    assert compare(unknown, Probe(None, {}, {"word_weights": {"text": rows}})) == {"text": np.inf}
