"""Texts -> token ids -> chunks, padded or packed, of at most a number of tokens each."""

import hashlib
import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embedtrain.data.types import Packing, Tokens

# Both ways must agree on these before the short one is taken.
_PROBES = [
    "",
    "a",
    " two  words ",
    "Ünïcödé, 中文 and 123\n",
    "<s></s> [CLS] <|endoftext|> <pad>",
    "so many words " * 20,
]
_LENGTHS = (5, 9, 512)
# `transformers` sets truncation on the one Rust tokenizer that all threads share, which raises "Already borrowed" where
# another thread is tokenising with it.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class _Copy:
    """A copy of a Rust tokenizer that is asked without special tokens and without a limit; both are applied here.

    Attributes:
        backend: the copy.
        before: special tokens before every text.
        after: those behind.
        from_left: a text that is too long loses its beginning.
    """

    backend: Tokenizer
    before: list[int]
    after: list[int]
    from_left: bool

    def room(self, max_length: int) -> int:
        """Tokens of a text that fit beside the special ones."""
        return max_length - len(self.before) - len(self.after)

    def ids(self, texts: list[str], max_length: int) -> list[list[int]]:
        found = (one.ids for one in self.backend.encode_batch_fast(texts, add_special_tokens=False))
        room, before, after = self.room(max_length), self.before, self.after
        if self.from_left:
            return [before + ids[-room:] + after for ids in found]
        return [before + ids[:room] + after for ids in found]


class FastTokenizer:
    """Token ids of texts as `tokenizer(texts, truncation=True, max_length=...)` gives them.

    A fast one's Rust tokenizer is copied and asked directly, where that gives the same: it leaves out what nobody
    reads (offsets, words, masks), and no setting is ever changed while another thread works.

    Args:
        tokenizer: any fast or slow Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: list[str], max_length: int) -> list[list[int]]:
        """The ids of each text, special tokens included, at most `max_length`; none for a text without tokens."""
        copy = self._copy
        if copy is not None and copy.room(max_length) > 0:
            return copy.ids(texts, max_length)
        return self._asked(texts, max_length)

    def fingerprint(self, *more: Any) -> str:
        """A digest of all that decides which ids a text has, and of `more`."""
        tokenizer = self._tokenizer
        settings = {
            "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
            "truncation_side": tokenizer.truncation_side,
            "split_special_tokens": getattr(tokenizer, "split_special_tokens", False),
            "more": more,
        }
        try:
            with _LOCK:
                rules = json.loads(tokenizer.backend_tokenizer.to_str())
            settings["rules"] = {key: rules[key] for key in rules if key not in ("truncation", "padding")}
        except Exception:  # a slow one, or one with parts in Python, which cannot be told as JSON
            settings["vocabulary"] = tokenizer.get_vocab()
            settings["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            settings["added"] = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
            settings["options"] = {name: repr(value) for name, value in tokenizer.init_kwargs.items()}
        told = json.dumps(settings, sort_keys=True, default=repr)
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def _asked(self, texts: list[str], max_length: int) -> list[list[int]]:
        with _LOCK:
            encoded = self._tokenizer(
                texts,
                truncation=True,
                max_length=max_length,
                add_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    @cached_property
    def _copy(self) -> _Copy | None:
        """None where it would give other ids."""
        tokenizer = self._tokenizer
        # A subclass may do more to a text than the Rust tokenizer does (names of transformers 5.17 to 5.23).
        for name in ("_encode_plus", "__call__"):
            if getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name):
                return None
        try:
            with _LOCK:
                backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        except Exception:  # parts in Python cannot be copied
            return None
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        probe = backend.encode("a")
        special = probe.special_tokens_mask
        if 0 not in special:
            return None
        num_before, num_after = special.index(0), special[::-1].index(0)
        before, after = probe.ids[:num_before], probe.ids[len(special) - num_after :]
        copy = _Copy(backend, before, after, tokenizer.truncation_side == "left")
        lengths = [length for length in _LENGTHS if copy.room(length) > 0]
        return copy if all(copy.ids(_PROBES, n) == self._asked(_PROBES, n) for n in lengths) else None


def padded(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int], padding: int) -> Tokens:
    """Texts as one chunk, N texts padded to the longest of them.

    Padding stands on the right whatever the tokenizer prefers: pooling reads the mask, and models with learned
    positions count them from the left.

    Args:
        ids: the tokens of all texts, one text after the other: int [sum of lengths]. One that does not count in its
            text's vector is its complement, `~id`, and so negative: it needs no room of its own on the way here.
        lengths: of each text, int64 [N].
        rows: where each text stands in the list it is from, [N].
        padding: the id that is put where no token is.
    """
    mask = np.arange(max(1, int(lengths.max(initial=0)))) < lengths[:, None]
    filled = np.full(mask.shape, padding, dtype=np.int64)
    filled[mask] = ids
    left_out = filled < 0
    pooled = torch.from_numpy((mask & ~left_out).astype(np.int64)) if left_out.any() else None
    filled[left_out] = ~filled[left_out]
    return Tokens(torch.from_numpy(filled), torch.from_numpy(mask.astype(np.int64)), tuple(rows), pooled)


def packed(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Tokens:
    """Texts as one chunk, one after another in one row [1, T]: not a token more than they have.

    Args:
        ids: as for `padded`.
        lengths: of each text, at least one token; like lengths side by side, for they are computed together.
        rows: as for `padded`.
    """
    flat = ids.astype(np.int64)[None, :]
    left_out = flat < 0
    pooled = torch.from_numpy((~left_out).astype(np.int64)) if left_out.any() else None
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(flat.shape[1]) - np.repeat(starts[:-1], lengths)
    packing = Packing(
        tuple(lengths.tolist()), torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(positions[None, :])
    )
    tokens = torch.from_numpy(np.where(left_out, ~flat, flat))
    return Tokens(tokens, torch.ones_like(tokens), tuple(rows), pooled, packing)


class TextTokenizer:
    """A Hugging Face tokenizer bound to the length that the model takes. Threads may share one.

    Args:
        tokenizer: any fast or slow Hugging Face tokenizer that has a padding token. It must not change once texts
            have been tokenised.
        max_length: tokens of a text that are kept, special tokens included.
        include_prompt: whether the tokens of prompts count in a text's vector.
        packed: whether a chunk's texts stand one after another; else they are padded to the longest.
    """

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
        # What stands for a text without tokens (an empty document, and no special tokens, as with Qwen): a row
        # whose mask is all 0 has no mean and no last token, and would turn into NaN.
        self.nothing = int(tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id)
        self._fast = FastTokenizer(tokenizer)

    def ids(
        self, texts: Sequence[str], max_length: int | None = None, prompts: str | Sequence[str] = ""
    ) -> list[list[int]]:
        """Token ids of each text, special tokens included, truncated, not padded; at least one token each.

        Where prompts do not count, theirs are given as `~id`, which `padded` turns back; one token always counts.

        Args:
            texts: any number of texts, with their prompts.
            max_length: tokens of a text that are kept, where that is less than the model takes.
            prompts: what each text begins with that is a prompt, or what all of them do.
        """
        if not texts:
            return []
        most = self.max_length if max_length is None else min(max_length, self.max_length)
        found = [ids or [self.nothing] for ids in self._fast.ids(list(texts), most)]
        if self.include_prompt or not prompts:
            return found
        each = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        lengths = self._prompt_lengths(each, most)
        return [_without(ids, lengths[prompt]) for ids, prompt in zip(found, each, strict=True)]

    def _prompt_lengths(self, prompts: Sequence[str], most: int) -> dict[str, int]:
        """How many tokens of a text its prompt is, counted as sentence-transformers (6.2) does.

        That is of the prompt alone, special tokens before it included, and without one that ends it. Where a text's
        first word melts into the prompt's last token that may be one too many or too few, there as here.
        """
        distinct = [prompt for prompt in dict.fromkeys(prompts) if prompt]
        special = set(self.tokenizer.all_special_ids)
        found = self._fast.ids(distinct, most) if distinct else []
        lengths = [len(ids) - (bool(ids) and ids[-1] in special) for ids in found]
        return {"": 0, **dict(zip(distinct, lengths, strict=True))}

    def chunks(self, texts: Sequence[str], chunk_tokens: int, prompts: str | Sequence[str] = "") -> list[Tokens]:
        """All texts as chunks of at most `chunk_tokens` tokens each, padding included.

        Texts are sorted by length first, so little padding is computed, or none; `Tokens.rows` leads back.
        A text longer than the budget gets a chunk of its own.
        """
        return self.cut(self.ids(texts, prompts=prompts), chunk_tokens)

    def cut(self, ids: Sequence[Sequence[int]], chunk_tokens: int) -> list[Tokens]:
        """The same of texts that are tokenised already."""
        lengths = [len(one) for one in ids]
        return [self.chunk(ids, rows) for rows in cut_by_length(lengths, chunk_tokens, packed=self.packed)]

    def chunk(self, ids: Sequence[Sequence[int]] | Sequence[NDArray[np.int32]], rows: Sequence[int]) -> Tokens:
        """The texts `rows` of `ids` as one chunk, packed or padded."""
        chosen = [ids[row] for row in rows]
        lengths = np.array([len(one) for one in chosen], dtype=np.int64)
        if isinstance(chosen[0], np.ndarray):
            flat = np.concatenate(chosen)
        else:
            flat = np.fromiter(itertools.chain.from_iterable(chosen), dtype=np.int32, count=int(lengths.sum()))
        return self.make_chunk(flat, lengths, rows)

    def make_chunk(self, flat: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Tokens:
        """The same of tokens that stand one text after the other; see `packed` and `padded`."""
        if self.packed:
            return packed(flat, lengths, rows)
        return padded(flat, lengths, rows, int(self.tokenizer.pad_token_id or 0))

    def dummy(self) -> Tokens:
        """A chunk that stands for no text: for a rank that has run out of chunks while others go on.

        Every forward pass of a sharded model is a collective, so all ranks must run the same number.
        """
        return replace(self.chunk(self.ids(["a"]), [0]), rows=(-1,))

    @cached_property
    def max_token_id(self) -> int:
        """No text has a token with a higher number."""
        return max(self.nothing, *map(int, self.tokenizer.get_vocab().values()))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that decides which tokens a text has, but for lengths: equal for equal tokenizers."""
        return self._fast.fingerprint(self.nothing, *([] if self.include_prompt else ["prompts do not count"]))


def _without(ids: list[int], num_prompt: int) -> list[int]:
    """The same ids, those of the prompt marked; see `padded`."""
    left_out = min(num_prompt, len(ids) - 1)
    return [~token for token in ids[:left_out]] + ids[left_out:]


def restore_order(vectors: Sequence[Tensor], chunks: Sequence[Tokens]) -> Tensor:
    """The vectors of chunks, a matrix each, as one matrix in the texts' order; dummies' vectors are left out."""
    places = torch.tensor([row for chunk in chunks for row in chunk.rows])
    order = places.argsort()[int((places < 0).sum()) :]
    return torch.cat(list(vectors))[order.to(vectors[0].device)]


def cut_by_length(lengths: Sequence[int], chunk_tokens: int, *, packed: bool = False) -> list[list[int]]:
    """Cut texts into chunks of like length, the longest first, of at most `chunk_tokens`: rows x longest, or their sum.

    A function of the lengths alone, so it can be cut alike on any rank. The longest come first so that
    memory runs out in the first chunk or never.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    chunks: list[list[int]] = []
    tokens = 0
    for row in order:
        # Padded, a text takes as much as the first and longest of its chunk.
        tokens += max(1, lengths[row] if packed or not chunks else lengths[chunks[-1][0]])
        if not chunks or tokens > chunk_tokens:
            chunks.append([])
            tokens = max(1, lengths[row])
        chunks[-1].append(row)
    return chunks
