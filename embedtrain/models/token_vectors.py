"""Settings of late-interaction models: which tokens of a text have vectors, and how texts are compared."""

from dataclasses import dataclass

from embedtrain.config.late_interaction import QueryExpansion, TokenSimilarity

DEFAULT_DIM, DEFAULT_EXPANSION_LENGTH = 128, 32


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
