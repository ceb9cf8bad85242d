"""The head of a cross-encoder as its directory describes it: of which kind, with which activation, trained or new."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig

from embedtrain.config.recipe import ModelKind, Pooling
from embedtrain.errors import ModelError
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.file_references import read_json

SIGMOID = "torch.nn.modules.activation.Sigmoid"
_CLASSIFIER = "ForSequenceClassification"
_LATE = "late"  # of EuroBERT's class: its head receives every token, and no pooled one


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The head of a cross-encoder.

    Attributes:
        is_new: whether the model's files have no weights for it, so that they are random.
        activation: the class that turns scores into what sentence-transformers returns, by its full name. Training and
            evaluation use the scores before it.
        template: `model.pair_template`; None: the tokenizer's own pairs.
        note: a line for the user about the directory that the head is added to; may be empty.
    """

    is_new: bool
    activation: str = SIGMOID
    note: str = ""
    template: Mapping[str, str] | None = None


def read_score_head(directory: Path, config: PretrainedConfig, modules: Sequence[str], settings: Path) -> HeadSource:
    """The head of the model in `directory`, whose configuration becomes that of a classifier of one label.

    `modules` are the types in modules.json, if there is one; `settings` is config_sentence_transformers.json, which may
    not exist. A ModelError if the directory holds a classifier of several labels, or its architecture has none.
    """
    values: dict[str, Any] = read_json(settings) if settings.is_file() else {}
    is_classifier = is_reranker(config)
    if is_classifier and config.num_labels != 1:
        raise ModelError(
            f"{directory / 'config.json'}: {_architecture(config)} has {config.num_labels} labels, and the score of a "
            "cross-encoder is a single one (num_labels 1)"
        )
    if values.get("model_type") == "CrossEncoder" and len(modules) > 1:
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(modules)}; supported in a cross-encoder is "
            "Transformer alone"
        )
    if is_classifier and getattr(config, "classifier_pooling", None) == _LATE:
        raise ModelError(
            f"{directory / 'config.json'}: classifier_pooling={_LATE} scores every token and takes the mean; "
            "supported are bos, cls and mean"
        )
    note = ""
    if "Pooling" in modules:
        note = f"{directory} is an embedding model: its backbone is used, its pooling is not"
    head = new_score_head(config, str(directory))
    if not is_classifier:
        return HeadSource(is_new=True, note=note)
    return HeadSource(is_new=False, activation=_activation(config, values), note=head.note)


def new_score_head(config: PretrainedConfig, where: str) -> HeadSource:
    """A new head, for which `config` becomes that of a classifier of one label; a ModelError if there is no class."""
    own = dict(getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and f"AutoModel{_CLASSIFIER}" not in own:
        raise ModelError(f"{where}: {config.model_type} has no class for sequence classification, which scores pairs")
    config.num_labels = 1
    if getattr(config, "classifier_pooling", None) == _LATE:
        config.classifier_pooling = "mean"
    return HeadSource(is_new=True)


def is_reranker(config: PretrainedConfig) -> bool:
    """Whether the model was saved as a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def stored_kind(directory: Path) -> ModelKind:
    """The kind of a model directory that an export or a run has written."""
    path = directory / "config_sentence_transformers.json"
    settings: dict[str, Any] = read_json(path) if path.is_file() else {}
    return ModelKind.cross_encoder if settings.get("model_type") == "CrossEncoder" else ModelKind.dense


def score_pooling(config: PretrainedConfig) -> Pooling:
    """Which token vector the architecture's head receives: the first of encoders, the last of decoders.

    ModernBERT may take the mean. The scores are compared with those of the whole class after its weights are read.
    """
    if is_decoder(config):
        return Pooling.last
    return Pooling.mean if getattr(config, "classifier_pooling", None) == "mean" else Pooling.cls


def _architecture(config: PretrainedConfig) -> str:
    return ", ".join(config.architectures or [config.model_type])


def _activation(config: PretrainedConfig, settings: dict[str, Any]) -> str:
    """In the order in which sentence-transformers (6.2) reads it, which ignores names of code outside of torch."""
    stored = config.to_dict()
    nested = stored.get("sentence_transformers")
    for name in (
        settings.get("activation_fn"),
        nested.get("activation_fn") if isinstance(nested, dict) else None,
        stored.get("sbert_ce_default_activation_function"),
    ):
        if isinstance(name, str) and name.startswith("torch.nn."):
            return name
    return SIGMOID
