"""Texts as the input of a sparse model whose queries are weights of their tokens, without inference.

The ids of a query are marked: the complement `~id` of each. Token caches hold them without marks.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import FastTokenizer, TextTokenizer
from embedtrain.data.types import BatchTokens, Chunk, QueryWords, TextRole

# Tokens of a query have fewer bits.
_TEXT = 1 << 32


class StaticQueryTokenizer(TextTokenizer):
    """A tokenizer of documents, which are encoded, and of queries, which have no special tokens and are not."""

    roles_differ = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, packed: bool = False) -> None:
        super().__init__(tokenizer, max_length, packed=packed)
        self._queries = FastTokenizer(tokenizer, special_tokens=False)

    def ids(
        self,
        texts: Sequence[str],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> list[list[int]]:
        """Token ids of each text; those of queries are marked."""
        ids = self.stored_ids(texts, self.limit(role, max_length), "", role)
        return ids if role is TextRole.document else [[~token for token in text] for text in ids]

    def stored_ids(
        self, texts: Sequence[str], limit: int, prompts: str, role: TextRole = TextRole.document
    ) -> list[list[int]]:
        """Token ids of each text without marks. A query without tokens has `nothing`, which has no weight."""
        if role is TextRole.document:
            return super().ids(texts, limit)
        return [ids or [self.nothing] for ids in self._queries.ids(list(texts), limit)] if texts else []

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
        """Texts as one chunk, of which documents are encoded; at least one text is, because all ranks compute."""
        texts = np.repeat(np.arange(len(lengths)), lengths)
        is_query = flat[np.cumsum(lengths) - lengths] < 0
        if not is_query.any():
            return super().make_chunk(flat, lengths, rows)
        is_document, of_query = ~is_query, is_query[texts]
        encoded = flat[~of_query], lengths[is_document]
        if not is_document.any():
            dummy = np.array(super().ids(["a"])[0], dtype=np.int32)
            encoded = dummy, np.array([len(dummy)])
        chunk = super().make_chunk(*encoded, rows)
        order = np.empty(len(lengths), dtype=np.int64)
        order[is_document] = np.arange(is_document.sum())
        order[is_query] = len(encoded[1]) + np.arange(is_query.sum())
        words = ~flat[of_query].astype(np.int64)
        queries = (np.cumsum(is_query) - 1)[texts[of_query]]
        is_word = (words != self.nothing) | (lengths[texts[of_query]] > 1)
        # Each token counts once.
        keys = np.unique(queries[is_word] * _TEXT + words[is_word])
        query_words = QueryWords(
            words=torch.from_numpy(keys % _TEXT),
            queries=torch.from_numpy(keys // _TEXT),
            count=int(is_query.sum()),
            order=torch.from_numpy(order),
        )
        return chunk.replaced(query_words=query_words)

    def with_packing(self, packed: bool) -> "StaticQueryTokenizer":
        """The same with or without packing."""
        return StaticQueryTokenizer(self.tokenizer, self.max_length, packed=packed)

    def encoder_inputs(self, tokens: BatchTokens) -> "StaticQueryInputs":
        """The queries and documents of a batch."""
        return StaticQueryInputs(tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the tokens of a text, except lengths."""
        return self._fast.fingerprint(self.nothing, "queries without special tokens")


class StaticQueryInputs:
    """The texts of a batch as `EncoderInputs`, with marked queries, for which the encoder computes nothing."""

    def __init__(self, tokens: BatchTokens) -> None:
        rows = np.arange(len(tokens.num_documents))
        self._tokens, self.num_queries, self.lengths = tokens, len(rows), tokens.lengths
        self.rows = np.concatenate([rows, np.repeat(rows, tokens.num_documents)])
        self.sizes: tuple[NDArray[np.int64] | None, ...] = (None,)
        self.costs: NDArray[np.int64] = np.where(np.arange(len(self.rows)) < len(rows), 1, tokens.lengths)

    def ids(self, inputs: NDArray[np.int64]) -> NDArray[np.int32]:
        """The marked ids of these texts, one after the other."""
        ids = self._tokens.ids(inputs)
        of_query = np.repeat(inputs < self.num_queries, self.lengths[inputs])
        return np.where(of_query, ~ids, ids)
