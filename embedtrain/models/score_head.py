"""The head of a cross-encoder as its directory describes it: of which kind, with which activation, trained or new."""

from dataclasses import dataclass
from pathlib import Path

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig

from embedtrain.config.pair_template import PairTemplate
from embedtrain.config.recipe import Pooling
from embedtrain.errors import ModelError
from embedtrain.models.attention_direction import is_decoder

SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
# A cross-encoder of sentence-transformers with a linear layer on a token vector.
SCORE_MODULES = ["Transformer", "Pooling", "Dense"]
LATE = "late"  # of EuroBERT's class: its head receives every token, and no pooled one
LOGIT_SCORE = "LogitScore"
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """The head of a cross-encoder.

    Attributes:
        is_new: whether the model's files have no weights for it, so that they are random.
        activation: the class that turns scores into what sentence-transformers returns, by its full name. Training and
            evaluation use the scores before it.
        tokens: ids of the tokens whose rows of the vocabulary head it starts from: the first minus the second, if there
            is one; empty for a classification head.
        labels: those of a classifier of `num_labels` in the files that it starts from: the logit of the first minus
            that of the second, if there is one; empty for a classifier of one label.
        num_labels: of the classifier in the files.
        linear: the directory of a Dense module whose weight [1, H] is the class's own `score.weight`.
        template: what surrounds the texts of a pair; None: the tokenizer's own pairs.
        note: a line for the user about the directory that the head is added to; may be empty.
    """

    is_new: bool
    activation: str = SIGMOID
    tokens: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    num_labels: int = 1
    linear: Path | None = None
    note: str = ""
    template: PairTemplate | None = None


def new_score_head(config: PretrainedConfig, where: str) -> HeadSource:
    """A new head, for which `config` becomes that of a classifier of one label; a ModelError if there is no class."""
    own = dict(getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and f"AutoModel{_CLASSIFIER}" not in own:
        raise ModelError(f"{where}: {config.model_type} has no class for sequence classification, which scores pairs")
    config.num_labels = 1
    if getattr(config, "classifier_pooling", None) == LATE:
        config.classifier_pooling = "mean"
    return HeadSource(is_new=True)


def is_reranker(config: PretrainedConfig) -> bool:
    """Whether the model was saved as a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def score_pooling(config: PretrainedConfig) -> Pooling:
    """Which token vector the architecture's head receives: the first of encoders, the last of decoders.

    ModernBERT may take the mean. The scores are compared with those of the whole class after its weights are read.
    """
    if is_decoder(config):
        return Pooling.last
    return Pooling.mean if getattr(config, "classifier_pooling", None) == "mean" else Pooling.cls
