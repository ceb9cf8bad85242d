"""A model with its own Python: the code is exported with the model if it was trusted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel

from embedtrain.config.recipe import Pooling
from embedtrain.errors import ModelError
from embedtrain.formats.verify import PROBES
from tests.checkpoint.exporting import architecture_of, export_model
from tests.custom_code import unload_remote_code
from tests.small import model_options, save_small, small_model, small_tokenizer

_CONFIGURATION = """
from transformers import PretrainedConfig

class TurningConfig(PretrainedConfig):
    model_type = "turning"

    def __init__(self, vocab_size=64, hidden_size=16, num_hidden_layers=1, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**more)
"""
_MODELING = """
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_turning import TurningConfig
from .turning_parts import turned

class TurningModel(PreTrainedModel):
    config_class = TurningConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config.hidden_size, config.hidden_size) for _ in range(1))
        self.post_init()

    def _init_weights(self, module):
        if hasattr(module, "weight"):
            torch.nn.init.normal_(module.weight)

    def forward(self, input_ids, attention_mask=None, **more):
        return BaseModelOutput(last_hidden_state=turned(self.layers[0](self.words(input_ids))))
"""


def custom_model(directory: Path) -> Path:
    """A model of a type that transformers does not know, in three files of Python."""
    directory.mkdir(parents=True)
    (directory / "configuration_turning.py").write_text(_CONFIGURATION)
    (directory / "modeling_turning.py").write_text(_MODELING)
    (directory / "turning_parts.py").write_text("def turned(hidden):\n    return hidden.flip(-1)\n")
    classes = {"AutoConfig": "configuration_turning.TurningConfig", "AutoModel": "modeling_turning.TurningModel"}
    settings = {"model_type": "turning", "hidden_size": 16, "auto_map": classes, "vocab_size": 64}
    (directory / "config.json").write_text(json.dumps(settings))
    small_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    save_file(dict(AutoModel.from_config(config, trust_remote_code=True).state_dict()), directory / "model.safetensors")
    return directory


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Directory to which transformers copies a model's code."""
    unload_remote_code()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_trusted_code_is_exported(tmp_path):
    model = custom_model(tmp_path / "model")
    with pytest.raises(ModelError, match="trust_remote_code"):
        architecture_of(tmp_path / "refused", model_options(path=str(model), pooling=Pooling.mean))
    trusted = model_options(path=str(model), pooling=Pooling.mean, trust_remote_code=True)
    small = architecture_of(tmp_path / "architecture", trusted)
    export_model(tmp_path / "out", small, formats=["onnx"])
    assert {path.name for path in (tmp_path / "out").glob("*.py")} == {path.name for path in model.glob("*.py")}
    opened = SentenceTransformer(str(tmp_path / "out"), trust_remote_code=True)
    assert torch.allclose(torch.as_tensor(opened.encode(list(PROBES))), small.vectors, atol=1e-5)
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "out"), trust_remote_code=False)


def test_untrusted_code_is_neither_copied_nor_referenced(tmp_path):
    """transformers knows BERT itself, so a directory that refers to other code is trained without that code."""
    model = save_small(small_model("bert"), tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "evil.Model"}}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    own_tokenizer = {"auto_map": {"AutoTokenizer": ["author/model--tok.Tok", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings | own_tokenizer))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    small = architecture_of(tmp_path / "arch", model_options(path=str(model), pooling=Pooling.mean))
    assert "auto_map" not in (tmp_path / "arch" / "tokenizer_config.json").read_text()
    # The architecture of somebody else's run may have code that training has not written.
    edited = json.loads((tmp_path / "arch" / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
    (tmp_path / "arch" / "config.json").write_text(json.dumps(edited))
    (tmp_path / "arch" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    export_model(tmp_path / "out", small)
    assert not list((tmp_path / "out").rglob("*.py"))
    for path in (tmp_path / "out").rglob("*config.json"):
        assert "auto_map" not in path.read_text()
    assert not (tmp_path / "ran").exists()
