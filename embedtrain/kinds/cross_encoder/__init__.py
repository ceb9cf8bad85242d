"""model.kind=cross_encoder: a score per pair of query and document (a reranker)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.kinds import Kind
from embedtrain.config.losses import SCORE_LOSSES
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError
from embedtrain.kinds.cross_encoder.options import CrossEncoderOptions, check_cross_encoder
from embedtrain.kinds.dense.options import DenseOptions

if TYPE_CHECKING:
    from torch import Size, Tensor, device
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.data.tokens import Layout
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.encoder import Encoder
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource


class CrossEncoder(Kind):
    """A score per pair of query and document (a reranker)."""

    name = "cross_encoder"
    summary = "a score per pair of query and document (a reranker)"
    aliases = ("reranker", "ranker", "reranking", "crossencoder", "cross")
    scores_pairs = True
    options = CrossEncoderOptions
    new_part = "score head"
    losses = ("softmax", *SCORE_LOSSES, "custom", "combined")
    why_no_other_loss = "compares vectors, and model.kind=cross_encoder scores pairs"
    example_loss = "softmax for rows with negatives"
    why_no_dimensions = "is for vectors, and model.kind=cross_encoder computes a score"
    why_no_similarity = "computes the score itself; leave it out"
    command_options = ("pair_template", "score_tokens", "score_labels")
    reranks = True
    backbone_options = ("pooling",)

    def dimension(self, source: "ModelSource") -> int:
        """That of a score."""
        return 1

    def outputs(self, source: "ModelSource") -> str:
        """The head, and the token that it reads."""
        from embedtrain.models.pooling import describe_pooling

        kind = "a new score head" if source.settings.is_new else "a score head"
        head = "the score of a token" if source.settings.tokens else kind
        return f"{head} on the {describe_pooling(source.vectors.pooling)}"

    def notes(self, source: "ModelSource") -> list[str]:
        """About the template of pairs, and the directory that a new head is added to."""
        return [source.settings.note] if source.settings.note else []

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """What follows the score, and what surrounds the texts of a pair."""
        return {"activation of scores": source.settings.activation, "template of pairs": source.settings.template}

    def ends_texts(self, source: "ModelSource") -> bool:
        """A template may already end pairs."""
        template = source.settings.template
        return template is None or bool(template.special_tokens)

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Pairs of a query and a document."""
        from embedtrain.kinds.cross_encoder.model import PairLayout, read_pair_format

        return PairLayout(tokenizer, read_pair_format(source, tokenizer))

    def check_options(self, model: CrossEncoderOptions) -> None:
        """Values and combinations."""
        check_cross_encoder(model)

    def check_other_options(self, recipe: "Recipe") -> None:
        """A cross-encoder computes no vectors."""
        for options, prefix, name in (
            (recipe.evaluation, "evaluation.", "truncate_dims"),
            (recipe.export, "export.", "truncate_dim"),
        ):
            message = "is for the vectors of model.kind=dense; a cross_encoder computes a score; leave it out"
            OptionChecks(options, prefix).require(getattr(options, name) is None, name, message)
        OptionChecks(recipe.evaluation, "evaluation.").require(
            recipe.evaluation.function is None,
            "function",
            "is called with an encoder of texts, but model.kind=cross_encoder encodes only pairs; leave it out",
        )

    def recognise(self, directory: Path) -> str | None:
        """A classifier of transformers, or a cross-encoder of sentence-transformers."""
        from embedtrain.kinds.cross_encoder.source import recognise

        return recognise(directory)

    def require_other(self, directory: Path, what: str, model: "ModelConfig") -> None:
        """A dense model on the backbone has a pooling that the user chooses."""
        if isinstance(model, DenseOptions) and model.pooling is None:
            raise ConfigError(
                f"{directory} is {what}, which scores pairs: set model.kind=cross_encoder, or model.pooling to train "
                "an embedding model from its backbone"
            )

    def read(self, directory: Path, model: CrossEncoderOptions) -> "ModelSource":
        """The settings of its files, or of a model whose backbone it gets."""
        from embedtrain.kinds.cross_encoder.source import read

        return read(self, directory, model)

    def new(self, source: "ModelSource", model: CrossEncoderOptions) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.kinds.cross_encoder.source import new

        return new(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The score itself, which the model computes of a pair."""
        from embedtrain.losses.score import PairScore

        return PairScore()

    def model_class(self, config: "PretrainedConfig") -> Any:
        """The class for sequence classification."""
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The backbone of the class, and the class as its head."""
        from embedtrain.kinds.cross_encoder.model import cross_encoder

        return cross_encoder(model, source.vectors.pooling)

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the class, or of a causal language model whose rows its score starts from."""
        from embedtrain.kinds.cross_encoder.model import read_weights

        return read_weights(source)

    def head_weights(self, source: "ModelSource") -> dict[str, "Tensor"]:
        """The score that starts from tokens."""
        from embedtrain.kinds.cross_encoder.model import score_weights

        return score_weights(source)

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """In the files of the class, or of a Dense module."""
        from embedtrain.kinds.cross_encoder.model import locate_head

        return locate_head(source, shapes, stored)

    def output_error(self, encoder: "Encoder", source: "ModelSource", device: "device") -> str | None:
        """Scores have to be those of the class as a whole."""
        from embedtrain.models.own_class import own_class_error

        return own_class_error(encoder, device, "a cross-encoder")

    def reads_vocabulary(self, source: "ModelSource") -> bool:
        """A score that is the weight of a token, such as that of `yes`."""
        return bool(source.settings.tokens)

    def trained_instruction_format(self, source: "ModelSource") -> str | None:
        """That of the template, which a reranker with one was trained with."""
        from embedtrain.config.kind_settings import PLAIN_INSTRUCTION

        template = source.settings.template
        known = template is not None and template.instruction_format != PLAIN_INSTRUCTION
        return template.instruction_format if known else None

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/cross_encoder/files.py`."""
        from embedtrain.kinds.cross_encoder.files import CrossEncoderFiles

        return CrossEncoderFiles()
