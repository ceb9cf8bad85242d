"""`embedtrain verify` with engines of this environment; see test_engines.py for those of others."""

import json
import sys
from pathlib import Path

import pytest

from embedtrain.commands.verify import compose as compose_verify
from embedtrain.commands.verify import interpreters
from embedtrain.commands.verify import run as main
from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import POOLINGS, model_options, save_small, small_model

pytest.importorskip("onnxruntime")
# Rotary positions that are not the defaults of any version, and layers that differ.
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 55.0}}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 77.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = {"full_attention": {"rope_type": "default", "rope_theta": 44.0}}
LAYERS |= {"sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}
CHANGES = {
    "xlm-roberta": {},
    "bert": {},
    "qwen3": ROTARY,
    "llama": {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 16}},
    "modernbert": {"rope_parameters": LAYERS},
    "gemma3_text": {"rope_parameters": LAYERS, "sliding_window": 5},
}


def exported(folder: Path, architecture: str, truncate_dim: int | None = None, **options: object) -> Path:
    model = small_model(architecture)
    save_small(small_model(architecture, config=model.config | CHANGES[architecture]), folder / "model")
    values = {"pooling": POOLINGS.get(architecture, Pooling.mean), "query_prompt": "alpha "} | options
    built = architecture_of(folder / "architecture", model_options(path=str(folder / "model"), **values))
    export_model(folder / "out", built, formats=["onnx"], truncate_dim=truncate_dim, check=False)
    return folder / "out"


def verify(model: Path, *more: str) -> dict[str, dict[str, float]]:
    outcomes = main(compose_verify([f"model={model}", *more]))
    return {outcome.engine: dict(outcome.differences or {}) for outcome in outcomes}


def test_onnxruntime_computes_the_vectors_of_a_model_with_heads(tmp_path, capsys):
    model = exported(tmp_path, "xlm-roberta", 16, pooling=Pooling.cls, heads=[HeadConfig(out=48), HeadConfig(out=24)])
    differences = verify(model, "engines=[onnxruntime,transformers]")
    assert differences.keys() == {"onnxruntime"}
    assert differences["onnxruntime"]["text"] < 1e-5
    assert "transformers: not compared, it leaves out dense heads" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_with_other_vectors_is_named(tmp_path, capsys):
    model = exported(tmp_path, "qwen3")
    (model / "embedtrain.json").unlink()
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": None, "post_processor": None}))
    settings = model / "1_Pooling" / "config.json"
    settings.write_text(
        settings.read_text().replace('"pooling_mode_lasttoken": true', '"pooling_mode_lasttoken": false')
    )
    settings.write_text(
        settings.read_text().replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    )
    with pytest.raises(CheckpointError, match=r"^onnxruntime: "):
        verify(model, "engines=[onnxruntime]")
    assert "onnxruntime" in capsys.readouterr().out


def test_what_cannot_be_compared(tmp_path):
    with pytest.raises(ConfigError, match="engines"):
        compose_verify(["model=x", "engines=[fastembedding]"])
    with pytest.raises(ConfigError, match="python"):
        compose_verify(["model=x", "python={ollama: y}"])
    with pytest.raises(ModelError, match=f"model={tmp_path / 'none'}"):
        main(compose_verify([f"model={tmp_path / 'none'}"]))
    options = compose_verify(["model=x", "engines=[fastembed]", "python={fastembed: y}"])
    assert interpreters(options) == {"fastembed": "y"}
    assert interpreters(compose_verify(["model=x"]))["transformers"] == sys.executable
