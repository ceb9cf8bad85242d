"""A Hugging Face tokenizer's ids of many texts, by the shortest way that gives the same ones, and from any thread."""

import hashlib
import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

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
