"""BGE-M3: the rows of a text, and the head, which computes its three representations in one forward pass.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; d: dimensions of a token's vector.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedtrain.config.kind_settings import M3Settings
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.tokens import Layout
from embedtrain.data.types import NOT_POOLED, Chunk, Tokens
from embedtrain.errors import ConfigError
from embedtrain.models.encoder import PooledHead


class M3Layout(Layout):
    """Texts that have a row for each token; special tokens, flagged NOT_POOLED, have no lexical weight."""

    has_token_rows: ClassVar[bool] = True
    has_row_ids: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        names = ("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "unk_token_id")
        ids = [getattr(tokenizer, name, None) for name in names]
        self._unweighted = np.array([number for number in ids if number is not None], dtype=np.int64)

    def check(self, max_length: int) -> None:
        """Raise a ConfigError if a text may have fewer than two tokens."""
        if max_length < 2 or len(self.fast.ids([""], max_length)[0]) < 2:
            raise ConfigError(
                "model.kind=m3: needs at least two tokens of each text, the first for its vector and another; use a "
                f"tokenizer that adds a token before and after texts, and {model_option('max_length')} of at least 2"
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
        return (self.nothing, "rows and ids of all tokens")


class M3Head(PooledHead):
    """Rows of three representations, see `M3Settings`. The names of the linear layers are those of FlagEmbedding."""

    def __init__(self, size: int, settings: M3Settings) -> None:
        super().__init__(size, Pooling.cls, normalize=True)
        self.settings = settings
        self.colbert_linear = nn.Linear(size, settings.token_dimension)
        self.sparse_linear = nn.Linear(size, 1)
        self.modules |= {"colbert_linear": self.colbert_linear, "sparse_linear": self.sparse_linear}

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """Rows of all tokens, see `m3_rows`.

        `token_rows` of the chunk, int64 [T], are the real tokens; without them only the dense vectors are computed,
        [N, D]. `pooled` is 1 for tokens with a lexical weight, by default all.
        """
        token_rows = chunk.token_rows
        if token_rows is None:
            return super().__call__(hidden, chunk.replaced(pooled=None))
        hidden = hidden.flatten(0, 1)[token_rows]
        if chunk.packing is None:
            texts = token_rows // chunk.ids.shape[1]
        else:
            texts = torch.searchsorted(chunk.packing.starts.long(), token_rows, right=True) - 1
        weights = self.lexical_weights(hidden).squeeze(1)
        if chunk.pooled is not None:
            weights = weights * chunk.pooled.flatten()[token_rows]
        vectors, dense = self.token_vectors(hidden), F.normalize(hidden.float(), dim=1)
        assert chunk.row_ids is not None, "texts are laid out by M3Layout"
        return (m3_rows(dense, vectors, weights, texts, chunk.row_ids),)

    def graph_outputs(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The dense vectors [N, D] twice, lexical weights [N, L, 1], and the vectors of all tokens but the first."""
        (vectors,) = super().graph_outputs(hidden, mask)
        tokens = self.token_vectors(hidden[:, 1:]) * mask[:, 1:, None]
        return vectors, vectors.clone(), self.lexical_weights(hidden), tokens

    def lexical_weights(self, hidden: Tensor) -> Tensor:
        """The weight of each token from its vector [..., H]: [..., 1]."""
        return F.relu(self.sparse_linear(hidden.to(self.sparse_linear.weight.dtype)).float())

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """Project and normalise token vectors [..., H]: [..., d]."""
        return F.normalize(self.colbert_linear(hidden.to(self.colbert_linear.weight.dtype)).float(), dim=-1)


def m3_rows(dense: Tensor, vectors: Tensor, weights: Tensor, texts: Tensor, ids: Tensor) -> Tensor:
    """The rows of `M3Settings`, [T, max(D, d) + 1], of the T tokens of texts, text by text.

    Args:
        dense: [T, D], of which the first of each text counts.
        vectors: [T, d], of which the first of each text has no effect.
        weights: [T], lexical ones, of which the largest of each id of a text counts.
        texts: int64 [T], the text of each token.
        ids: int64 [T].
    """
    is_first = torch.ones_like(texts, dtype=torch.bool)
    is_first[1:] = texts[1:] != texts[:-1]
    width = max(dense.shape[1], vectors.shape[1])
    rows = torch.where(
        is_first.unsqueeze(1),
        F.pad(dense, (0, width - dense.shape[1])),
        F.pad(vectors, (0, width - vectors.shape[1])),
    )
    weights = _largest_by_id(weights, texts, ids)
    return torch.cat([rows, weights.unsqueeze(1)], dim=1)


def _largest_by_id(weights: Tensor, texts: Tensor, ids: Tensor) -> Tensor:
    """The largest weight of each id of a text at its first token, and 0 at the others: [T]. Weights are at least 0.

    No size depends on the number of different ids, for which the host would have to wait.
    """
    keys, order = (texts * (1 << 32) + ids).sort(stable=True)
    is_new = torch.ones_like(keys, dtype=torch.bool)
    is_new[1:] = keys[1:] != keys[:-1]
    groups = is_new.long().cumsum(0) - 1
    largest = torch.zeros_like(weights).scatter_reduce(0, groups, weights[order], "amax")
    return torch.zeros_like(weights).scatter(0, order, largest[groups] * is_new)
