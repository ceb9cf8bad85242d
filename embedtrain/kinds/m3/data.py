"""Texts as the input of a model with three representations of each (BGE-M3)."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import Layout, max_token_id
from embedtrain.data.types import NOT_POOLED, Tokens
from embedtrain.errors import ConfigError

# Ids are stored as float32 beside the vectors.
_MAX_TOKEN_ID = 1 << 24


class M3Layout(Layout):
    """Texts that have a row for each token; special tokens, flagged NOT_POOLED, have no lexical weight.

    Raises:
        ConfigError: the vocabulary is too large.
    """

    has_token_rows: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        if (largest := max(self.nothing, max_token_id(tokenizer))) >= _MAX_TOKEN_ID:
            raise ConfigError(f"model.kind=m3: the tokenizer has ids up to {largest:,}, at most 2**24 - 1 fit")
        names = ("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "unk_token_id")
        ids = [getattr(tokenizer, name, None) for name in names]
        self._unweighted = np.array([number for number in ids if number is not None], dtype=np.int64)

    def check(self, max_length: int) -> None:
        """Raise a ConfigError if a text may have fewer than two tokens."""
        if max_length < 2 or len(self.fast.ids([""], max_length)[0]) < 2:
            raise ConfigError(
                "model.kind=m3: needs at least two tokens of each text, the first for its vector and another; use a "
                "tokenizer that adds a token before and after texts, and model.max_length of at least 2"
            )

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """The same tokens with flags."""
        flags = np.where(np.isin(tokens.ids, self._unweighted), NOT_POOLED, np.uint8(0))
        return Tokens(tokens.ids, flags, tokens.lengths)

    def sizes(
        self,
        lengths: NDArray[np.int64],
        are_queries: NDArray[np.bool_],
        tokens: Callable[[NDArray[np.int64]], Tokens],
    ) -> tuple[NDArray[np.int64] | None, ...]:
        """A row for each token."""
        return (lengths,)

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """The most rows of a query, and of a document."""
        return max_length, max_length

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the rows of a text besides the tokenizer and lengths; not that of a dense model."""
        return (self.nothing, "rows of all tokens")
