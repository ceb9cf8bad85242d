"""Pairs of a query and a document as the input of a cross-encoder.

Both texts are tokenised separately, without special tokens, and joined by ids. Tokenizers do the same: special tokens
separate the two texts, so no token spans both. The tokens of a query that has many documents are therefore computed and
cached once.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.fast_tokenizer import FastTokenizer
from embedtrain.data.pair_format import PairFormat
from embedtrain.data.text_format import Prompt
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import BatchTokens, Chunk, TextRole
from embedtrain.errors import ModelError

_WINDOW_OVERLAP = 80  # tokens
_NO_LIMIT = 1 << 30  # tokens of a text


class Pair(NamedTuple):
    """Two texts that a cross-encoder scores together, or a window of a long document."""

    query: str
    document: str
    # The first token of the document that the model reads, of as many as fit; None: from the beginning, or where the
    # tokenizer cuts texts from the left.
    start: int | None = None


class PairTokenizer(TextTokenizer):
    """A tokenizer of a cross-encoder: texts become tokens without special tokens, and pairs complete inputs.

    Args:
        max_length: tokens of a pair, with special tokens.
        pair_format: the format that the model is trained with.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        pair_format: PairFormat,
        *,
        packed: bool = False,
    ) -> None:
        super().__init__(tokenizer, max_length, packed=packed)
        self._fast = FastTokenizer(tokenizer, special_tokens=False)
        self.pair_format = pair_format
        if self.max_length <= self.pair_format.num_special:
            raise ModelError(
                f"model.max_length={max_length} leaves no room for texts: a pair has {self.pair_format.num_special} "
                "tokens besides those of its texts"
            )

    def with_packing(self, packed: bool) -> "PairTokenizer":
        """The same with or without packing."""
        return PairTokenizer(self.tokenizer, self.max_length, self.pair_format, packed=packed)

    def ids(
        self,
        texts: Sequence[str] | Sequence[Pair],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> list[list[int]]:
        """The tokens of each text without special tokens, or the marked ids of each pair, see `PairFormat.join`.

        A list has texts or pairs. A text may have no tokens. Prompts are part of the texts and need not be known. Texts
        have been formatted by `query_prompt` and `document_prompt`, those of pairs have not.
        """
        limit = self.max_length if max_length is None else min(max_length, self.max_length)
        pairs = [text for text in texts if isinstance(text, Pair)]
        if not pairs:
            return self._fast.ids([str(text) for text in texts], limit) if texts else []
        has_windows = any(pair.start is not None for pair in pairs)
        queries, documents = self._contents(pairs, _NO_LIMIT if has_windows else limit)
        if has_windows:
            # Both texts are cut here: with another length of the document, the query would be cut otherwise.
            kept = zip(*self.pair_format.fit(_lengths(queries), _lengths(documents), limit), strict=True)
            for row, (pair, (num_query, num_document)) in enumerate(zip(pairs, kept, strict=True)):
                if pair.start is not None:
                    first = len(queries[row]) - num_query if self.pair_format.from_left else 0
                    queries[row] = queries[row][first : first + num_query]
                    documents[row] = documents[row][pair.start : pair.start + num_document]
        lengths = _lengths(queries), _lengths(documents)
        joined = self.pair_format.join_all(_flat(queries), lengths[0], _flat(documents), lengths[1], limit).tolist()
        kept_queries, kept_documents = self.pair_format.fit(*lengths, limit)
        ends = np.cumsum(kept_queries + kept_documents + self.pair_format.num_special).tolist()
        return [joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def windows(self, pairs: Sequence[Pair]) -> NDArray[np.int64]:
        """For each pair, the number of windows that its document takes, and the tokens from one to the next: [N, 2].

        A document that fits is one window. The windows of a longer one overlap by 80 tokens, or by a quarter of a
        window if that is less, as in BCEmbedding's RerankerModel.
        """
        queries, documents = map(_lengths, self._contents(pairs, _NO_LIMIT))
        _, sizes = self.pair_format.fit(queries, documents, self.max_length)
        strides = np.maximum(1, sizes - np.minimum(_WINDOW_OVERLAP, sizes // 4))
        # Without room for the document, because the query takes it all, one window is as good as many.
        counts = np.where(sizes > 0, 1 + -(-np.maximum(0, documents - sizes) // strides), 1)
        return np.stack([counts, strides], axis=1)

    def are_whole(self, pairs: Sequence[Pair]) -> NDArray[np.bool_]:
        """For each pair, whether neither of its texts is cut: bool [N]."""
        queries, documents = map(_lengths, self._contents(pairs, _NO_LIMIT))
        kept = self.pair_format.fit(queries, documents, self.max_length)
        whole: NDArray[np.bool_] = (kept[0] == queries) & (kept[1] == documents)
        return whole

    def _contents(self, pairs: Sequence[Pair], limit: int) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of the queries and of the documents, without special tokens; those of equal texts once."""
        texts = [(self.pair_format.query(pair.query), self.pair_format.document(pair.document)) for pair in pairs]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(texts)))
        ids = dict(zip(distinct, self._fast.ids(distinct, limit) if distinct else [], strict=True))
        return [ids[query] for query, _ in texts], [ids[document] for _, document in texts]

    def query_prompt(self, prompt: Prompt) -> Prompt:
        """The text around a query: its prompt and that of the pair format."""
        return self.pair_format.query.around(prompt)

    def document_prompt(self, prompt: Prompt) -> Prompt:
        """The text around a document."""
        return self.pair_format.document.around(prompt)

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
        """Pairs as one chunk, from their concatenated marked ids."""
        marked = flat < 0
        chunk = super().make_chunk(np.where(marked, ~flat, flat), lengths, rows)
        if not self.pair_format.second_type:
            return chunk
        types = np.where(marked, self.pair_format.second_type, 0).astype(np.int64)
        if chunk.packing is not None:
            return chunk.replaced(types=torch.from_numpy(types[None, :]))
        filled = torch.zeros_like(chunk.ids)
        filled[chunk.mask.bool()] = torch.from_numpy(types)
        return chunk.replaced(types=filled)

    def dummy(self) -> Chunk:
        """A chunk for a rank that has fewer chunks than others."""
        return self.chunk(self.ids([Pair("a", "a")]), [0]).replaced(rows=(-1,))

    def encoder_inputs(self, tokens: BatchTokens) -> "PairInputs":
        """The pairs of a batch: each document with the query of its row."""
        return PairInputs(tokens, self)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the tokens of a text, except lengths."""
        around = (self.pair_format.query, self.pair_format.document)
        texts = [(prompt.prefix, prompt.suffix) for prompt in around]
        return self._fast.fingerprint("without special tokens", *(texts if any(map(any, texts)) else []))


def _lengths(texts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))


def _flat(texts: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.fromiter(itertools.chain.from_iterable(texts), dtype=np.int32)


class PairInputs:
    """The M pairs of a global batch, as `EncoderInputs`."""

    def __init__(self, tokens: BatchTokens, tokenizer: PairTokenizer) -> None:
        num_rows = len(tokens.num_documents)
        self._tokens, self._format, self._max_length = tokens, tokenizer.pair_format, tokenizer.max_length
        self.num_queries = 0
        self.sizes: tuple[NDArray[np.int64] | None, ...] = (None,)
        self.rows = np.repeat(np.arange(num_rows), tokens.num_documents)
        self._documents = num_rows + np.arange(len(self.rows))
        kept = self._format.fit(tokens.lengths[self.rows], tokens.lengths[self._documents], self._max_length)
        self.lengths: NDArray[np.int64] = kept[0] + kept[1] + self._format.num_special
        self.costs = self.lengths

    def ids(self, inputs: NDArray[np.int64]) -> NDArray[np.int32]:
        """The marked ids of these pairs, one after the other."""
        texts = self.rows[inputs], self._documents[inputs]
        (queries, documents), lengths = map(self._tokens.ids, texts), [self._tokens.lengths[part] for part in texts]
        return self._format.join_all(queries, lengths[0], documents, lengths[1], self._max_length)
