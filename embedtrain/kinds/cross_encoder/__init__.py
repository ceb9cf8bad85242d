"""model.kind=cross_encoder: a score per pair of query and document (a reranker)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.kinds import Kind
from embedtrain.config.losses import SCORE_LOSSES
from embedtrain.config.recipe import ADAPTER
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
    has_vision = True

    def dimension(self, source: "ModelSource") -> int:
        """That of a score."""
        return 1

    def outputs(self, source: "ModelSource") -> str:
        """The head, and the token that it reads."""
        from embedtrain.models.pooling import describe_pooling

        if source.settings.vision is not None:
            frozen = ", vision tower frozen" * source.settings.vision.frozen
            return f"texts and pictures{frozen}, the score of a token on the {describe_pooling(source.vectors.pooling)}"
        kind = "a new score head" if source.settings.is_new else "a score head"
        head = "the score of a token" if source.settings.tokens else kind
        return f"{head} on the {describe_pooling(source.vectors.pooling)}"

    def notes(self, source: "ModelSource") -> list[str]:
        """About the template of pairs, the directory that a new head is added to, and what an export needs."""
        notes = [source.settings.note] if source.settings.note else []
        missing = " and ".join(self.files.missing_packages(source))
        note = f"sentence-transformers opens such a model only with {missing}: exports are not compared with it"
        return [*notes, note] if missing else notes

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """What follows the score, and what surrounds the texts of a pair."""
        settings = source.settings
        pictures = {} if settings.vision is None else {"image processing": settings.vision.processing.digest}
        return {"activation of scores": settings.activation, "template of pairs": settings.template} | pictures

    def served_as(self, source: "ModelSource") -> str:
        """A vision-language model is one of few that engines open as such."""
        return self.name if source.settings.vision is None else "vision_reranker"

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """How pictures are read, and by which library."""
        from embedtrain.data.images.files import image_identity

        vision = source.settings.vision
        if vision is None:
            return {}
        return {"vision": [vision.processing.digest, vision.template.picture, image_identity()]}

    def ends_texts(self, source: "ModelSource") -> bool:
        """A template may already end pairs."""
        template = source.settings.template
        return template is None or bool(template.special_tokens)

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Pairs of a query and a document, which a vision-language model reads with their pictures."""
        from embedtrain.kinds.cross_encoder.model import PairLayout, read_pair_format
        from embedtrain.kinds.cross_encoder.vision import vision_pairs

        pair_format = read_pair_format(source, tokenizer)
        if source.settings.vision is not None:
            return vision_pairs(source, tokenizer, pair_format)
        return PairLayout(tokenizer, pair_format)

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

    def check_recipe(self, recipe: "Recipe", source: "ModelSource") -> None:
        """The score of tokens is no part of what PEFT stores beside an adapter."""
        if source.settings.vision is not None and ADAPTER in recipe.export.formats:
            raise ConfigError(
                "export.formats: PEFT's adapter format cannot hold the score of a vision-language model, which is "
                f"trained beside adapters; leave {ADAPTER} out (the merged model has both)"
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
        """The class for sequence classification; of a vision-language model, its backbone."""
        from transformers import AutoModel, AutoModelForSequenceClassification

        from embedtrain.models.vision_language import FAMILIES

        if config.model_type in FAMILIES:
            return AutoModel
        return AutoModelForSequenceClassification

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The backbone of the class, and the class as its head; of a vision-language model, a linear layer."""
        if source.settings.vision is not None:
            from embedtrain.kinds.cross_encoder.vision import TokenScoreHead
            from embedtrain.kinds.dense.vision import vision_encoder
            from embedtrain.models.encoder import hidden_size

            return vision_encoder(source, model, TokenScoreHead(hidden_size(source.config)))
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
        """Scores have to be those of the class as a whole, if there is one."""
        from embedtrain.models.own_class import own_class_error

        if source.settings.vision is not None:
            return None
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
