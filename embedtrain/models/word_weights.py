"""Settings of learned sparse models: how the logits of a text's tokens become weights of words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig

from embedtrain.config.recipe import ModelConfig
from embedtrain.config.sparse import SparseActivation, SparsePooling, SparseQueries
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.static_queries import SPARSE_STATIC_EMBEDDING, StaticQueries, static_queries_of

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
    queries: StaticQueries | None = None  # of queries that are not encoded

    @property
    def is_new(self) -> bool:
        """False: the vocabulary head is in the files."""
        return False

    @property
    def query_mode(self) -> SparseQueries:
        """How queries become weights of words."""
        return SparseQueries.encoded if self.queries is None else SparseQueries.static


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


def word_weights_of(
    stored: WordWeights | None, directory: Path | None, config: PretrainedConfig, model: ModelConfig
) -> WordWeights:
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
        pooling=model.sparse.pooling or stored.pooling,
        activation=model.sparse.activation or stored.activation,
        queries=static_queries_of(stored.queries, directory, model),
    )


def require_sparse_modules(directory: Path, kinds: Sequence[str], model: ModelConfig) -> None:
    """A ModelError unless these are the modules of a sparse model, a ConfigError unless the recipe trains one."""
    if (
        list(kinds[1:]) not in ([SPLADE_POOLING], [SPLADE_POOLING, SPARSE_STATIC_EMBEDDING])
        or kinds[0] not in TRANSFORMERS
    ):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; supported with {SPLADE_POOLING} is a "
            "Transformer before it, and nothing else"
        )
    if model.kind != "sparse" and model.pooling is None:
        raise ConfigError(
            f"{directory} is a learned sparse model ({SPLADE_POOLING}): set model.kind=sparse, or model.pooling to "
            "train another model from its backbone"
        )
