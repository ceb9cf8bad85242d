"""Options of model.kind=sparse."""

from dataclasses import dataclass

from embedtrain.config.kind_settings import (
    IDF,
    SparseActivation,
    SparsePooling,
    SparseQueries,
    SparseRegularizer,
    SparsityConfig,
)
from embedtrain.config.options import option
from embedtrain.config.recipe import ADAPTER, LOGIT_SCORE, ModelConfig, Recipe
from embedtrain.config.validation import OptionChecks


@dataclass(kw_only=True)
class SparseOptions(ModelConfig):
    """A weight per word of the vocabulary (SPLADE)."""

    kind: str = "sparse"
    pooling: SparsePooling | None = None  # default: that of the directory, else max
    activation: SparseActivation | None = None  # default: that of the directory, else relu
    queries: SparseQueries | None = None  # default: that of the directory, else encoded
    # Weights of the tokens of static queries: a JSON file of tokens and weights, such as idf.json of OpenSearch's
    # models, or `idf`, which computes them from the documents of data.train. Default: those of the directory, else idf.
    query_weights: str | None = option(None, is_input=True)
    # Whether they are trained, with the learning rate 1e-3 unless optim.groups has one for `query_weights`; default: as
    # the directory says, else false.
    train_query_weights: bool | None = None


def check_sparse(options: SparseOptions) -> None:
    """Options of static queries have an effect, and possible values."""
    check = OptionChecks(options, "model.")
    for name in ("query_weights", "train_query_weights"):
        check.require(
            options.queries is not SparseQueries.encoded or getattr(options, name) is None,
            name,
            "is for model.queries=static; leave it out",
        )
    check.require(
        options.query_weights in (None, IDF) or str(options.query_weights).endswith(".json"),
        "query_weights",
        f"must be {IDF}, or a JSON file of tokens and their weights, such as idf.json",
    )


def check_sparsity(recipe: Recipe) -> None:
    """Regularizers, and exports that such a model does not have."""
    check = OptionChecks(recipe.sparsity, "sparsity.")
    for name in ("query_threshold", "document_threshold"):
        kind = getattr(recipe.sparsity, name.replace("threshold", "regularizer"))
        check.require(
            getattr(recipe.sparsity, name) is None or kind is SparseRegularizer.flops,
            name,
            f"has no effect on {name.replace('threshold', 'regularizer')}={kind.value}; leave it out",
        )
    assert isinstance(recipe.model, SparseOptions)
    check_query_regularizer(recipe.sparsity, recipe.model.queries or SparseQueries.encoded)
    for name in (ADAPTER, LOGIT_SCORE):
        OptionChecks(recipe.export, "export.").require(
            name not in recipe.export.formats, "formats", f"{name} is not for model.kind=sparse; leave it out"
        )
    OptionChecks(recipe.export, "export.").require(
        recipe.export.truncate_dim is None, "truncate_dim", "is not for model.kind=sparse, whose dimensions are words"
    )


def check_query_regularizer(sparsity: SparsityConfig, queries: SparseQueries) -> None:
    """Raise a ConfigError for a regularizer of static queries, whose active words are those of the text."""
    defaults, check = SparsityConfig(), OptionChecks(sparsity, "sparsity.")
    for name in ("query_weight", "query_regularizer", "query_threshold"):
        check.require(
            queries is SparseQueries.encoded or getattr(sparsity, name) in (getattr(defaults, name), 0),
            name,
            "has no effect on static queries (model.queries), whose words are those of the text; leave it out",
        )
