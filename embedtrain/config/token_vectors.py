"""Settings of late-interaction models: which tokens of a text have vectors, and how texts are compared."""

from dataclasses import dataclass

from embedtrain.config.late_interaction import LateInteractionConfig, QueryExpansion, TokenSimilarity

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

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None if only the model limits those of a role."""
        expanded = 0 if self.expansion is None else self.expansion.length
        is_fixed = self.expansion is not None and self.expansion.strategy is QueryExpansion.fixed
        query_length = expanded if is_fixed else self.query_length
        if query_length is None or self.document_length is None:
            return None
        return max(query_length, expanded, self.document_length)

    def with_options(self, options: LateInteractionConfig, *, is_new: bool = False) -> "TokenVectors":
        """The same with the options that a recipe sets in place of those of the files."""
        return TokenVectors(
            query_length=self.query_length if options.query_length is None else options.query_length,
            document_length=self.document_length if options.document_length is None else options.document_length,
            expansion=self._expansion(options),
            skiplist_words=self.skiplist_words if options.skiplist_words is None else tuple(options.skiplist_words),
            skiplist_queries=self.skiplist_queries,
            similarity=self.similarity if options.similarity is None else options.similarity,
            is_new=is_new or self.is_new,
        )

    def _expansion(self, options: LateInteractionConfig) -> Expansion | None:
        stored = self.expansion
        strategy = options.query_expansion or (QueryExpansion.none if stored is None else stored.strategy)
        if strategy is QueryExpansion.none:
            return None
        length, token, attend = options.expansion_length, options.expansion_token, options.attend_to_expansion_tokens
        stored = stored or Expansion(strategy=strategy, length=DEFAULT_EXPANSION_LENGTH)
        return Expansion(
            strategy=strategy,
            length=stored.length if length is None else length,
            token=stored.token if token is None else token,
            attend=stored.attend if attend is None else attend,
        )

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """Vectors of a query and of a document, for texts of at most `max_length` tokens and without a skip list."""
        query = min(max_length, self.query_length or max_length)
        if self.expansion is not None:
            query = min(max_length, self.expansion.length)
        return query, min(max_length, self.document_length or max_length)
