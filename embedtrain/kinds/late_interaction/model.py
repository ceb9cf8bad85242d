"""Late-interaction models: which tokens of a text have a vector, how queries are expanded, and the head (ColBERT).

Token caches hold ids without expansion tokens, in 16 bits each if these suffice.

R: tokens that have a vector; L: tokens of a padded text; T: tokens of all packed texts; D: dimensions of the vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedtrain.config.kind_settings import Expansion, QueryExpansion, TokenSimilarity, TokenVectors
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.tokens import Layout, max_token_id
from embedtrain.data.types import NO_VECTOR, NOT_ATTENDED, Chunk, TextRole, Tokens
from embedtrain.errors import ConfigError
from embedtrain.models.encoder import Dense, Encoder, PooledHead

_TOLERANCE = 5e-2  # between vectors of length 1, also in bf16


class TokenVectorLayout(Layout):
    """Texts that have a vector for each of several tokens.

    Tokens of the skip list are flagged NO_VECTOR, but for the first token of a text, because a maximum over no token is
    undefined; expansion tokens to which no token attends are flagged NOT_ATTENDED. The special token at the end of a
    text survives truncation, and expansion tokens follow it. Tokens of prompts have vectors.

    Args:
        token_vectors: settings of the model.

    Raises:
        ConfigError: the expansion token is not one token, or there is none.
    """

    has_token_rows: ClassVar[bool] = True
    has_skip_list: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_vectors: TokenVectors) -> None:
        super().__init__(tokenizer)
        self.token_vectors = token_vectors
        expansion = token_vectors.expansion
        self.expansion_id = None if expansion is None else _expansion_id(tokenizer, expansion)

    def check(self, max_length: int) -> None:
        """Raise a ConfigError if expanded queries are longer than the model allows."""
        expansion = self.token_vectors.expansion
        if expansion is not None and expansion.length > max_length:
            raise ConfigError(
                f"model.expansion_length={expansion.length}: is more than the model's {max_length} "
                f"tokens; lower it, or raise {model_option('max_length')}"
            )

    def limit(self, role: TextRole, max_length: int) -> int:
        """The maximal number of tokens of a text before its expansion."""
        settings, expansion = self.token_vectors, self.token_vectors.expansion
        limits = [max_length]
        if role is TextRole.document:
            limits += [] if settings.document_length is None else [settings.document_length]
        elif expansion is not None and expansion.strategy is QueryExpansion.fixed:
            limits.append(expansion.length)
        elif settings.query_length is not None:
            limits.append(settings.query_length)
        return min(limits)

    def lengths(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Tokens of each text with expansion tokens, from those without: int64 [N]."""
        expansion = self.token_vectors.expansion
        return lengths if expansion is None else np.where(are_queries, np.maximum(lengths, expansion.length), lengths)

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """The tokens with expansion tokens and flags."""
        lengths = self.lengths(tokens.lengths, are_queries)
        starts = np.cumsum(lengths) - lengths
        is_text = np.arange(int(lengths.sum())) - np.repeat(starts, lengths) < np.repeat(tokens.lengths, lengths)
        ids, flags = np.zeros(len(is_text), dtype=np.int32), np.zeros(len(is_text), dtype=np.uint8)
        expansion = self.token_vectors.expansion
        if expansion is not None and self.expansion_id is not None:
            ids[:] = self.expansion_id
            flags[~is_text] = 0 if expansion.attend else NOT_ATTENDED
        ids[is_text] = tokens.ids
        if len(self.skipped):
            is_skipped = self._is_skipped[ids]
            if not self.token_vectors.skiplist_queries:
                is_skipped &= ~np.repeat(are_queries, lengths)
            is_skipped[starts] = False
            flags[is_skipped] |= NO_VECTOR
        return Tokens(ids, flags, lengths)

    def sizes(
        self,
        lengths: NDArray[np.int64],
        are_queries: NDArray[np.bool_],
        tokens: Callable[[NDArray[np.int64]], Tokens],
    ) -> tuple[NDArray[np.int64] | None, ...]:
        """Vectors of each text. Ranks exchange rows without asking each other how many these are."""
        sizes = lengths.copy()
        for role, texts in zip(TextRole, map(np.flatnonzero, (are_queries, ~are_queries)), strict=True):
            if self.has_skipped(role) and len(texts):
                sizes[texts] = self.num_vectors(tokens(texts))
        return (sizes,)

    def has_skipped(self, role: TextRole) -> bool:
        """Whether some tokens of texts of this role may have no vector."""
        return len(self.skipped) > 0 and (role is TextRole.document or self.token_vectors.skiplist_queries)

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
        return np.isin(np.arange(max(self.nothing, max_token_id(self.tokenizer)) + 1), list(self.skipped))

    def alone(self) -> Layout:
        """The layout of texts of any length without expansion."""
        return Layout(self.tokenizer)

    def longest_text(self, max_length: int) -> int:
        """Tokens of the longest text that the encoder gets."""
        expansion = self.token_vectors.expansion
        return max(*(self.limit(role, max_length) for role in TextRole), 0 if expansion is None else expansion.length)

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """The most vectors of a query, and of a document."""
        return self.token_vectors.vectors_per_text(max_length)

    def client_settings(self, max_length: int) -> dict[str, Any]:
        """The expansion of queries, and tokens without vectors."""
        expansion = self.token_vectors.expansion
        roles = {
            role.value: {
                "max_length": self.limit(role, max_length),
                "expanded_length": expansion.length if expansion is not None and role is TextRole.query else 0,
                "skipped": sorted(self.skipped) if self.has_skipped(role) else [],
            }
            for role in TextRole
        }
        attend = expansion is not None and expansion.attend
        return {"token_vectors": {"roles": roles, "expansion_id": self.expansion_id, "attend": attend}}

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and the caller's lengths."""
        settings = replace(self.token_vectors, is_new=False, similarity=TokenSimilarity.maxsim)
        return (self.nothing, self.expansion_id, asdict(settings))


def _expansion_id(tokenizer: PreTrainedTokenizerBase, expansion: Expansion) -> int:
    token = expansion.token
    if token is None:
        default = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        if default is None:
            raise ConfigError(
                "model.expansion_token=null: the tokenizer has neither a mask nor an end-of-text "
                "token; write one of its tokens"
            )
        return int(default)
    number = _token_id(tokenizer, token)
    if number is None:
        raise ConfigError(
            f"model.expansion_token={token}: is not one token of the tokenizer; write one of them, "
            f"such as {tokenizer.mask_token or tokenizer.eos_token}"
        )
    return number


def _token_id(tokenizer: PreTrainedTokenizerBase, word: str) -> int | None:
    """The id of a token; None if the vocabulary does not have it."""
    number = tokenizer.convert_tokens_to_ids(word)
    if number is None or (number == tokenizer.unk_token_id and word != tokenizer.unk_token):
        return None
    return int(number)


class TokenVectorHead(PooledHead):
    """The vectors of tokens: projections, L2 normalisation."""

    compares_tokens = True

    def __init__(self, size: int, dense: Sequence[Dense], merged_keys: Sequence[str] = ()) -> None:
        super().__init__(size, Pooling.cls, normalize=True, dense=dense)
        self._merged_keys = merged_keys

    @property
    def merged_keys(self) -> Sequence[str]:
        """Those of an adapter of the projection."""
        return self._merged_keys

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The vectors of the tokens that have one, [R, D].

        Without `token_rows` these are the ones that `pooled` selects, or all real ones.
        """
        mask, pooled, token_rows = chunk.known_mask, chunk.pooled, chunk.token_rows
        selected = pooled if mask is None else mask if pooled is None else pooled * mask
        if token_rows is None and selected is not None:
            token_rows = selected.flatten().nonzero()[:, 0]
        flat = hidden.flatten(0, 1)
        return (self.transformed(flat if token_rows is None else flat[token_rows]),)

    def graph_outputs(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The vectors of all tokens, [N, L, D]."""
        return (self.transformed(hidden),)

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """The projection."""
        return {"dense": self.dense}


def expansion_mismatch(encoder: Encoder, device: torch.device) -> str | None:
    """Why expansion tokens that no token attends to cannot be used with padded texts; None if they can.

    DeBERTa has no attention at all for such tokens: their vectors are a mean over a text and its padding. Two forward
    passes without gradient, which are collectives if the encoder is sharded: every rank must call.
    """
    num_attended, length, padding = 3, 5, 4
    ids = torch.arange(5, 5 + length, device=device)[None]
    mask = (torch.arange(length, device=device) < num_attended).long()[None]
    rows = torch.arange(length, device=device)
    with torch.no_grad():
        (alone,) = encoder(Chunk(ids, mask, token_rows=rows))
        (padded,) = encoder(Chunk(F.pad(ids, (0, padding)), F.pad(mask, (0, padding)), token_rows=rows))
    difference = float((alone - padded).norm(dim=1).max())
    return None if difference <= _TOLERANCE else f"their vectors depend on padding (they differ by {difference:.1%})"
