"""model.kind=dense: a vector per text."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.recipe import ADAPTER, Pooling
from embedtrain.config.validation import OptionChecks, written
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.dense.options import DenseOptions, check_dense

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
    has_tables = True

    def outputs(self, source: "ModelSource") -> str:
        """Pooling, heads and normalisation."""
        from embedtrain.config.losses import VectorSimilarity
        from embedtrain.formats.static_embedding import is_static

        vectors = source.vectors
        sizes = "".join(f" -> {dense.num_out}" for dense in vectors.dense)
        heads = f", {'new ' * source.has_new_head}heads {vectors.dense[0].num_in}{sizes}" if vectors.dense else ""
        pooling = "mean of the tokens' rows" if is_static(source.config) else f"{written(vectors.pooling)} pooling"
        is_cosine = vectors.similarity is VectorSimilarity.cosine
        similarity = "" if is_cosine else f", compared by {vectors.similarity.value}"
        return f"{pooling}{heads}{', normalised' if vectors.normalize else ''}{similarity}"

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Texts alone; those of a static table have no special tokens."""
        from embedtrain.data.tokens import Layout
        from embedtrain.formats.static_embedding import is_static
        from embedtrain.kinds.dense.model import StaticLayout

        if is_static(source.config):
            return StaticLayout(tokenizer)
        return Layout(tokenizer, include_prompt=source.vectors.include_prompt)

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

        require_pooling_option(model, "a model made from model.config")
        return with_options(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The similarity of two vectors."""
        from embedtrain.inference.vectors import vector_score

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
