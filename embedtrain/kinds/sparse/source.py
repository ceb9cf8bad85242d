"""Opens learned sparse models: how the logits of a text's tokens become weights of words, and static queries."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from embedtrain.config.kind_settings import IDF, SparseQueries, StaticQueries, WordWeights
from embedtrain.config.kinds import Kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import model_option
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.sentence_transformers import SETTINGS, SPARSE, SPLADE_POOLING, read_similarity, routed_modules
from embedtrain.formats.source import read_files, source_of
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.kinds.sparse.model import IDF_FILE
from embedtrain.kinds.sparse.options import SparseOptions
from embedtrain.models.file_references import read_json
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import expand_user

# Settings that change logits after the vocabulary head, with the values that do not.
LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


def is_sparse(directory: Path) -> bool:
    """Whether a directory is that of a sparse model: of sentence-transformers, of OpenSearch, or of a run."""
    settings: dict[str, Any] = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    return settings.get("model_type") == SPARSE or (directory / IDF_FILE).is_file() or _has_splade_pooling(directory)


def _has_splade_pooling(directory: Path) -> bool:
    if not (directory / "modules.json").is_file():
        return False
    return any(module.kind == SPLADE_POOLING for module in routed_modules(directory))


def require_pooling(directory: Path, model: ModelConfig) -> None:
    """Raise ConfigError unless a recipe trains a dense model from the backbone of a sparse one."""
    is_chosen = isinstance(model, DenseOptions) and model.pooling is not None
    if _has_splade_pooling(directory) and not is_chosen:
        raise ConfigError(
            f"{directory} is a learned sparse model ({SPLADE_POOLING}): set {model_option('kind')}=sparse, or "
            f"{model_option('pooling')} to "
            "train another model from its backbone"
        )


def read(kind: Kind, directory: Path, model: SparseOptions) -> ModelSource:
    """A directory of a sparse model, or of a language model with its vocabulary head."""
    files = read_files(directory, model)
    source = replace(source_of(kind, files), settings=files.modules.words)
    if files.modules.kinds:
        similarity = read_similarity(files.settings, directory, (VectorSimilarity.dot,))
        source = replace(source, vectors=replace(source.vectors, similarity=similarity))
    return with_options(source, model)


def with_options(source: ModelSource, model: SparseOptions) -> ModelSource:
    """The model with the options in place of the settings of its files.

    A ModelError if it has no vocabulary head that we compute.
    """
    config, stored = source.config, source.settings or WordWeights()
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{model_option('kind')}=sparse: {config.model_type} has no class for masked or causal language models, "
            "whose head "
            "weighs words"
        )
    for setting, neutral in LOGIT_SETTINGS.items():
        value = getattr(config.get_text_config(), setting, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                f"{model_option('kind')}=sparse: {config.model_type} has {setting}={value}, which is not supported"
            )
    settings = WordWeights(
        pooling=model.pooling or stored.pooling,
        activation=model.activation or stored.activation,
        queries=_static_queries(stored.queries, source.directory, model),
    )
    return replace(source, settings=settings, vectors=replace(source.vectors, normalize=False))


def _static_queries(stored: StaticQueries | None, directory: Path | None, model: SparseOptions) -> StaticQueries | None:
    """The settings of a model whose files have `stored`, with the options in their stead; None for encoded queries."""
    if stored is None and directory is not None and (directory / IDF_FILE).is_file():
        stored = StaticQueries(path=directory / IDF_FILE)
    default = SparseQueries.encoded if stored is None else SparseQueries.static
    if (model.queries or default) is SparseQueries.encoded:
        for name in ("query_weights", "train_query_weights"):
            if getattr(model, name) is not None:
                raise ConfigError(
                    f"{model_option(name)}={getattr(model, name)}: the model encodes queries; set "
                    "model.queries=static, or leave it out"
                )
        return None
    if model.adapters.on:
        raise ConfigError("model.lora: adapters are not for static queries; leave it out")
    path = None if stored is None else stored.path
    if model.query_weights is not None:
        path = None if model.query_weights == IDF else expand_user(model.query_weights)
        if path is not None and not path.is_file():
            raise ConfigError(f"model.query_weights={model.query_weights}: there is no such file")
    trained = stored is not None and stored.trained
    return StaticQueries(path=path, trained=trained if model.train_query_weights is None else model.train_query_weights)
