"""Token ids of texts by a copy of a tokenizer's Rust part, where it gives the same ids."""

import hashlib
import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

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
