"""Options of learned sparse models: how a text's words get their weights, and what keeps most of them at zero."""

from dataclasses import dataclass
from enum import Enum


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


@dataclass(kw_only=True)
class SparseConfig:
    """How a learned sparse model computes the weights of words (SPLADE)."""

    pooling: SparsePooling | None = None  # default: that of the directory, else max
    activation: SparseActivation | None = None  # default: that of the directory, else relu


@dataclass(kw_only=True)
class SparsityConfig:
    """The regularization of learned sparse models, which is added to the loss."""

    query_weight: float = 5e-5  # factor of the queries' regularizer; 0: none
    document_weight: float = 3e-5  # factor of the documents' regularizer; 0: none
    query_regularizer: SparseRegularizer = SparseRegularizer.flops
    document_regularizer: SparseRegularizer = SparseRegularizer.flops
    # Queries with at most so many active words are left out of flops (L0-masked FLOPS, Shen et al., 2025); null: none.
    query_threshold: int | None = None
    document_threshold: int | None = None  # the same for documents
    # The weights grow quadratically from 0 over these first steps: below 1 a fraction of all steps, from 1 a number.
    ramp: float = 0.33
