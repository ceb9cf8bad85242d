"""Which way a model's tokens look: a decoder's at those before them, or at all, as its configuration says.

That it stands in the configuration alone is what lets transformers and sentence-transformers open an export and give
the same vectors (read on transformers 5.23: `masking_utils.create_causal_mask` and `merge_with_config_defaults` obey
`is_causal`, Gemma 3 has `use_bidirectional_attention` instead).
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from embedtrain.config.recipe import Pooling
from embedtrain.errors import ConfigError

# With a sliding window its meaning is another than that of `is_causal`, and it is what EmbeddingGemma was trained with.
# Gemma 1 and 2 have an option of that name too, and make their masks without it.
_OWN_OPTION = {"gemma3_text": "use_bidirectional_attention"}


def set_attention_direction(config: PretrainedConfig, bidirectional: bool | None) -> PretrainedConfig:
    """The configuration with tokens that see those behind them, or that do not; None leaves what it says.

    Raises:
        ConfigError: an encoder is to look one way only, or a decoder both ways whose code knows of one.
    """
    kind = config.model_type
    if bidirectional is None or (bidirectional and _is_encoder(config)):
        return config
    if _is_encoder(config):
        raise ConfigError(
            f"model.bidirectional=false: a {kind} is an encoder: its tokens all see one another; leave it out (null)"
        )
    if bidirectional and kind in CONFIG_MAPPING and not _obeys(config):
        raise ConfigError(
            f"model.bidirectional=true: the code of a {kind} looks back only, whatever its configuration says; leave "
            "it out (null), or take a model that can look both ways, such as a llama, qwen3, mistral or gemma3_text"
        )
    option = _OWN_OPTION.get(kind)
    if option is None:
        config.is_causal = not bidirectional
        return config
    if hasattr(config, "is_causal"):
        config.is_causal = not bidirectional
    if bool(getattr(config, option)) == bidirectional:
        return config
    # Made anew, for it decides about the window too when it is made.
    return type(config).from_dict(config.to_dict() | {option: bidirectional})


def attends_causally(config: PretrainedConfig) -> bool:
    """Whether each token sees nothing but itself and those before it; false also where that cannot be told."""
    if _is_encoder(config) or not _obeys(config):
        return False
    own = _OWN_OPTION.get(config.model_type)
    return getattr(config, "is_causal", True) is not False and not (own and getattr(config, own))


def require_pooling(config: PretrainedConfig, pooling: Pooling) -> None:
    """Refuse a pooling that was asked for and that the model cannot give.

    Raises:
        ConfigError: the first token's vector, of a model that shows it nothing else.
    """
    if pooling is Pooling.cls and attends_causally(config):
        raise ConfigError(
            f"model.pooling=cls: the first token of a {config.model_type} sees none of the others, so all texts would "
            "have one vector: write model.pooling=last or mean, or model.bidirectional=true"
        )


def _is_encoder(config: PretrainedConfig) -> bool:
    """Told by its heads: BERT is also offered as a decoder, and no decoder guesses masked tokens."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def _obeys(config: PretrainedConfig) -> bool:
    """Whether the model is a decoder that asks transformers for its mask, which reads the configuration."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        return False
    found = MODEL_MAPPING[type(config)]
    model = found[0] if isinstance(found, tuple) else found
    return hasattr(sys.modules[model.__module__], "create_causal_mask")


# Of a vector's length. The same token in two rows of one batch has the same vector to the last bits.
_NOTHING = 1e-5

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def attends_to_later_tokens(encoder: Forward, ids: tuple[int, int, int], device: torch.device) -> bool | None:
    """Whether a text's first token sees the second; None where it does beside padding alone, or without alone.

    Two texts that differ in their second token, and what is made of their first tokens. Once without padding and once
    with it, for models make masks in one way or the other, and some look another way then. Two forward passes without
    gradient, collectives if the encoder is sharded: every rank must call.

    Args:
        encoder: ids, mask and the mask of tokens that count, all int64 [N, L], to vectors [N, D]; without dropout.
        ids: tokens that the model knows: the first, and two different ones for the second.
        device: where it computes.
    """
    first, *seconds = ids
    found = [_differ(encoder, [[first, second, first][:length] for second in seconds], device) for length in (2, 3)]
    return found[0] if found[0] == found[1] else None


def _differ(encoder: Forward, rows: list[list[int]], device: torch.device) -> bool:
    """Whether the first tokens of two texts of two tokens have two vectors; what follows the two is padding."""
    ids = torch.tensor(rows, device=device)
    places = torch.arange(ids.shape[1], device=device).expand_as(ids)
    with torch.no_grad():
        one, other = encoder(ids, (places < 2).long(), (places < 1).long()).float()
    return bool((one - other).norm() > _NOTHING * one.norm())
