"""Pairs of a query and a document as the input of a cross-encoder.

Both texts are tokenised separately, without special tokens, and joined by ids. Tokenizers do the same: special tokens
separate the two texts, so no token spans both. The tokens of a query that has many documents are therefore computed and
cached once.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.cache.token_store import gather_ranges
from embedtrain.data.text_format import NO_PROMPT, Prompt
from embedtrain.data.tokens import TOKENIZER_LOCK, FastTokenizer, TextTokenizer
from embedtrain.data.types import BatchTokens, Chunk, TextRole
from embedtrain.errors import ModelError

# A tokenizer's own pairs of these texts are compared with ours.
_PROBES = [
    ("a", "b"),
    ("What is it?", " two  words\n"),
    ("Ünïcödé, 中文", "123 <s> [SEP]"),
    ("many words " * 9, "so many " * 9),
]
_PROBE_TOKENS = (8, 11, 500)  # tokens of both texts, besides those of the template
_MAX_PROBE = 10_000  # tokens of a probe with a template


class PairTruncation(str, Enum):
    """Which text of a pair is cut if both do not fit."""

    longest_first = "longest_first"  # the longer one, then both alike
    only_second = "only_second"  # the document


@dataclass(frozen=True, slots=True)
class PairFormat:
    """How the tokens of two texts become the input of a cross-encoder: before, query, between, document, after."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int = 0  # token type of the document and of what follows it; other tokens have type 0
    truncation: PairTruncation = PairTruncation.longest_first
    # With `only_second`, the query has at most this fraction of the tokens between `before` and `after`.
    max_query_fraction: float = 1.0
    from_left: bool = False  # whether truncation removes the beginning of a text
    query: Prompt = NO_PROMPT  # text that is tokenised with a query, around it and its prompt
    document: Prompt = NO_PROMPT

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, token_types: bool = False) -> "PairFormat":
        """The format of the tokenizer's own pairs, for a model with or without token types.

        Raises a ModelError if joined ids differ from the tokenizer's, which would change every score.
        """
        contents = FastTokenizer(tokenizer, special_tokens=False)
        query, document = contents.ids(list(_PROBES[0]), _MAX_PROBE)
        pair = _own_pair(tokenizer, *_PROBES[0], _MAX_PROBE, token_types=token_types)
        for first, second in itertools.product(_find(pair.ids, query), _find(pair.ids, document)):
            if second < first + len(query):
                continue
            pair_format = cls(
                before=tuple(pair.ids[:first]),
                between=tuple(pair.ids[first + len(query) : second]),
                after=tuple(pair.ids[second + len(document) :]),
                second_type=pair.types[second],
                from_left=tokenizer.truncation_side == "left",
            )
            if all(
                pair_format._joins_as(tokenizer, contents.ids([*texts], _MAX_PROBE), texts, token_types)
                for texts in _PROBES
            ):
                return pair_format
        raise ModelError(
            f"the pair {_PROBES[0]} has other tokens with {type(tokenizer).__name__} than its two texts with special "
            "tokens between them: this tokenizer cannot be used for a cross-encoder"
        )

    def _joins_as(
        self, tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], texts: tuple[str, str], token_types: bool
    ) -> bool:
        """Whether the tokenizer's own pair of texts with these ids is the same, whatever the length."""
        for length in (self.num_special + max_tokens for max_tokens in _PROBE_TOKENS):
            marked = self.join(ids[0], ids[1], length)
            types = [self.second_type * (token < 0) for token in marked]
            pair = _OwnPair([~token if token < 0 else token for token in marked], types)
            if pair != _own_pair(tokenizer, *texts, length, token_types=token_types):
                return False
        return True

    @property
    def num_special(self) -> int:
        """Tokens of a pair besides those of its texts."""
        return len(self.before) + len(self.between) + len(self.after)

    def fit(
        self, query_lengths: NDArray[np.int64], document_lengths: NDArray[np.int64], max_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that pairs keep of their queries and documents, int64 [N] each.

        Texts are limited to `max_length` before: if both exceed it, the query counts as the shorter one, where a
        tokenizer compares whole texts.
        """
        max_tokens = max(0, max_length - self.num_special)
        queries, documents = query_lengths, document_lengths
        if self.truncation is PairTruncation.longest_first:
            shorter = np.minimum(queries, documents)
            # The longer text is cut to what the shorter one leaves; if that is less, both get half, and the text that
            # was longer gets the odd token (as the tokenizers library does, 0.23).
            longer = np.maximum(shorter, max_tokens - shorter)
            halves = shorter + longer > max_tokens
            shorter, longer = (
                np.where(halves, max_tokens // 2, shorter),
                np.where(halves, max_tokens - max_tokens // 2, longer),
            )
            swapped = queries > documents
            limits = np.where(swapped, longer, shorter), np.where(swapped, shorter, longer)
            return np.minimum(queries, limits[0]), np.minimum(documents, limits[1])
        between_ends = max(0, max_length - len(self.before) - len(self.after))
        queries = np.minimum(queries, min(max_tokens, int(between_ends * self.max_query_fraction)))
        return queries, np.minimum(documents, max_tokens - queries)

    def join(self, query: Sequence[int], document: Sequence[int], max_length: int) -> list[int]:
        """The marked ids of one pair: the complement `~id` marks the tokens of type `second_type`."""
        lengths = np.array([len(query)]), np.array([len(document)])
        flat = np.array([*query, *document], dtype=np.int32)
        joined = self.join_all(flat[: len(query)], lengths[0], flat[len(query) :], lengths[1], max_length)
        return joined.tolist()  # type: ignore[no-any-return]

    def join_all(
        self,
        queries: NDArray[np.int32],
        query_lengths: NDArray[np.int64],
        documents: NDArray[np.int32],
        document_lengths: NDArray[np.int64],
        max_length: int,
    ) -> NDArray[np.int32]:
        """The marked ids of N pairs, one after the other, from the concatenated tokens of both texts."""
        kept_queries, kept_documents = self.fit(query_lengths, document_lengths, max_length)
        totals = kept_queries + kept_documents + self.num_special
        joined = np.empty(int(totals.sum()), dtype=np.int32)
        offsets = np.cumsum(totals) - totals

        def put(ids: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
            before = np.cumsum(lengths) - lengths
            joined[np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))] = ids

        def put_all(ids: tuple[int, ...], starts: NDArray[np.int64], *, marked: bool) -> NDArray[np.int64]:
            for number, token in enumerate(ids):
                joined[starts + number] = ~token if marked else token
            return starts + len(ids)

        start = put_all(self.before, offsets, marked=False)
        put(self._cut(queries, query_lengths, kept_queries), start, kept_queries)
        start = put_all(self.between, start + kept_queries, marked=False)
        put(~self._cut(documents, document_lengths, kept_documents), start, kept_documents)
        put_all(self.after, start + kept_documents, marked=True)
        return joined

    def _cut(self, ids: NDArray[np.int32], lengths: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int32]:
        starts = np.cumsum(lengths) - lengths
        return gather_ranges(ids, starts + lengths - kept if self.from_left else starts, kept)


class _OwnPair(NamedTuple):
    ids: list[int]
    types: list[int]


def _own_pair(
    tokenizer: PreTrainedTokenizerBase, query: str, document: str, max_length: int, *, token_types: bool
) -> _OwnPair:
    """What the tokenizer itself makes of a pair."""
    token_types = token_types and "token_type_ids" in tokenizer.model_input_names
    with TOKENIZER_LOCK:
        encoded = tokenizer(
            query, document, truncation="longest_first", max_length=max_length, return_token_type_ids=token_types
        )
    ids: list[int] = encoded["input_ids"]
    return _OwnPair(ids, encoded["token_type_ids"] if token_types else [0] * len(ids))


def _find(ids: list[int], part: list[int]) -> list[int]:
    """The indices where `part` begins in `ids`: in a template, a token of a text may occur before the text."""
    return [index for index in range(len(ids) - len(part) + 1) if ids[index : index + len(part)] == part]


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
