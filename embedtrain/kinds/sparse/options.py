"""Options of model.kind=sparse."""

from dataclasses import dataclass

from embedtrain.config.options import option
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.sparse import IDF, SparseActivation, SparsePooling, SparseQueries
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
