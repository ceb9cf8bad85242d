"""How the tokens of two texts become the input of a cross-encoder."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.cache.token_store import gather_ranges
from embedtrain.data.fast_tokenizer import TOKENIZER_LOCK, FastTokenizer
from embedtrain.data.text_format import NO_PROMPT, Prompt
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
