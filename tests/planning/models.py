"""Published configurations, and small encoders to plan."""

from typing import Any

from torch import nn

from embedtrain.config.recipe import Pooling, Precision
from embedtrain.formats.source import open_model_source
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.planning.model_costs import ModelSpec, model_spec
from tests.small import model_options

# FacebookAI/xlm-roberta-large and meta-llama/Meta-Llama-3-8B, config.json.
XLMR_LARGE: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-05,
}
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def built(config: dict[str, Any], **changes: Any) -> tuple[Encoder, list[nn.Module]]:
    """The encoder on the meta device, and its blocks."""
    encoder = build_encoder(open_model_source(model_options(config=config | changes, pooling=Pooling.mean)))
    return encoder, find_blocks(encoder)


def spec_of(
    config: dict[str, Any], *, length: int = 512, precision: Precision = Precision.bf16, **changes: Any
) -> ModelSpec:
    encoder, blocks = built(config, **changes)
    return model_spec(encoder, blocks, precision=precision, tokens_per_text=length, gpu=True)
