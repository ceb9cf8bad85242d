"""model.kind=sparse: a weight per word of the vocabulary (SPLADE)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.kinds import Kind
from embedtrain.config.losses import SCORE_LOSSES, TOKEN_TEMPERATURE_BOUNDS
from embedtrain.config.validation import model_option
from embedtrain.kinds.sparse.options import SparseOptions, check_query_regularizer, check_sparse, check_sparsity

if TYPE_CHECKING:
    from torch import Size, Tensor, device
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.data.cache.token_store import TokenStore
    from embedtrain.data.tokens import Layout
    from embedtrain.distributed.world import World
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.losses.types import Loss
    from embedtrain.models.encoder import Encoder
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console


class Sparse(Kind):
    """A weight per word of the vocabulary (SPLADE)."""

    name = "sparse"
    summary = "a weight per word of the vocabulary (SPLADE)"
    aliases = ("splade", "sparseencoder", "learnedsparse")
    measures_classes = True
    options = SparseOptions
    has_sparsity = True
    losses = ("infonce", *SCORE_LOSSES, "combined")
    why_no_other_loss = "is for vectors, and model.kind=sparse has weights of words"
    why_no_dimensions = "is not for model.kind=sparse"
    why_no_similarity = "has the inner product; leave it out"
    temperature = None  # that of its score
    temperature_bounds = TOKEN_TEMPERATURE_BOUNDS
    backbone_options = ("pooling",)

    def dimension(self, source: "ModelSource") -> int:
        """The words of the vocabulary."""
        return int(source.config.get_text_config().vocab_size)

    def outputs(self, source: "ModelSource") -> str:
        """Weights of words."""
        from embedtrain.kinds.sparse.model import describe_static_queries

        queries = source.settings.queries
        static = f", {describe_static_queries(queries)}" if queries is not None else ""
        return f"weights of {source.dimension:,} words, {source.settings.pooling.value} over tokens{static}"

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """How logits become weights, and how queries do."""
        words = source.settings
        return {
            "weights of words": (words.pooling.value, words.activation.value),
            "queries of the sparse model": words.query_mode.value,
        }

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Texts alone; static queries are not encoded."""
        from embedtrain.data.tokens import Layout
        from embedtrain.kinds.sparse.model import static_query_layout

        if source.settings.queries is None:
            return Layout(tokenizer, include_prompt=source.vectors.include_prompt)
        return static_query_layout(source.settings.queries, source.dimension, tokenizer)

    def check_options(self, model: SparseOptions) -> None:
        """Values and combinations."""
        check_sparse(model)

    def check_other_options(self, recipe: "Recipe") -> None:
        """Regularizers, and formats of exports."""
        check_sparsity(recipe)

    def recognise(self, directory: Path) -> str | None:
        """A sparse encoder of sentence-transformers, or a language model with the idf.json of OpenSearch."""
        from embedtrain.kinds.sparse.source import is_sparse

        return "a learned sparse model" if is_sparse(directory) else None

    def require_other(self, directory: Path, what: str, model: "ModelConfig") -> None:
        """A dense model on the backbone has a pooling that the user chooses."""
        from embedtrain.kinds.sparse.source import require_pooling

        require_pooling(directory, model)

    def read(self, directory: Path, model: SparseOptions) -> "ModelSource":
        """The settings of its files, or of a model whose backbone it gets."""
        from embedtrain.kinds.sparse.source import read

        return read(self, directory, model)

    def new(self, source: "ModelSource", model: SparseOptions) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.kinds.sparse.source import with_options

        return with_options(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The inner product of the weights of words."""
        from embedtrain.kinds.sparse.score import WordScore

        return WordScore(is_symmetric=source.settings.queries is None)

    def model_class(self, config: "PretrainedConfig") -> Any:
        """The class of a language model, masked or causal."""
        from embedtrain.models.own_class import language_model_class

        return language_model_class(config)

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The backbone of the class, and the class as its head."""
        from embedtrain.kinds.sparse.model import sparse_encoder

        return sparse_encoder(model, source.settings)

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the class, and the weights of queries."""
        from embedtrain.kinds.sparse.model import read_weights

        return read_weights(source)

    def missing_weights_hint(self, names: Sequence[str]) -> str:
        """Embedding models have no vocabulary head."""
        if any(name.startswith("backbone.") for name in names):
            return ""
        return (
            f"; {model_option('kind')}=sparse weighs words with the vocabulary head of a masked language model, "
            "which embedding "
            "models do not keep: start from one that has it, such as the model that this one was made from"
        )

    def head_weights(self, source: "ModelSource") -> dict[str, "Tensor"]:
        """The weights of queries."""
        from embedtrain.kinds.sparse.model import query_weights

        return query_weights(source)

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """In the files of the class; the weights of queries are in their own."""
        from embedtrain.models.own_class import located_in_class
        from embedtrain.models.sparse_head import QUERY_WEIGHTS

        return located_in_class(shapes, stored), {QUERY_WEIGHTS} & set(shapes)

    def output_error(self, encoder: "Encoder", source: "ModelSource", device: "device") -> str | None:
        """Weights of words have to be those of the class as a whole."""
        from embedtrain.models.own_class import own_class_error

        return own_class_error(encoder, device, "a sparse model")

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """How weights are computed: a dense model may have the same files."""
        return {"words": [source.settings.pooling.value, source.settings.activation.value]}

    def weight_files(self, source: "ModelSource") -> Mapping[str, Path]:
        """Those of static queries."""
        queries = source.settings.queries
        return {} if queries is None or queries.path is None else {"queries": queries.path}

    def reads_vocabulary(self, source: "ModelSource") -> bool:
        """A weight of each word."""
        return True

    def check_recipe(self, recipe: "Recipe", source: "ModelSource") -> None:
        """Queries may be static because of the model's files, which the recipe's own checks do not see."""
        check_query_regularizer(recipe.sparsity, source.settings.query_mode)

    def training_loss(self, loss: "Loss", recipe: "Recipe", source: "ModelSource", num_batches: int) -> "Loss":
        """The loss with the regularizers of `sparsity`, whose weights grow over the first batches."""
        from embedtrain.losses.sparsity import SparsityRegularized

        sparsity = recipe.sparsity.resolved(source.settings.query_mode)
        ramp = sparsity.ramp * (num_batches if sparsity.ramp < 1 else recipe.train.gradient_accumulation_steps)
        return SparsityRegularized(loss, sparsity, ramp)

    def weights_of_data(
        self, source: "ModelSource", stores: "Sequence[TokenStore]", world: "World", console: "Console"
    ) -> "Mapping[str, Tensor]":
        """Those of static queries, if the model has none: inverse document frequencies of the documents."""
        from embedtrain.kinds.sparse.model import inverse_document_frequencies
        from embedtrain.models.sparse_head import QUERY_WEIGHTS

        queries = source.settings.queries
        if queries is None or queries.path is not None:
            return {}
        with console.phase("computing the weights of queries from the documents"):
            return {QUERY_WEIGHTS: inverse_document_frequencies(stores, source.dimension, world)}

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/sparse/files.py`."""
        from embedtrain.kinds.sparse.files import SparseFiles

        return SparseFiles()
