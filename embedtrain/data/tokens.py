"""Texts -> token ids -> chunks, padded or packed, of at most a number of tokens each."""

import copy
import hashlib
import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embedtrain.data.text_format import Prompt
from embedtrain.data.types import BatchTokens, Chunk, EncoderInputs, Packing, TextInputs, TextRole
from embedtrain.errors import ModelError

# The copy must agree with the tokenizer on these texts before it is used.
_PROBES = [
    "",
    "a",
    " two  words ",
    "Ünïcödé, 中文 and 123\n",
    "<s></s> [CLS] <|endoftext|> <pad>",
    "so many words " * 20,
]
_LENGTHS = (5, 9, 512)
# `transformers` sets truncation on the Rust tokenizer that all threads share, which raises "Already borrowed" while
# another thread tokenises with it.
TOKENIZER_LOCK = threading.RLock()


@dataclass(frozen=True)
class _Copy:
    """A copy of a Rust tokenizer without special tokens and truncation, which are applied here."""

    backend: Tokenizer
    before: list[int]  # special tokens before every text
    after: list[int]
    from_left: bool  # whether truncation removes the beginning of a text

    def max_text_tokens(self, max_length: int) -> int:
        """Tokens of a text that fit besides the special tokens."""
        return max_length - len(self.before) - len(self.after)

    def ids(self, texts: list[str], max_length: int) -> list[list[int]]:
        encodings = (encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False))
        limit, before, after = self.max_text_tokens(max_length), self.before, self.after
        if self.from_left:
            return [before + ids[-limit:] + after for ids in encodings]
        return [before + ids[:limit] + after for ids in encodings]


class FastTokenizer:
    """Token ids of texts as `tokenizer(texts, truncation=True, max_length=...)` gives them.

    `special_tokens=False` leaves out special tokens. Calls a copy of the Rust tokenizer directly if that gives the same
    ids: no offsets, words and masks are computed, and no setting changes while another thread tokenises.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = True) -> None:
        self._tokenizer, self._special_tokens = tokenizer, special_tokens

    def ids(self, texts: list[str], max_length: int) -> list[list[int]]:
        """The ids of each text, including special tokens, at most `max_length`; may be empty."""
        try:
            copy = self._copy
            if copy is not None and copy.max_text_tokens(max_length) > 0:
                return copy.ids(texts, max_length)
            return self._tokenizer_ids(texts, max_length)
        except BaseException as error:
            # The tokenizers library (0.23) raises it where a regular expression exceeds its steps; it is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"the tokenizer cannot encode a text: {error}") from None

    def fingerprint(self, *more: Any) -> str:
        """A digest of everything that determines the ids of a text, and of `more`."""
        tokenizer = self._tokenizer
        settings = {
            "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
            "truncation_side": tokenizer.truncation_side,
            "split_special_tokens": getattr(tokenizer, "split_special_tokens", False),
            "more": more,
        }
        try:
            with TOKENIZER_LOCK:
                rules = json.loads(tokenizer.backend_tokenizer.to_str())
            settings["rules"] = {key: rules[key] for key in rules if key not in ("truncation", "padding")}
        except Exception:  # a slow tokenizer, or one with parts in Python, which has no JSON
            settings["vocabulary"] = tokenizer.get_vocab()
            settings["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            settings["added"] = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
            settings["options"] = {name: repr(value) for name, value in tokenizer.init_kwargs.items()}
        text = json.dumps(settings, sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _tokenizer_ids(self, texts: list[str], max_length: int) -> list[list[int]]:
        with TOKENIZER_LOCK:
            encoded = self._tokenizer(
                texts,
                truncation=True,
                max_length=max_length,
                add_special_tokens=self._special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    @cached_property
    def _copy(self) -> _Copy | None:
        """None if a copy would give other ids."""
        tokenizer = self._tokenizer
        # A subclass may change texts before the Rust tokenizer does (private names of transformers 5.17 to 5.23).
        for name in ("_encode_plus", "__call__"):
            if getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name):
                return None
        try:
            with TOKENIZER_LOCK:
                backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        except Exception:  # parts in Python cannot be copied
            return None
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        probe = backend.encode("a", add_special_tokens=self._special_tokens)
        special = probe.special_tokens_mask
        if 0 not in special:
            return None
        num_before, num_after = special.index(0), special[::-1].index(0)
        before, after = probe.ids[:num_before], probe.ids[len(special) - num_after :]
        copy = _Copy(backend, before, after, tokenizer.truncation_side == "left")
        lengths = [length for length in _LENGTHS if copy.max_text_tokens(length) > 0]
        return copy if all(copy.ids(_PROBES, n) == self._tokenizer_ids(_PROBES, n) for n in lengths) else None


UNLIMITED = 1 << 30  # tokens: more than any text has


def split_pooled(ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Split marked ids, as `TextTokenizer.ids` returns them, [T], into token ids and which tokens are pooled.

    The latter is 1 for a pooled token, else 0; None if all are pooled.
    """
    not_pooled = ids < 0
    pooled = (~not_pooled).astype(np.int64) if not_pooled.any() else None
    return np.where(not_pooled, ~ids, ids).astype(np.int64), pooled


def pad_texts(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int], padding: int) -> Chunk:
    """N texts as one chunk, padded to the longest.

    Padding is on the right, whatever the tokenizer's setting: pooling reads the mask, and models with learned positions
    count from the left.

    Args:
        ids: the concatenated tokens of all texts: int [sum of lengths]. The complement `~id`, a negative number, marks
            a token that is not pooled.
        rows: index of each text in the list it is from, [N].
    """
    mask = np.arange(max(1, int(lengths.max(initial=0)))) < lengths[:, None]
    token_ids, pooled = split_pooled(ids)

    def fill(values: NDArray[np.int64], padding: int) -> Tensor:
        filled = np.full(mask.shape, padding, dtype=np.int64)
        filled[mask] = values
        return torch.from_numpy(filled)

    return Chunk(
        fill(token_ids, padding),
        torch.from_numpy(mask.astype(np.int64)),
        tuple(rows),
        pooled=None if pooled is None else fill(pooled, 0),
        has_padding=not mask.all(),
    )


def pack_texts(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
    """Texts as one chunk, concatenated into one row [1, T] without padding.

    `lengths` are at least 1, equal ones adjacent, because they are computed together; `ids` and `rows` as in
    `pad_texts`.
    """
    token_ids, pooled = split_pooled(ids)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(len(token_ids)) - np.repeat(starts[:-1], lengths)
    packing = Packing(
        tuple(lengths.tolist()), torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(positions[None, :])
    )
    tokens = torch.from_numpy(token_ids[None, :])
    pooled_tokens = None if pooled is None else torch.from_numpy(pooled[None, :])
    return Chunk(tokens, torch.ones_like(tokens), tuple(rows), pooled=pooled_tokens, packing=packing, has_padding=False)


class TextTokenizer:
    """A Hugging Face tokenizer bound to the maximal length of a model. Threads may share it.

    Attributes:
        roles_differ: whether the tokens of a query differ from those of the same document.
        num_parts: vectors of each text that the encoder returns in training.

    Args:
        tokenizer: a fast or slow Hugging Face tokenizer with a padding token. It must not change afterwards.
        include_prompt: whether the tokens of prompts are pooled.
        packed: whether the texts of a chunk are concatenated; else they are padded to the longest.
    """

    roles_differ = False
    num_parts = 1

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        include_prompt: bool = True,
        packed: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.include_prompt = include_prompt
        self.packed = packed
        # The token of a text without tokens (an empty document and no special tokens, as with Qwen): a mask of zeros
        # has no mean and no last token, and would give NaN.
        nothing = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.nothing = int(nothing or 0)
        self._fast = FastTokenizer(tokenizer)

    def ids(
        self,
        texts: Sequence[str],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> list[list[int]]:
        """Token ids of each text, including special tokens, truncated but not padded; at least one token.

        If prompts are not pooled, their tokens are marked as `~id`, see `split_pooled`; one token is always pooled.

        Args:
            prompts: the prompt that each text begins with, or all texts do.
            role: of the texts; only models with vectors of tokens depend on it.
        """
        if not texts:
            return []
        limit = TextTokenizer.limit(self, role, max_length)
        token_ids = [ids or [self.nothing] for ids in self._fast.ids(list(texts), limit)]
        if self.include_prompt or not prompts:
            return token_ids
        text_prompts = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        lengths = self._prompt_lengths(text_prompts, limit)
        return [_mark_prompt(ids, lengths[prompt]) for ids, prompt in zip(token_ids, text_prompts, strict=True)]

    def limit(self, role: TextRole, max_length: int | None = None) -> int:
        """The maximal number of tokens of a text, where the caller allows `max_length`."""
        return self.max_length if max_length is None else min(max_length, self.max_length)

    def stored_ids(
        self, texts: Sequence[str], limit: int, prompts: str, role: TextRole = TextRole.document
    ) -> list[list[int]]:
        """What is cached of each text, from which `encoder_inputs` makes inputs; `limit` is that of the texts' role.

        The role of queries is only passed if `roles_differ`.
        """
        return self.ids(texts, limit, prompts)

    def _prompt_lengths(self, prompts: Sequence[str], limit: int) -> dict[str, int]:
        """The number of tokens of each prompt, counted as sentence-transformers (6.2) does.

        The prompt is tokenised alone, and a special token at its end is not counted. If the first word of a text merges
        with the last token of the prompt, the number may be off by one, as in sentence-transformers.
        """
        distinct = [prompt for prompt in dict.fromkeys(prompts) if prompt]
        special = set(self.tokenizer.all_special_ids)
        token_ids = self._fast.ids(distinct, limit) if distinct else []
        lengths = [len(ids) - (bool(ids) and ids[-1] in special) for ids in token_ids]
        return {"": 0, **dict(zip(distinct, lengths, strict=True))}

    def chunks(self, texts: Sequence[str], chunk_tokens: int, prompts: str | Sequence[str] = "") -> list[Chunk]:
        """All texts as chunks of at most `chunk_tokens` tokens including padding; a longer text is a chunk of its own.

        Texts are sorted by length; `Chunk.rows` has their original indices.
        """
        return self.cut(self.ids(texts, prompts=prompts), chunk_tokens)

    def cut(self, ids: Sequence[Sequence[int]], chunk_tokens: int) -> list[Chunk]:
        """`chunks` of texts that are already tokenised."""
        lengths = [len(text) for text in ids]
        return [self.chunk(ids, rows) for rows in cut_by_length(lengths, chunk_tokens, packed=self.packed)]

    def chunk(self, ids: Sequence[Sequence[int]] | Sequence[NDArray[np.int32]], rows: Sequence[int]) -> Chunk:
        """The texts `rows` of `ids` as one chunk, packed or padded."""
        texts = [ids[row] for row in rows]
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        if isinstance(texts[0], np.ndarray):
            flat = np.concatenate(texts)
        else:
            flat = np.fromiter(itertools.chain.from_iterable(texts), dtype=np.int32, count=int(lengths.sum()))
        return self.make_chunk(flat, lengths, rows)

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Chunk:
        """The same from concatenated tokens, as in `pack_texts` and `pad_texts`."""
        if self.packed:
            return pack_texts(flat, lengths, rows)
        return pad_texts(flat, lengths, rows, int(self.tokenizer.pad_token_id or 0))

    def with_packing(self, packed: bool) -> "TextTokenizer":
        """The same with or without packing."""
        other = copy.copy(self)
        other.packed = packed
        return other

    def with_parts(self, num_parts: int) -> "TextTokenizer":
        """The same for an encoder that returns so many vectors of each text in training."""
        other = copy.copy(self)
        other.num_parts = num_parts
        return other

    def query_prompt(self, prompt: Prompt) -> Prompt:
        """What surrounds a query, for a prompt: the prompt."""
        return prompt

    def document_prompt(self, prompt: Prompt) -> Prompt:
        """What surrounds a document."""
        return prompt

    def encoder_inputs(self, tokens: BatchTokens) -> EncoderInputs:
        """What the encoder computes of a batch: each query and each document."""
        return TextInputs(tokens, self.num_parts)

    def dummy(self) -> Chunk:
        """A chunk for a rank that has fewer chunks than others.

        A forward pass of a sharded model is a collective, so all ranks run the same number of passes.
        """
        return self.chunk(self.ids(["a"]), [0]).replaced(rows=(-1,))

    @staticmethod
    def unmarked(ids: Sequence[int]) -> list[int]:
        """The tokens of `ids` without their marks."""
        return [~token if token < 0 else token for token in ids]

    def untruncated(self) -> "TextTokenizer":
        """The same for texts of any length; its ids may have other marks."""
        untruncated = copy.copy(self)
        untruncated.max_length = UNLIMITED
        return untruncated

    @property
    def notes(self) -> list[str]:
        """Lines for the user about settings without an effect."""
        return []

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the encoder gets."""
        return self.max_length

    @property
    def vectors_per_text(self) -> tuple[int, int]:
        """The most vectors of a query, and of a document."""
        return 1, 1

    @cached_property
    def max_token_id(self) -> int:
        """The largest token id."""
        return max(self.nothing, *map(int, self.tokenizer.get_vocab().values()))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the tokens of a text, except lengths."""
        return self._fast.fingerprint(self.nothing, *([] if self.include_prompt else ["prompts do not count"]))


class StaticTokenizer(TextTokenizer):
    """A tokenizer of texts without special tokens, as sentence-transformers' StaticEmbedding has it.

    A text without tokens has one that is not pooled, so that its vector is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, packed: bool = False) -> None:
        super().__init__(tokenizer, max_length, packed=packed)
        self.nothing = ~int(tokenizer.pad_token_id or 0)
        self._fast = FastTokenizer(tokenizer, special_tokens=False)

    def with_packing(self, packed: bool) -> "StaticTokenizer":
        """The same with or without packing."""
        return StaticTokenizer(self.tokenizer, self.max_length, packed=packed)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the tokens of a text, except lengths."""
        return self._fast.fingerprint(self.nothing, "no special tokens")


def _mark_prompt(ids: list[int], num_prompt: int) -> list[int]:
    """The same ids, with those of the prompt marked as not pooled."""
    num_marked = min(num_prompt, len(ids) - 1)
    return [~token for token in ids[:num_marked]] + ids[num_marked:]


def restore_order(vectors: Sequence[Tensor], chunks: Sequence[Chunk]) -> Tensor:
    """The embeddings of all chunks as one matrix in the order of the texts, without those of dummies."""
    rows = torch.tensor([row for chunk in chunks for row in chunk.rows])
    order = rows.argsort()[int((rows < 0).sum()) :]
    if vectors[0].is_cuda:
        order = order.pin_memory()  # a copy from other memory may wait for the work queued on the GPU
    return torch.cat(list(vectors))[order.to(vectors[0].device, non_blocking=True)]


def cut_by_length(lengths: Sequence[int], chunk_tokens: int, *, packed: bool = False) -> list[list[int]]:
    """Cut texts into chunks of similar length of at most `chunk_tokens`: rows x longest, or their sum if packed.

    A pure function of the lengths, so every rank gets the same chunks. The longest come first, so that memory runs out
    in the first chunk or never.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    chunks: list[list[int]] = []
    tokens = 0
    for row in order:
        # With padding a text takes as many tokens as the first and longest text of its chunk.
        tokens += max(1, lengths[row] if packed or not chunks else lengths[chunks[-1][0]])
        if not chunks or tokens > chunk_tokens:
            chunks.append([])
            tokens = max(1, lengths[row])
        chunks[-1].append(row)
    return chunks
