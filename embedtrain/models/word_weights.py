"""Settings of learned sparse models: how the logits of a text's tokens become weights of words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig

from embedtrain.config.recipe import ModelConfig
from embedtrain.config.sparse import SparseActivation, SparsePooling
from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json

SPLADE_POOLING = "SpladePooling"
# The module before it: of sentence-transformers 6, and of version 5.
TRANSFORMERS = ("Transformer", "MLMTransformer")
# Settings that change logits after the vocabulary head, with the values that do not.
LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """The settings of a sparse model: those of its files, with the options of the recipe in their stead."""

    pooling: SparsePooling = SparsePooling.max
    activation: SparseActivation = SparseActivation.relu


def read_word_weights(path: Path) -> WordWeights:
    """The settings of a SpladePooling module; a ModelError if a value is not supported."""
    settings: dict[str, Any] = read_json(path)
    try:
        return WordWeights(
            pooling=SparsePooling(settings.get("pooling_strategy", "max")),
            activation=SparseActivation(settings.get("activation_function", "relu")),
        )
    except ValueError as error:
        raise ModelError(f"{path}: {error}; supported are max and sum, relu and log1p_relu") from None


def word_weights_of(stored: WordWeights | None, config: PretrainedConfig, model: ModelConfig) -> WordWeights:
    """The settings of a model whose files have `stored`; a ModelError if it has no vocabulary head that we compute."""
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model.kind=sparse: {config.model_type} has no class for masked or causal language models, whose head "
            "weighs words"
        )
    for setting, neutral in LOGIT_SETTINGS.items():
        value = getattr(config.get_text_config(), setting, neutral)
        if value is not None and value != neutral:
            raise ModelError(f"model.kind=sparse: {config.model_type} has {setting}={value}, which is not supported")
    stored = stored or WordWeights()
    return WordWeights(
        pooling=model.sparse.pooling or stored.pooling, activation=model.sparse.activation or stored.activation
    )
