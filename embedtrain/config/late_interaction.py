"""Settings of late-interaction models: which tokens of a text have vectors, and how texts are compared."""

from dataclasses import dataclass
from enum import Enum

DEFAULT_DIMENSION, DEFAULT_EXPANSION_LENGTH = 128, 32
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


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Further tokens at the end of a query."""

    strategy: QueryExpansion  # min or fixed
    length: int  # tokens of an expanded query
    token: str | None = None  # None: the mask token, or the end-of-text token of a tokenizer without one
    attend: bool = False  # whether other tokens attend to them, and they to each other


@dataclass(frozen=True, kw_only=True)
class TokenVectors:
    """The settings of a late-interaction model: those of its files, with the options of the recipe in their place."""

    query_length: int | None = None  # tokens of a query; None: the maximal length of the model
    document_length: int | None = None
    expansion: Expansion | None = None  # None: queries are not expanded
    skiplist_words: tuple[str, ...] = ()  # words whose tokens have no vector
    skiplist_queries: bool = False  # whether those of queries have none either
    similarity: TokenSimilarity = TokenSimilarity.maxsim
    is_new: bool = False  # whether the projection is not in the files and starts from the seed

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None if only the model limits those of a role."""
        expanded = 0 if self.expansion is None else self.expansion.length
        is_fixed = self.expansion is not None and self.expansion.strategy is QueryExpansion.fixed
        query_length = expanded if is_fixed else self.query_length
        if query_length is None or self.document_length is None:
            return None
        return max(query_length, expanded, self.document_length)

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """Vectors of a query and of a document, for texts of at most `max_length` tokens and without a skip list."""
        query = min(max_length, self.query_length or max_length)
        if self.expansion is not None:
            query = min(max_length, self.expansion.length)
        return query, min(max_length, self.document_length or max_length)
