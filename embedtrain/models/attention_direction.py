"""The direction of a model's attention, causal or bidirectional: set in its configuration, and measured.

Only the configuration holds it, so transformers and sentence-transformers open an export with the same vectors (as of
transformers 5.23: `masking_utils.create_causal_mask` and `merge_with_config_defaults` read `is_causal`, Gemma 3 has
`use_bidirectional_attention` instead).
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError
from embedtrain.models.encoder import Encoder

# With a sliding window it differs from `is_causal`, and EmbeddingGemma was trained with it. Gemma 1 and 2 have an
# option of the same name, which their masks ignore.
_OWN_OPTION = {"gemma3_text": "use_bidirectional_attention"}
# Of a vector's length. The same token in two rows of one batch has the same vector up to rounding.
_TOLERANCE = 1e-5


def set_attention_direction(config: PretrainedConfig, bidirectional: bool | None) -> PretrainedConfig:
    """The configuration with bidirectional or causal attention; None leaves it unchanged.

    A ConfigError if an encoder should be causal, or the code of a decoder supports only causal attention.
    """
    kind = config.model_type
    if bidirectional is None or (bidirectional and _is_encoder(config)):
        return config
    if _is_encoder(config):
        raise ConfigError(
            f"model.bidirectional=false: {kind} is an encoder, whose attention is bidirectional; leave it out (null)"
        )
    if bidirectional and kind in CONFIG_MAPPING and not _reads_direction(config):
        raise ConfigError(
            f"model.bidirectional=true: the code of {kind} supports only causal attention; leave it out (null), or "
            "use a model that supports both, such as llama, qwen3, mistral or gemma3_text"
        )
    option = _OWN_OPTION.get(kind)
    if option is None:
        config.is_causal = not bidirectional
        return config
    if hasattr(config, "is_causal"):
        config.is_causal = not bidirectional
    if bool(getattr(config, option)) == bidirectional:
        return config
    # A new object, because the option also sets the window when the configuration is created.
    return type(config).from_dict(config.to_dict() | {option: bidirectional})


def attends_causally(config: PretrainedConfig) -> bool:
    """Whether attention is causal; also false if that is unknown."""
    if _is_encoder(config) or not _reads_direction(config):
        return False
    own = _OWN_OPTION.get(config.model_type)
    return getattr(config, "is_causal", True) is not False and not (own and getattr(config, own))


def require_pooling(config: PretrainedConfig, pooling: str) -> None:
    """Reject `cls` with causal attention, whose first token attends only to itself: a ConfigError."""
    if pooling == Pooling.cls and attends_causally(config):
        raise ConfigError(
            f"{model_option('pooling')}=cls: the first token of {config.model_type} attends only to itself, so all "
            "texts would "
            f"have the same vector: write {model_option('pooling')}=last or mean, or model.bidirectional=true"
        )


def is_decoder(config: PretrainedConfig) -> bool:
    """Whether the architecture predicts next tokens, whatever the direction of its attention here."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not _is_encoder(config)


def _is_encoder(config: PretrainedConfig) -> bool:
    """Judged by its heads: BERT also exists as a decoder, and no decoder predicts masked tokens."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def _reads_direction(config: PretrainedConfig) -> bool:
    """Whether the model is a decoder that gets its mask from transformers, which reads the configuration."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        return False
    classes = MODEL_MAPPING[type(config)]
    model = classes[0] if isinstance(classes, tuple) else classes
    return hasattr(sys.modules[model.__module__], "create_causal_mask")


def attends_to_later_tokens(encoder: Encoder, ids: tuple[int, int, int], device: torch.device) -> bool | None:
    """Whether a text's first token attends to the second; None if that differs with and without padding.

    Compares the backbone's vector of the first token in two texts that differ in their second token, without padding
    and with it, since models build the two masks in different code. What the encoder makes of these vectors does not
    matter: the weights of a sparse model depend on all tokens in any direction. Two forward passes of the encoder
    without gradient, which are collectives if it is sharded: every rank must call. The encoder has no dropout. `ids`
    are the first token and two different second ones.
    """
    first, *seconds = ids
    differs = [_differ(encoder, [[first, second, first][:length] for second in seconds], device) for length in (2, 3)]
    return differs[0] if differs[0] == differs[1] else None


def _differ(encoder: Encoder, rows: list[list[int]], device: torch.device) -> bool:
    """Whether the first tokens of two texts of two tokens have different vectors; further tokens are padding."""
    ids = torch.tensor(rows, device=device)
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    hidden = list[Tensor]()

    def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
        hidden.append(output[0].float())

    # Not a call of the backbone: in a sharded encoder it would become a root of its own.
    hook = encoder.backbone.register_forward_hook(keep)
    try:
        with torch.no_grad():
            encoder(Chunk(ids, (positions < 2).long(), pooled=(positions < 1).long(), has_padding=ids.shape[1] > 2))
    finally:
        hook.remove()
    left, right = hidden[0][:, 0]
    return bool((left - right).norm() > _TOLERANCE * left.norm())
