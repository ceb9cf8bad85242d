"""Options of late-interaction models: the vectors of tokens, and how two texts are compared."""

from dataclasses import dataclass
from enum import Enum

# Of the export format `adapter`.
NO_PROJECTION = (
    "PEFT's adapter format cannot hold the projection of model.kind=late_interaction, which is trained beside "
    "adapters; leave adapter out (the merged model has both)"
)


class QueryExpansion(str, Enum):
    """Which queries get further tokens, whose vectors are compared with documents as well (Khattab and Zaharia, 2020).

    `fixed` extends or cuts every query to `expansion_length` tokens, `min` extends shorter queries and keeps longer
    ones.
    """

    none = "none"
    min = "min"
    fixed = "fixed"


class TokenSimilarity(str, Enum):
    """The score of two texts: the sum over the tokens of the query of their largest similarity, or the mean."""

    maxsim = "maxsim"
    meanmaxsim = "meanmaxsim"


@dataclass(kw_only=True)
class LateInteractionConfig:
    """How a late-interaction model computes vectors of tokens and compares them (ColBERT)."""

    dim: int | None = None  # dimensions of a token's vector; default: that of the directory, else 128
    query_length: int | None = None  # tokens of a query; default: that of the directory, else model.max_length
    document_length: int | None = None  # tokens of a document; default: that of the directory, else model.max_length
    query_expansion: QueryExpansion | None = None  # default: that of the directory, else none
    expansion_length: int | None = None  # tokens of an expanded query; default: that of the directory, else 32
    # The token that queries are expanded with; default: that of the directory, else the mask token, or the end-of-text
    # token of a tokenizer without one.
    expansion_token: str | None = None
    attend_to_expansion_tokens: bool | None = None  # default: that of the directory, else false
    # Words of documents whose vectors are left out, each one token, such as punctuation; default: that of the
    # directory, else none.
    skiplist_words: list[str] | None = None
    similarity: TokenSimilarity | None = None  # default: that of the directory, else maxsim
