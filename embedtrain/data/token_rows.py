"""Texts as the input of a late-interaction model: which of their tokens have a vector, and the expansion of queries.

Ids are marked: the complement `~id` is a token without a vector, and EXPANDED is added to an expansion token that no
token attends to. Token caches hold ids without marks and expansion tokens, in 16 bits each if these suffice.

n: texts; T: tokens of all of them, with expansion tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.config.late_interaction import QueryExpansion, TokenSimilarity
from embedtrain.config.token_vectors import Expansion, TokenVectors
from embedtrain.data.tokens import UNLIMITED, TextTokenizer
from embedtrain.data.types import BatchTokens, Chunk, PackedKeys, TextRole
from embedtrain.errors import ConfigError

EXPANDED = 1 << 30


class TokenRowTokenizer(TextTokenizer):
    """A tokenizer of a late-interaction model, whose texts have a vector for each of several tokens.

    A text keeps the vector of its first token, whatever the skip list: a maximum over no token is undefined.

    Args:
        max_length: tokens of a text of any role.
        token_vectors: settings of the model.

    Raises:
        ConfigError: the expansion token is not one token, or there is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        token_vectors: TokenVectors,
        *,
        packed: bool = False,
    ) -> None:
        super().__init__(tokenizer, max_length, packed=packed)
        self.token_vectors = token_vectors
        expansion = token_vectors.expansion
        self.expansion_id = None if expansion is None else _expansion_id(tokenizer, expansion)
        if expansion is not None and expansion.length > max_length:
            raise ConfigError(
                f"model.late_interaction.expansion_length={expansion.length}: is more than the model's {max_length} "
                "tokens; lower it, or raise model.max_length"
            )

    def limit(self, role: TextRole, max_length: int | None = None) -> int:
        """The maximal number of tokens of a text before its expansion, where the caller allows `max_length`."""
        settings, expansion = self.token_vectors, self.token_vectors.expansion
        limits = [self.max_length] if max_length is None else [self.max_length, max_length]
        if role is TextRole.document:
            limits += [] if settings.document_length is None else [settings.document_length]
        elif expansion is not None and expansion.strategy is QueryExpansion.fixed:
            limits.append(expansion.length)
        elif settings.query_length is not None:
            limits.append(settings.query_length)
        return min(limits)

    def ids(
        self,
        texts: Sequence[str],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> list[list[int]]:
        """The marked ids of each text, with expansion tokens; `num_rows` of them have a vector.

        The special token at the end of a text survives truncation, and expansion tokens follow it. Prompts are part of
        the texts, and their tokens have vectors.
        """
        texts_ids = self.stored_ids(texts, self.limit(role, max_length), "")
        lengths = np.fromiter(map(len, texts_ids), dtype=np.int64, count=len(texts_ids))
        flat = np.concatenate([np.empty(0, dtype=np.int32), *(np.asarray(ids, dtype=np.int32) for ids in texts_ids)])
        are_queries = np.full(len(texts_ids), role is TextRole.query)
        marked = self.mark(flat, lengths, are_queries)
        ends = np.cumsum(self.expanded_lengths(lengths, are_queries)).tolist()
        return [marked[start:end].tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def stored_ids(
        self, texts: Sequence[str], limit: int, prompts: str, role: TextRole = TextRole.document
    ) -> list[list[int]]:
        """The ids of each text without marks and expansion tokens."""
        return super().ids(texts, limit)

    @staticmethod
    def num_rows(ids: Sequence[int]) -> int:
        """The number of vectors of a text with these marked ids."""
        return sum(token >= 0 for token in ids)

    def expanded_lengths(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Tokens of each text with expansion tokens, from those without: int64 [n]."""
        expansion = self.token_vectors.expansion
        return lengths if expansion is None else np.where(are_queries, np.maximum(lengths, expansion.length), lengths)

    def has_skipped(self, role: TextRole) -> bool:
        """Whether some tokens of texts of this role may have no vector."""
        return len(self.skipped) > 0 and (role is TextRole.document or self.token_vectors.skiplist_queries)

    def mark(
        self, flat: NDArray[np.int32], lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """The marked ids of texts, int32 [T], from their concatenated ids without marks."""
        total = self.expanded_lengths(lengths, are_queries)
        starts = np.cumsum(total) - total
        is_text = np.arange(int(total.sum())) - np.repeat(starts, total) < np.repeat(lengths, total)
        expansion = self.token_vectors.expansion
        marked = np.zeros(len(is_text), dtype=np.int32)
        if expansion is not None and self.expansion_id is not None:
            marked[:] = self.expansion_id if expansion.attend else self.expansion_id | EXPANDED
        marked[is_text] = flat
        if not len(self.skipped):
            return marked
        is_skipped = self._is_skipped[marked & ~EXPANDED]
        if not self.token_vectors.skiplist_queries:
            is_skipped &= ~np.repeat(are_queries, total)
        is_skipped[starts] = False
        return np.where(is_skipped, ~marked, marked)

    @cached_property
    def skipped(self) -> frozenset[int]:
        """The tokens of the skip list. Words that are not one token are left out, as sentence-transformers does."""
        tokens = self._skiplist_tokens
        return frozenset(token for token in tokens.values() if token is not None)

    @property
    def unknown_words(self) -> list[str]:
        """Words of the skip list that are not one token, and have no effect."""
        return [word for word, token in self._skiplist_tokens.items() if token is None]

    @property
    def notes(self) -> list[str]:
        """A line about unknown words of the skip list."""
        unknown = self.unknown_words
        words = f"skip list: {len(unknown)} of {len(self._skiplist_tokens)} words are no tokens and have no effect: "
        return [words + " ".join(unknown)] if unknown else []

    @cached_property
    def _skiplist_tokens(self) -> dict[str, int | None]:
        return {word: _token_id(self.tokenizer, word) for word in self.token_vectors.skiplist_words}

    @cached_property
    def _is_skipped(self) -> NDArray[np.bool_]:
        """Bool [V]."""
        return np.isin(np.arange(self.max_token_id + 1), list(self.skipped))

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
        """Texts as one chunk, from their concatenated marked ids."""
        has_vector = flat >= 0
        ids = np.where(has_vector, flat, ~flat)
        attended = (ids & EXPANDED) == 0
        chunk = super().make_chunk(ids & ~EXPANDED, lengths, rows)
        texts = np.repeat(np.arange(len(lengths)), lengths)
        sizes = np.bincount(texts[has_vector], minlength=len(lengths))
        if chunk.packing is not None:
            packing = chunk.packing
            packing.keys = PackedKeys.of(lengths, np.bincount(texts[attended], minlength=len(lengths)))
            return chunk.replaced(token_rows=torch.from_numpy(np.flatnonzero(has_vector)), sizes=sizes)
        width = chunk.ids.shape[1]
        flat_indices = np.arange(len(flat)) + np.repeat(np.arange(len(lengths)) * width - np.cumsum(lengths), lengths)
        flat_indices += np.repeat(lengths, lengths)
        if not attended.all():
            chunk.mask.view(-1)[torch.from_numpy(flat_indices[~attended])] = 0
            chunk = chunk.replaced(has_padding=True)
        return chunk.replaced(token_rows=torch.from_numpy(flat_indices[has_vector]), sizes=sizes)

    @staticmethod
    def unmarked(ids: Sequence[int]) -> list[int]:
        """The tokens of `ids` without their marks."""
        return [(~token if token < 0 else token) & ~EXPANDED for token in ids]

    def untruncated(self) -> TextTokenizer:
        """One of texts of any length, without expansion."""
        return TextTokenizer(self.tokenizer, UNLIMITED)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the encoder gets."""
        expansion = self.token_vectors.expansion
        return max(*(self.limit(role) for role in TextRole), 0 if expansion is None else expansion.length)

    @property
    def vectors_per_text(self) -> tuple[int, int]:
        """The most vectors of a query, and of a document."""
        return self.token_vectors.vectors_per_text(self.max_length)

    def with_packing(self, packed: bool) -> "TokenRowTokenizer":
        """The same with or without packing."""
        return TokenRowTokenizer(self.tokenizer, self.max_length, self.token_vectors, packed=packed)

    def encoder_inputs(self, tokens: BatchTokens) -> "TokenRowInputs":
        """The queries and documents of a batch, with the number of vectors of each."""
        return TokenRowInputs(tokens, self)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the marked ids of a text, except the caller's lengths."""
        settings = replace(self.token_vectors, is_new=False, similarity=TokenSimilarity.maxsim)
        return self._fast.fingerprint(self.nothing, self.expansion_id, asdict(settings))


class TokenRowInputs:
    """The texts of a global batch as `EncoderInputs`, expanded, with several rows each."""

    def __init__(self, tokens: BatchTokens, tokenizer: TokenRowTokenizer) -> None:
        rows = np.arange(len(tokens.num_documents))
        self._tokens, self._tokenizer = tokens, tokenizer
        self.num_queries = len(rows)
        self.rows = np.concatenate([rows, np.repeat(rows, tokens.num_documents)])
        self._are_queries = np.arange(len(self.rows)) < self.num_queries
        self.lengths: NDArray[np.int64] = tokenizer.expanded_lengths(tokens.lengths, self._are_queries)
        self.costs = self.lengths
        self.sizes: tuple[NDArray[np.int64] | None, ...] = (self._num_vectors(),)

    def ids(self, inputs: NDArray[np.int64]) -> NDArray[np.int32]:
        """The marked ids of these texts, one after the other."""
        tokens = self._tokens
        return self._tokenizer.mark(tokens.ids(inputs), tokens.lengths[inputs], self._are_queries[inputs])

    def _num_vectors(self) -> NDArray[np.int64]:
        """Of each text of the batch. Ranks exchange rows without asking each other how many these are."""
        sizes = self.lengths.copy()
        for role, texts in (
            (TextRole.query, np.arange(self.num_queries)),
            (TextRole.document, np.arange(self.num_queries, len(self.rows))),
        ):
            if self._tokenizer.has_skipped(role) and len(texts):
                has_vector = (self.ids(texts) >= 0).astype(np.int64)
                lengths = self.lengths[texts]
                sizes[texts] = np.add.reduceat(has_vector, np.cumsum(lengths) - lengths)
        return sizes


def _expansion_id(tokenizer: PreTrainedTokenizerBase, expansion: Expansion) -> int:
    token = expansion.token
    if token is None:
        default = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        if default is None:
            raise ConfigError(
                "model.late_interaction.expansion_token=null: the tokenizer has neither a mask nor an end-of-text "
                "token; write one of its tokens"
            )
        return int(default)
    number = _token_id(tokenizer, token)
    if number is None:
        raise ConfigError(
            f"model.late_interaction.expansion_token={token}: is not one token of the tokenizer; write one of them, "
            f"such as {tokenizer.mask_token or tokenizer.eos_token}"
        )
    return number


def _token_id(tokenizer: PreTrainedTokenizerBase, word: str) -> int | None:
    """The id of a token; None if the vocabulary does not have it."""
    number = tokenizer.convert_tokens_to_ids(word)
    if number is None or (number == tokenizer.unk_token_id and word != tokenizer.unk_token):
        return None
    return int(number)
