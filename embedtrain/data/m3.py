"""Texts as the input of a model with three representations of each (BGE-M3)."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import BatchTokens, Chunk, TextInputs
from embedtrain.errors import ConfigError

# Ids are stored as float32 beside the vectors.
_MAX_TOKEN_ID = 1 << 24


class M3Tokenizer(TextTokenizer):
    """A tokenizer whose texts have a row for each token; special tokens have no lexical weight.

    Raises:
        ConfigError: a text may have fewer than two tokens, or the vocabulary is too large.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, packed: bool = False) -> None:
        super().__init__(tokenizer, max_length, packed=packed)
        if max_length < 2 or len(self._fast.ids([""], max_length)[0]) < 2:
            raise ConfigError(
                "model.kind=m3: needs at least two tokens of each text, the first for its vector and another; use a "
                "tokenizer that adds a token before and after texts, and model.max_length of at least 2"
            )
        if self.max_token_id >= _MAX_TOKEN_ID:
            raise ConfigError(
                f"model.kind=m3: the tokenizer has ids up to {self.max_token_id:,}, at most 2**24 - 1 fit"
            )
        names = ("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "unk_token_id")
        ids = [getattr(tokenizer, name, None) for name in names]
        self._unweighted = np.array([number for number in ids if number is not None], dtype=np.int64)

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
        """Texts as one chunk, all of whose tokens have a row."""
        chunk = super().make_chunk(flat, lengths, rows)
        pooled = ~np.isin(chunk.ids.numpy(), self._unweighted)
        token_rows = np.flatnonzero(chunk.mask.numpy().reshape(-1))
        return chunk.replaced(
            pooled=torch.from_numpy(pooled.astype(np.int64)),
            token_rows=torch.from_numpy(token_rows),
            sizes=np.asarray(lengths, dtype=np.int64),
        )

    def with_packing(self, packed: bool) -> "M3Tokenizer":
        """The same with or without packing."""
        return M3Tokenizer(self.tokenizer, self.max_length, packed=packed)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the rows of a text, except lengths; not that of a dense model."""
        return self._fast.fingerprint(self.nothing, "rows of all tokens")

    def encoder_inputs(self, tokens: BatchTokens) -> "M3Inputs":
        """The queries and documents of a batch, with the number of tokens of each."""
        return M3Inputs(tokens)

    @property
    def vectors_per_text(self) -> tuple[int, int]:
        """The most rows of a query, and of a document."""
        return self.max_length, self.max_length


class M3Inputs(TextInputs):
    """The texts of a batch as `EncoderInputs`, with a row per token."""

    def __init__(self, tokens: BatchTokens) -> None:
        super().__init__(tokens)
        self.sizes = (np.asarray(tokens.lengths, dtype=np.int64),)
