"""Which way a model's tokens look: a decoder's at those before them, or at all, as its configuration says.

That it stands in the configuration alone is what lets transformers and sentence-transformers open an export and give
the same vectors (read on transformers 5.23: `masking_utils.create_causal_mask` and `merge_with_config_defaults` obey
`is_causal`, Gemma 3 has `use_bidirectional_attention` instead).
"""

import sys

from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from embedtrain.config.schema import Pooling
from embedtrain.errors import ConfigError

# With a sliding window its meaning is another than that of `is_causal`, and it is what EmbeddingGemma was trained with.
# Gemma 1 and 2 have an option of that name too, and make their masks without it.
_OWN_OPTION = {"gemma3_text": "use_bidirectional_attention"}


def attend(config: PretrainedConfig, bidirectional: bool | None) -> PretrainedConfig:
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


def looks_back_only(config: PretrainedConfig) -> bool:
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
    if pooling is Pooling.cls and looks_back_only(config):
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
