"""Texts -> chunks of tokens: sorted by length and cut so that no forward pass holds more than a budget."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.data.fast_tokens import FastTokenizer
from embedtrain.data.padding import packed, padded
from embedtrain.data.types import Tokens


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
