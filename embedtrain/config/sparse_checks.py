"""Checks of the options of learned sparse models: regularizers, and queries without inference."""

from dataclasses import fields
from typing import Any

from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ADAPTER, LOGIT_SCORE, Recipe
from embedtrain.config.sparse import SparseQueries, SparseRegularizer, SparsityConfig
from embedtrain.config.validation import OptionChecks


def check_sparsity(recipe: Recipe) -> None:
    """Regularizers of a model that has weights of words, and what such a model cannot do."""
    check = OptionChecks(recipe.sparsity, "sparsity.")
    if not load_kind(recipe.model.kind).has_sparsity:
        defaults = SparsityConfig()
        for name in (field.name for field in fields(defaults)):
            check.require(
                getattr(recipe.sparsity, name) == getattr(defaults, name),
                name,
                f"is for model.kind=sparse, not {recipe.model.kind}; leave it out",
            )
        return
    for name in ("query_weight", "document_weight"):
        check.at_least(0, name, "0 leaves the regularizer out")
    for name in ("query_threshold", "document_threshold"):
        check.at_least(0, name, "null regularizes all texts")
        kind = getattr(recipe.sparsity, name.replace("threshold", "regularizer"))
        check.require(
            getattr(recipe.sparsity, name) is None or kind is SparseRegularizer.flops,
            name,
            f"has no effect on {name.replace('threshold', 'regularizer')}={kind.value}; leave it out",
        )
    check.at_least(0, "ramp", "0 applies the full weights from the first step on")
    model: Any = recipe.model
    check_query_regularizer(recipe.sparsity, model.queries or SparseQueries.encoded)
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
