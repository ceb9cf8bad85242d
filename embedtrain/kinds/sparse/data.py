"""Texts as the input of a sparse model whose queries are weights of their tokens, without inference."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import UNLIMITED, FastTokenizer, Layout
from embedtrain.data.types import IS_QUERY, Chunk, QueryWords, TextRole, Tokens
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.static_queries import StaticQueries
from embedtrain.models.tokenizer_files import read_tokenizer

# Tokens of a query have fewer bits.
_TEXT = 1 << 32


_PROBES = ("What is the capital of France?", "  UPPER case,\ttwo\n\nlines, 1234 + 5678", "naïve café, 東京タワー")


class StaticQueryLayout(Layout):
    """Documents, which are encoded, and queries, which have no special tokens and are not."""

    roles_differ: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._queries = FastTokenizer(tokenizer, special_tokens=False)

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts. A query without tokens has `nothing`, which has no weight."""
        if role is TextRole.document:
            return super().tokenize(texts, limit)
        ids = self._queries.ids(list(texts), limit) if texts else []
        return Tokens.of([text or [self.nothing] for text in ids])

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """The same tokens, with those of queries flagged IS_QUERY."""
        flags = np.where(np.repeat(are_queries, tokens.lengths), IS_QUERY, np.uint8(0))
        return Tokens(tokens.ids, flags, tokens.lengths)

    def costs(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The encoder computes nothing for a query."""
        return np.where(are_queries, 1, lengths)

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Texts as one chunk, of which documents are encoded; at least one text is, because all ranks compute."""
        is_query = tokens.flags[np.cumsum(tokens.lengths) - tokens.lengths] & IS_QUERY != 0
        if not is_query.any():
            return super().chunk(tokens, rows, packed=packed)
        documents, queries = (tokens.take(np.flatnonzero(selected)) for selected in (~is_query, is_query))
        encoded = documents if len(documents) else super().tokenize(["a"], UNLIMITED)
        chunk = super().chunk(encoded, rows, packed=packed)
        order = np.empty(len(tokens), dtype=np.int64)
        order[~is_query] = np.arange(len(documents))
        order[is_query] = len(encoded) + np.arange(len(queries))
        words, owners = queries.ids.astype(np.int64), np.repeat(np.arange(len(queries)), queries.lengths)
        is_word = (words != self.nothing) | (queries.lengths[owners] > 1)
        # Each token counts once.
        keys = np.unique(owners[is_word] * _TEXT + words[is_word])
        chunk.query_words = QueryWords(
            words=torch.from_numpy(keys % _TEXT),
            queries=torch.from_numpy(keys // _TEXT),
            count=len(queries),
            order=torch.from_numpy(order),
        )
        return chunk

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (self.nothing, "queries without special tokens")


def static_query_layout(
    queries: StaticQueries, num_words: int, tokenizer: PreTrainedTokenizerBase
) -> StaticQueryLayout:
    """A ConfigError if sentence-transformers could not open the model, a ModelError if queries have other tokens."""
    if len(tokenizer.get_vocab()) != num_words:
        raise ConfigError(
            f"model.queries=static: the tokenizer has {len(tokenizer.get_vocab()):,} tokens and the model "
            f"weights of {num_words:,} words, which sentence-transformers cannot compare; write encoded"
        )
    layout = StaticQueryLayout(tokenizer)
    if queries.path is not None and (queries.path.parent / "tokenizer_config.json").is_file():
        own = read_tokenizer(queries.path.parent, trust_remote_code=False)
        expected, stored = (
            of.tokenize(_PROBES, UNLIMITED, role=TextRole.query).lists() for of in (layout, StaticQueryLayout(own))
        )
        if own.get_vocab() != tokenizer.get_vocab() or stored != expected:
            raise ModelError(
                f"{queries.path.parent} has another tokenizer than the model's documents, which is not supported"
            )
    return layout
