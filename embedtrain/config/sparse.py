"""Learned sparse models: how a text's words get their weights, and what keeps most of them at zero."""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

IDF = "idf"  # the value of model.query_weights for weights that are computed from the documents
_QUERY_WEIGHT = 5e-5


class SparsePooling(str, Enum):
    """The weight of a word in a text: the largest over the text's tokens, or the sum."""

    max = "max"
    sum = "sum"


class SparseActivation(str, Enum):
    """The weight of a word at a token with the logit x.

    `relu` is log(1 + max(x, 0)), as in all SPLADE models; `log1p_relu` is log(1 + log(1 + max(x, 0))), as in models of
    OpenSearch from version 3 on. The names are those of sentence-transformers.
    """

    relu = "relu"
    log1p_relu = "log1p_relu"


class SparseRegularizer(str, Enum):
    """What keeps vectors sparse. Every mean is over the texts of the global batch.

    `flops`: the sum over words of the squared mean weight (Paria et al., 2020), which also evens out how often words
    are used. `l1`: the mean over texts of the sum of weights.
    """

    flops = "flops"
    l1 = "l1"


class SparseQueries(str, Enum):
    """How queries become weights of words.

    `encoded`: by the model, as documents. `static`: each distinct token of a query has a weight of its own, the same in
    every query, so that queries need no inference; special tokens are left out (Geng et al., 2024).
    """

    encoded = "encoded"
    static = "static"


@dataclass(frozen=True, kw_only=True)
class StaticQueries:
    """Where the weights of tokens are, and whether they are trained."""

    path: Path | None  # safetensors or JSON; None: they are computed from the training data
    trained: bool = False


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """The settings of a sparse model: those of its files, with the options of the recipe in their stead."""

    pooling: SparsePooling = SparsePooling.max
    activation: SparseActivation = SparseActivation.relu
    queries: StaticQueries | None = None  # of queries that are not encoded

    @property
    def is_new(self) -> bool:
        """False: the vocabulary head is in the files."""
        return False

    @property
    def query_mode(self) -> SparseQueries:
        """How queries become weights of words."""
        return SparseQueries.encoded if self.queries is None else SparseQueries.static


@dataclass(kw_only=True)
class SparsityConfig:
    """The regularization of learned sparse models, which is added to the loss."""

    # Factor of the queries' regularizer; 0: none. Default: 5e-5, or 0 for static queries, which are sparse already.
    query_weight: float | None = None
    document_weight: float = 3e-5  # factor of the documents' regularizer; 0: none
    query_regularizer: SparseRegularizer = SparseRegularizer.flops
    document_regularizer: SparseRegularizer = SparseRegularizer.flops
    # Queries with at most so many active words are left out of flops (L0-masked FLOPS, Shen et al., 2025); null: none.
    query_threshold: int | None = None
    document_threshold: int | None = None  # the same for documents
    # The weights grow quadratically from 0 over these first steps: below 1 a fraction of all steps, from 1 a number.
    ramp: float = 0.33

    def resolved(self, queries: SparseQueries) -> "SparsityConfig":
        """The same with the default of `query_weight`."""
        default = 0.0 if queries is SparseQueries.static else _QUERY_WEIGHT
        return self if self.query_weight is not None else replace(self, query_weight=default)
