"""The layout of static embedding models; that of other models with a vector per text is `data.tokens.Layout`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import Layout
from embedtrain.data.types import TextRole, Tokens


class StaticLayout(Layout):
    """Texts without special tokens, as sentence-transformers' StaticEmbedding has them.

    A text without tokens has one that is not pooled, so that its vector is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, special_tokens=False)
        self.nothing, self.caches_flags = int(tokenizer.pad_token_id or 0), True

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts; that of a text without tokens is flagged NOT_POOLED."""
        ids = self.fast.ids(list(texts), limit) if texts else []
        tokens = Tokens.of([text or [self.nothing] for text in ids])
        return Tokens.with_unpooled(tokens.ids, tokens.lengths, np.array([not text for text in ids], dtype=np.int64))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (~self.nothing, "no special tokens")
