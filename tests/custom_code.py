"""A model with custom code: its Python is stored with its weights, and it declares no layers."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from tests.small import small_tokenizer

_CONFIGURATION = """
from transformers import PretrainedConfig

class PairingConfig(PretrainedConfig):
    model_type = "pairing"

    def __init__(self, vocab_size=64, hidden_size=32, num_hidden_layers=2, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**more)
"""
# No `_no_split_modules`, no gradient checkpointing, no `get_input_embeddings`, and its own attention.
_MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_pairing import PairingConfig

class Pairing(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, hidden, padding):
        seen, _ = self.attention(hidden, hidden, hidden, key_padding_mask=padding, need_weights=False)
        hidden = self.norm(hidden + seen)
        return hidden + torch.tanh(self.linear(hidden))

class PairingModel(PreTrainedModel):
    config_class = PairingConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(64, config.hidden_size)
        self.steps = nn.ModuleList(Pairing(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.post_init()

    def _init_weights(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, input_ids, attention_mask=None, **more):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        for step in self.steps:
            hidden = step(hidden, attention_mask == 0)
        return BaseModelOutput(last_hidden_state=hidden)
"""


def unload_remote_code() -> None:
    """Unload the package of models' code, which other tests may have loaded from another directory."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]
    for path in [path for path in sys.path if (Path(path) / "transformers_modules").is_dir()]:
        sys.path.remove(path)


def model_with_remote_code(directory: Path) -> Path:
    """A model of a type unknown to transformers, with random weights."""
    unload_remote_code()
    directory.mkdir(parents=True)
    (directory / "configuration_pairing.py").write_text(_CONFIGURATION)
    (directory / "modeling_pairing.py").write_text(_MODELING)
    classes = {"AutoConfig": "configuration_pairing.PairingConfig", "AutoModel": "modeling_pairing.PairingModel"}
    (directory / "config.json").write_text(json.dumps({"model_type": "pairing", "auto_map": classes}))
    small_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    weights = AutoModel.from_config(config, trust_remote_code=True).state_dict()
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
