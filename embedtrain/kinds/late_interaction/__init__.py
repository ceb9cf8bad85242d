"""model.kind=late_interaction: a vector per token of a text (ColBERT)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.kind_settings import NO_PROJECTION
from embedtrain.config.losses import SCORE_LOSSES, TOKEN_TEMPERATURE_BOUNDS
from embedtrain.config.recipe import ADAPTER
from embedtrain.config.validation import OptionChecks, model_option
from embedtrain.errors import ConfigError
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.late_interaction.options import LateInteractionOptions, check_late_interaction

if TYPE_CHECKING:
    from torch import Size, Tensor, device
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.kind_settings import PageLibrary
    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.data.tokens import Layout
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.kinds.late_interaction.pages import PageVectors
    from embedtrain.losses.score import Score
    from embedtrain.models.encoder import Encoder, Head
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource


class LateInteraction(BackboneKind):
    """A vector per token of a text (ColBERT), or of a page (ColPali)."""

    name = "late_interaction"
    summary = "a vector per token of a text or page (ColBERT, ColPali)"
    aliases = ("colbert", "colpali", "colqwen", "multivector", "multivectorencoder")
    options = LateInteractionOptions
    new_part = "projection"
    losses = ("infonce", "xtr", *SCORE_LOSSES, "custom", "combined")
    why_no_other_loss = "compares one vector of each text, and model.kind=late_interaction has one of each token"
    why_no_similarity = "has model.similarity; write that"
    is_symmetric = False
    temperature = None
    temperature_bounds = TOKEN_TEMPERATURE_BOUNDS
    reranks = True
    has_vision = True
    has_token_vectors = True
    own_losses: ClassVar[Mapping[str, str]] = {"xtr": "embedtrain.kinds.late_interaction.xtr:XTR"}

    def outputs(self, source: "ModelSource") -> str:
        """The projection, and which library's class reads pages."""
        new, pages = "new " * source.settings.is_new, ""
        if (of_pages := _pages(source)) is not None:
            frozen = ", vision tower frozen" * of_pages.vision.frozen
            pages = f"pages as {of_pages.writer.model_class}{frozen}, "
        return (
            f"{pages}a {new}projection of tokens to {source.dimension} dimensions, {source.settings.similarity.value}"
        )

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """Everything that decides which tokens have a vector, and how pages are read."""
        if (pages := _pages(source)) is not None:
            from embedtrain.kinds.late_interaction.pages import page_identity

            return {"class": pages.writer.model_class} | page_identity(pages)
        return {"token vectors": source.settings}

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Texts with a vector for each of several tokens, or pages."""
        if _pages(source) is not None:
            from embedtrain.kinds.late_interaction.pages import PageLayout

            return PageLayout(source, tokenizer)
        from embedtrain.kinds.late_interaction.model import TokenVectorLayout

        return TokenVectorLayout(tokenizer, source.settings)

    def check_options(self, model: LateInteractionOptions) -> None:
        """Values and combinations."""
        check_late_interaction(model)

    def check_other_options(self, recipe: "Recipe") -> None:
        """The projection has the dimensions of vectors; PEFT's format has no place for it."""
        check = OptionChecks(recipe.export, "export.")
        check.require(
            recipe.export.truncate_dim is None,
            "truncate_dim",
            "is for the vectors of model.kind=dense, not late_interaction; set model.dimension",
        )
        check.require(ADAPTER not in recipe.export.formats, "formats", NO_PROJECTION)

    def recognise(self, directory: Path) -> str | None:
        """A directory of sentence-transformers 6, of PyLate, or of Stanford's ColBERT."""
        from embedtrain.formats.pylate import late_interaction_format

        return late_interaction_format(directory)

    def require_other(self, directory: Path, what: str, model: "ModelConfig") -> None:
        """No other kind starts from its projection."""
        raise ConfigError(
            f"{model_option('kind')}={model.kind}: {directory} is {what}, a late-interaction model; set "
            f"{model_option('kind')}=late_interaction"
        )

    def read(self, directory: Path, model: LateInteractionOptions) -> "ModelSource":
        """The settings of its files, or of a model whose backbone it gets."""
        from embedtrain.kinds.late_interaction.source import read

        return read(self, directory, model)

    def new(self, source: "ModelSource", model: LateInteractionOptions) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.models.vision_language import FAMILIES

        if source.config.model_type in FAMILIES:
            from embedtrain.kinds.dense.vision import files_of_config
            from embedtrain.kinds.late_interaction.pages import new_pages

            return new_pages(source, files_of_config(source.config, model), model)
        from embedtrain.kinds.late_interaction.source import with_options

        return with_options(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """MaxSim, or its mean over the tokens of the query."""
        from embedtrain.config.kind_settings import TokenSimilarity
        from embedtrain.kinds.late_interaction.score import MaxSim

        return MaxSim(mean=source.settings.similarity is TokenSimilarity.meanmaxsim)

    def head(self, source: "ModelSource") -> "Head":
        """The projection of tokens."""
        from embedtrain.kinds.late_interaction.model import TokenVectorHead
        from embedtrain.models.encoder import hidden_size
        from embedtrain.models.heads import build_heads

        dense = source.vectors.dense
        adapters = [head.adapter for head in dense if head.adapter is not None]
        keys = [key for adapter in adapters for key in (adapter.a, adapter.b)]
        return TokenVectorHead(hidden_size(source.config), build_heads(dense), keys)

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The model with the head."""
        if _pages(source) is None:
            return super().encoder(source, model)
        from embedtrain.kinds.dense.vision import vision_encoder

        return vision_encoder(source, model, self.head(source))

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the backbone; of a directory of pages under the names of its class."""
        if _pages(source) is None or source.settings.is_new:
            return super().read_weights(source)
        from embedtrain.kinds.late_interaction.pages import read_page_weights

        return read_page_weights(source)

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """The backbone of a directory of pages has names of its own as well."""
        if _pages(source) is None or source.settings.is_new:
            return super().locate_head(source, shapes, stored)
        from embedtrain.kinds.late_interaction.pages import locate_pages

        return locate_pages(source, list(shapes)), set()

    def convert(self, source: "ModelSource", library: "PageLibrary") -> "ModelSource":
        """See `convert_pages`."""
        if _pages(source) is None:
            return super().convert(source, library)
        from embedtrain.kinds.late_interaction.pages import convert_pages

        return convert_pages(source, library)

    def conversion_notes(
        self, source: "ModelSource", converted: "ModelSource", weights: "Mapping[str, Tensor]"
    ) -> list[str]:
        """See `page_conversion_notes`."""
        from embedtrain.kinds.late_interaction.page_files import page_conversion_notes

        return page_conversion_notes(source, converted, weights)

    def served_as(self, source: "ModelSource") -> str:
        """Few engines open a model over pages."""
        pages = _pages(source)
        return self.name if pages is None else f"pages_of_{pages.writer.library.value}"

    def output_error(self, encoder: "Encoder", source: "ModelSource", device: "device") -> str | None:
        """Expansion tokens without attention may depend on padding."""
        from embedtrain.kinds.late_interaction.model import expansion_mismatch

        expansion = source.settings.expansion
        if expansion is None or expansion.attend or (reason := expansion_mismatch(encoder, device)) is None:
            return None
        return (
            "model.attend_to_expansion_tokens=false: expansion tokens of "
            f"{type(encoder.backbone).__name__.removeprefix('FSDP')} cannot be without attention, because "
            f"{reason}; set it to true, or model.query_expansion=none"
        )

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """All settings: a dense model may have the same files."""
        from dataclasses import asdict

        settings = source.settings
        if (pages := _pages(source)) is not None:
            from embedtrain.data.images.files import image_identity
            from embedtrain.kinds.late_interaction.pages import page_identity

            return {"similarity": settings.similarity.value, "pages": page_identity(pages), "images": image_identity()}
        options = {name: str(value) for name, value in asdict(settings).items()}
        return {"similarity": settings.similarity.value, "token_vectors": options}

    def max_document_length(self, source: "ModelSource") -> int | None:
        """See `Kind.max_document_length`."""
        length: int | None = source.settings.document_length
        return length

    def vectors_per_text(self, source: "ModelSource", max_length: int) -> tuple[int, int]:
        """Those of a query, with the tokens of its expansion, and of a document."""
        vectors: tuple[int, int] = source.settings.vectors_per_text(max_length)
        return vectors

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/late_interaction/files.py`."""
        from embedtrain.kinds.late_interaction.files import LateInteractionFiles

        return LateInteractionFiles()


def _pages(source: "ModelSource") -> "PageVectors | None":
    from embedtrain.kinds.late_interaction.pages import PageVectors

    settings = source.settings
    return settings if isinstance(settings, PageVectors) else None
