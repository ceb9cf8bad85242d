"""model.kind=dense: a vector per text."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.recipe import ADAPTER, Pooling
from embedtrain.config.validation import OptionChecks, written
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.dense.options import DenseOptions, check_chunked_losses, check_dense

if TYPE_CHECKING:
    from torch import Size, Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.recipe import Recipe
    from embedtrain.data.tokens import Layout
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.encoder import Encoder, Head
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource


class Dense(BackboneKind):
    """A vector per text."""

    name = "dense"
    summary = "a vector per text"
    aliases: ClassVar[tuple[str, ...]] = ("biencoder", "embedder", "embedding", "sentencetransformer")
    has_one_vector = True
    measures_classes = True
    options: ClassVar[type[Any]] = DenseOptions
    new_part = "heads"
    command_options: ClassVar[tuple[str, ...]] = ("pooling", "normalize", "similarity")
    views = ("chunks",)
    has_tables = True
    has_vision = True

    def outputs(self, source: "ModelSource") -> str:
        """Pooling, heads and normalisation."""
        from embedtrain.config.losses import VectorSimilarity
        from embedtrain.formats.static_embedding import is_static

        vectors, pictures = source.vectors, ""
        if _reads_pictures(source):
            pictures = f"texts and pictures{', vision tower frozen' * source.settings.frozen}, "
        sizes = "".join(f" -> {dense.num_out}" for dense in vectors.dense)
        heads = f", {'new ' * source.has_new_head}heads {vectors.dense[0].num_in}{sizes}" if vectors.dense else ""
        pooling = "mean of the tokens' rows" if is_static(source.config) else f"{written(vectors.pooling)} pooling"
        is_cosine = vectors.similarity is VectorSimilarity.cosine
        similarity = "" if is_cosine else f", compared by {vectors.similarity.value}"
        if vectors.late_chunking:
            pooling += " of each chunk"
        return f"{pictures}{pooling}{heads}{', normalised' if vectors.normalize else ''}{similarity}"

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """How pictures are read, and what stands around items."""
        if not _reads_pictures(source):
            return super().compared_settings(source)
        vision = source.settings
        return {"image processing": vision.processing.digest, "template of items": str(vision.template)}

    def served_as(self, source: "ModelSource") -> str:
        """A vision-language model is one of few that engines open as such."""
        return "vision_language" if _reads_pictures(source) else self.name

    def notes(self, source: "ModelSource") -> list[str]:
        """What an export cannot be compared with."""
        if not _reads_pictures(source):
            return []
        from embedtrain.kinds.dense.vision import missing_packages

        missing = " and ".join(missing_packages(source))
        note = f"sentence-transformers opens such a model only with {missing}: exports are not compared with it"
        return [note] if missing else []

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """How pictures are read, and by which library; whether documents are in chunks."""
        from embedtrain.data.images.files import image_identity

        if source.vectors.late_chunking:
            return {"late_chunking": True}
        if not _reads_pictures(source):
            return {}
        vision = source.settings
        return {"vision": [vision.processing.digest, str(vision.template), image_identity()]}

    def ends_texts(self, source: "ModelSource") -> bool:
        """A chat template ends them."""
        return not _reads_pictures(source)

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Texts alone, without special tokens in a static table; items with pictures in a vision-language model."""
        from embedtrain.data.tokens import Layout
        from embedtrain.formats.static_embedding import is_static
        from embedtrain.kinds.dense.model import StaticLayout

        if _reads_pictures(source):
            from embedtrain.kinds.dense.vision import vision_layout

            return vision_layout(source, tokenizer)
        if is_static(source.config):
            return StaticLayout(tokenizer)
        vectors = source.vectors
        if vectors.late_chunking:
            from embedtrain.kinds.dense.model import ChunkedLayout

            return ChunkedLayout(tokenizer, include_prompt=vectors.include_prompt, negatives=vectors.chunk_negatives)
        return Layout(tokenizer, include_prompt=vectors.include_prompt)

    def check_options(self, model: DenseOptions) -> None:
        """Values and combinations."""
        check_dense(model)

    def with_any_pooling(self, model: DenseOptions) -> DenseOptions:
        """The mean, of a model whose files may define no pooling."""
        return replace(model, pooling=model.pooling or Pooling.mean.value)

    def check_other_options(self, recipe: "Recipe") -> None:
        """PEFT's format has no place for new heads."""
        for index, head in enumerate(recipe.model.heads if isinstance(recipe.model, DenseOptions) else ()):
            OptionChecks(head, f"model.heads[{index}].").require(
                ADAPTER not in recipe.export.formats,
                "out",
                "PEFT's adapter format cannot hold the heads behind the pooling; leave adapter out of export.formats "
                "(the merged model has them)",
            )

    def check_recipe(self, recipe: "Recipe", source: "ModelSource") -> None:
        """A directory may say that documents are in chunks, which the recipe's own checks do not see."""
        if source.vectors.late_chunking:
            check_chunked_losses(recipe)

    def recognise(self, directory: Path) -> str | None:
        """Any directory that is not of another kind."""
        return "an embedding model"

    def read(self, directory: Path, model: DenseOptions) -> "ModelSource":
        """The settings of its files, or of a model whose backbone it gets."""
        from embedtrain.kinds.dense.source import read

        return read(self, directory, model)

    def new(self, source: "ModelSource", model: DenseOptions) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.kinds.dense.source import require_pooling_option, with_options
        from embedtrain.kinds.dense.vision import new_vision

        require_pooling_option(model, "a model made from model.config")
        if (vision := new_vision(source.config, model)) is not None:
            source = replace(source, settings=vision)
        return with_options(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The similarity of two vectors, or of a query and the best chunk of a document."""
        from embedtrain.inference.vectors import vector_score

        if source.vectors.late_chunking:
            from embedtrain.kinds.dense.model import BestChunk

            return BestChunk(source.vectors.similarity)
        return vector_score(source.vectors.similarity)

    def head(self, source: "ModelSource") -> "Head":
        """Pooling, dense modules and normalisation."""
        from embedtrain.models.encoder import PooledHead, hidden_size
        from embedtrain.models.heads import build_heads

        size, vectors = hidden_size(source.config), source.vectors
        return PooledHead(size, vectors.pooling, normalize=vectors.normalize, dense=build_heads(vectors.dense))

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The model with the head. A table of static embeddings is an FSDP group of its own, in float32."""
        from embedtrain.formats.static_embedding import is_static
        from embedtrain.models.encoder import Encoder

        if _reads_pictures(source):
            from embedtrain.kinds.dense.vision import vision_encoder

            return vision_encoder(source, model, self.head(source))
        encoder = super().encoder(source, model)
        if not is_static(source.config):
            return encoder
        # In bf16, the gradients of a frequent token's thousands of occurrences in a chunk would be lost in rounding.
        encoder.output.in_float32 = model.get_input_embeddings()
        return Encoder(encoder.backbone, encoder.output, has_layers=False)

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the backbone, or the table."""
        from embedtrain.formats.static_embedding import is_static, read_table

        if is_static(source.config):
            assert source.directory is not None
            return read_table(source.directory), set()
        return super().read_weights(source)

    def head_weights(self, source: "ModelSource") -> dict[str, "Tensor"]:
        """The table of Model2Vec, which has another name in its file."""
        from embedtrain.formats.static_embedding import is_static, read_table

        if not is_static(source.config) or source.directory is None:
            return {}
        return read_table(source.directory, if_stored_otherwise=True)

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """The table of Model2Vec is computed."""
        from embedtrain.formats.static_embedding import STORED_TABLE, TABLE, is_static

        return {}, {TABLE} if is_static(source.config) and STORED_TABLE not in stored else set()

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/dense/files.py`."""
        from embedtrain.kinds.dense.files import DenseFiles

        return DenseFiles()


def _reads_pictures(source: "ModelSource") -> bool:
    from embedtrain.kinds.dense.vision import reads_pictures

    return reads_pictures(source)
