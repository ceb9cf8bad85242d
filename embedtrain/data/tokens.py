"""Texts -> token ids -> chunks, padded or packed, of at most a number of tokens each."""

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embedtrain.config.code import is_own_code
from embedtrain.data.chunks import FurtherCosts
from embedtrain.data.images.item import MARK, described, has_chunks
from embedtrain.data.rows import Prompt
from embedtrain.data.types import (
    IS_QUERY,
    NO_VECTOR,
    NOT_ATTENDED,
    NOT_POOLED,
    SECOND_SEGMENT,
    BatchTokens,
    Chunk,
    EncoderInputs,
    Packing,
    Pair,
    TextRole,
    Tokens,
)
from embedtrain.errors import ConfigError, ModelError

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
        """The ids of each text, including special tokens, at most `max_length`; may be empty.

        A ModelError for a picture or a document in chunks, which no tokenizer reads.
        """
        if (marked := next((text for text in texts if MARK in text), None)) is not None:
            if has_chunks(marked):
                raise ModelError(
                    f"a document is in chunks ({described(marked)[:60]!r}), and the model reads whole texts: set "
                    "model.chunking.late=true for a model of model.kind=dense, or write texts"
                )
            raise ModelError("an item has a picture, and the model reads texts alone")
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


class Layout:
    """How the texts of a model become tokens and rows of a chunk; this one is of models with a vector for each text.

    What differs for a kind of model is a subclass in `kinds/KIND/model.py`.

    Attributes:
        roles_differ: whether the cached tokens of a query differ from those of the same document.
        caches_flags: whether the first tokens of a cached text may be flagged NOT_POOLED.
        flags_tokens: whether each cached token has flags of its own, such as those of pictures.
        has_token_rows: whether the encoder returns a row for each token but those flagged NO_VECTOR.
        has_row_ids: whether texts are compared by the ids of these tokens as well.
        second_type: the token type of tokens flagged SECOND_SEGMENT; 0: the model has no token types.
        has_skip_list: whether texts of the model have a list of tokens without vectors.
        reads_pictures: whether items may have pictures, which are slots among the tokens until a chunk is made.
        joins_pictures: whether an item may have a text beside a picture.
        num_towers: of the encoder; a text of each role has one.
        num_pair_tokens: tokens of a pair besides those of its texts; None: texts are encoded alone.
        dummy: what a rank encodes that has fewer chunks than others.
        further_limits: the maximum of a chunk of each of `further_costs`, such as patches of images.
        nothing: the token of a text without tokens (an empty document and no special tokens, as with Qwen): a mask of
            zeros has no mean and no last token, and would give NaN.

    Args:
        tokenizer: a fast or slow Hugging Face tokenizer with a padding token. It must not change afterwards.
        include_prompt: whether the tokens of prompts are pooled.
        special_tokens: whether texts have those of the tokenizer.
        num_parts: vectors of each text that the encoder returns in training.
    """

    roles_differ: ClassVar[bool] = False
    flags_tokens: ClassVar[bool] = False
    has_token_rows: ClassVar[bool] = False
    has_row_ids: ClassVar[bool] = False
    has_skip_list: ClassVar[bool] = False
    reads_pictures: ClassVar[bool] = False
    joins_pictures: ClassVar[bool] = False
    num_towers: ClassVar[int] = 1
    second_type = 0
    num_pair_tokens: int | None = None
    dummy: str | Pair = "a"
    further_limits: tuple[int, ...] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        include_prompt: bool = True,
        special_tokens: bool = True,
        num_parts: int = 1,
    ) -> None:
        self.tokenizer, self.include_prompt, self.num_parts = tokenizer, include_prompt, num_parts
        self.caches_flags = not include_prompt
        nothing = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.nothing = int(nothing or 0)
        self.fast = FastTokenizer(tokenizer, special_tokens=special_tokens)

    def check(self, max_length: int) -> None:
        """Raise a ConfigError or ModelError if texts of at most `max_length` tokens are too short for the model."""

    def limit(self, role: TextRole, max_length: int) -> int:
        """The maximal number of cached tokens of a text, where the model and the caller allow `max_length`."""
        return max_length

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts that are cached, truncated to `limit`, their `limit(role, ...)`; at least one of each.

        Tokens of `prompts`, with which the texts begin, are flagged NOT_POOLED if prompts are not pooled; one token is
        always pooled. The role of queries is only passed if `roles_differ`.
        """
        if not texts:
            return Tokens.of([])
        tokens = Tokens.of([ids or [self.nothing] for ids in self.fast.ids(list(texts), limit)])
        if self.include_prompt or not prompts:
            return tokens
        prompts_of_texts = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        lengths = self._prompt_lengths(prompts_of_texts, limit)
        counts = np.array([lengths[prompt] for prompt in prompts_of_texts], dtype=np.int64)
        return Tokens.with_unpooled(tokens.ids, tokens.lengths, np.minimum(counts, tokens.lengths - 1))

    def check_rows(self, tokens: Tokens, num_documents: NDArray[np.int64], max_length: int) -> None:
        """Raise a DataError if the cached tokens of rows, a query and `num_documents` each, cannot be encoded.

        Called for items with pictures before anything is encoded.
        """

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """What the encoder gets of cached tokens, with all flags; `are_queries` is bool [N]."""
        return tokens

    def tokens(
        self, texts: Sequence[str] | Sequence[Pair], limit: int, prompts: str | Sequence[str], role: TextRole
    ) -> Tokens:
        """What the encoder gets of texts; arguments of `tokenize`."""
        tokens = self.tokenize(cast(Sequence[str], texts), limit, prompts, role)
        return self.lay_out(tokens, np.full(len(texts), role is TextRole.query))

    def join(self, queries: Tokens, documents: Tokens, max_length: int) -> Tokens:
        """What the encoder gets of N documents with their queries: a document alone, or a pair."""
        return documents

    def num_vectors(self, tokens: Tokens) -> NDArray[np.int64]:
        """Vectors of each text: int64 [N]."""
        return tokens.lengths - tokens.count(NO_VECTOR) if self.has_token_rows else np.ones_like(tokens.lengths)

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """What the encoder computes of a batch: each query and each document, at most `max_length` tokens each."""
        rows = np.arange(len(tokens.num_documents))
        all_rows = np.concatenate([rows, np.repeat(rows, tokens.num_documents)])
        are_queries = np.arange(len(all_rows)) < len(rows)

        def selected(inputs: NDArray[np.int64]) -> Tokens:
            return self.lay_out(tokens.tokens(inputs), are_queries[inputs])

        lengths = self.input_lengths(tokens.lengths, are_queries, selected)
        return EncoderInputs(
            num_queries=len(rows),
            rows=all_rows,
            lengths=lengths,
            costs=self.costs(lengths, are_queries),
            sizes=self.sizes(lengths, are_queries, selected),
            tokens=selected,
            towers=self.towers(are_queries, selected),
            further=self.further(lengths, selected),
        )

    def towers(
        self, are_queries: NDArray[np.bool_], tokens: Callable[[NDArray[np.int64]], Tokens]
    ) -> NDArray[np.int64] | None:
        """The number of the tower that encodes each text: int64 [N]; None: there is one.

        `tokens` gives what the encoder gets of some of the texts.
        """
        return None

    def input_lengths(
        self,
        lengths: NDArray[np.int64],
        are_queries: NDArray[np.bool_],
        tokens: Callable[[NDArray[np.int64]], Tokens],
    ) -> NDArray[np.int64]:
        """`lengths`; `tokens` gives what the encoder gets of some of the texts."""
        return self.lengths(lengths, are_queries)

    def num_tokens(self, tokens: Tokens) -> NDArray[np.int64]:
        """Tokens of each text in a chunk: int64 [N]. A picture has as many as the encoder computes of it."""
        return tokens.lengths

    def chunk_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """What each text counts in the maximal number of tokens of a chunk: int64 [N]."""
        return self.num_tokens(tokens)

    def lengths(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Tokens of each text that the encoder gets, from those that are cached: int64 [N]."""
        return lengths

    def costs(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Tokens of each text that the encoder computes, from those that it gets: int64 [N]."""
        return lengths

    def sizes(
        self,
        lengths: NDArray[np.int64],
        are_queries: NDArray[np.bool_],
        tokens: Callable[[NDArray[np.int64]], Tokens],
    ) -> tuple[NDArray[np.int64] | None, ...]:
        """`EncoderInputs.sizes` of texts of these lengths; `tokens` gives those of some of them."""
        return (None,) * self.num_parts

    def further_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """What the encoder computes of each text besides its tokens, known without decoding anything: int64 [N, K]."""
        return np.zeros((len(tokens), 0), dtype=np.int64)

    def decode(self, tokens: Tokens) -> Mapping[str, Tensor]:
        """What the encoder takes of texts besides their tokens, such as the pixels of images, as `Chunk.decoded`.

        Called in the thread that prepares a batch, for all chunks of a rank's batch of training: what it returns is in
        host memory until the step, and on the device during the step.
        """
        return {}

    def with_further(self, chunk: Chunk) -> Chunk:
        """A chunk for a pass in which the chunk of some rank has further costs.

        Which modules of the encoder compute a pass is the same on all ranks: a rank without pictures computes an empty
        one in the passes in which others have some.
        """
        return chunk

    def further(self, lengths: NDArray[np.int64], tokens: Callable[[NDArray[np.int64]], Tokens]) -> FurtherCosts | None:
        """`further_costs` of all inputs with their limits; None without limits. `tokens` gives those of some."""
        if not self.further_limits:
            return None
        return FurtherCosts(self.further_costs(tokens(np.arange(len(lengths)))), self.further_limits)

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """N texts as one chunk: packed into one row [1, T], or padded to the longest [N, L].

        Padding is on the right, whatever the tokenizer's setting: pooling reads the mask, and models with learned
        positions count from the left. Texts of equal length that are adjacent are computed together if packed.

        Args:
            rows: index of each text in the list it is from, [N].
        """
        ids, flags, lengths = tokens.ids, tokens.flags, tokens.lengths
        width = max(1, int(lengths.max(initial=0)))
        is_token = np.ones((1, len(ids)), np.bool_) if packed else np.arange(width) < lengths[:, None]

        def place(values: NDArray[Any], padding: int = 0) -> Tensor:
            if packed:
                return torch.from_numpy(values.astype(np.int64)[None, :])
            filled = np.full(is_token.shape, padding, dtype=np.int64)
            filled[is_token] = values
            return torch.from_numpy(filled)

        # Most texts have no flags: what follows from these is not computed.
        num_unattended = tokens.count(NOT_ATTENDED) if flags.any() else np.zeros_like(lengths)
        mask = is_token.astype(np.int64)
        if not packed and num_unattended.any():
            mask[is_token] = flags & NOT_ATTENDED == 0
        chunk = Chunk(
            place(ids, int(self.tokenizer.pad_token_id or 0)),
            torch.from_numpy(mask),
            tuple(rows),
            pooled=place(flags & NOT_POOLED == 0) if (flags & NOT_POOLED).any() else None,
            packing=Packing.of(lengths, lengths - num_unattended) if packed else None,
            has_padding=not packed and not (is_token.all() and not num_unattended.any()),
            types=place(np.where(flags & SECOND_SEGMENT, self.second_type, 0)) if self.second_type else None,
            decoded=self.decode(tokens),
        )
        if self.has_token_rows:
            chunk.token_rows = torch.from_numpy(np.flatnonzero(is_token)[flags & NO_VECTOR == 0])
            chunk.sizes = self.num_vectors(tokens)
        if self.has_row_ids:
            chunk.row_ids = torch.from_numpy(ids[flags & NO_VECTOR == 0].astype(np.int64))
        return chunk

    def windows(self, items: Sequence[Pair], max_length: int) -> NDArray[np.int64]:
        """For each item, its number of windows of at most `max_length` tokens, and the tokens from one to the next.

        int64 [N, 2]; only pairs are cut into windows.
        """
        return np.ones((len(items), 2), dtype=np.int64)

    def chunk_windows(self, chunks: Sequence[str], limit: int, prompt: str = "", *, overlap: int = 0) -> list[range]:
        """The chunks of a document of which items of at most `limit` tokens consist, each read in one forward pass.

        Each begins with the last `overlap` chunks of the one before. Raises a ConfigError if the model reads whole
        texts alone.
        """
        raise ConfigError(
            "the model reads whole texts, and chunks are for a model of kind=dense with late chunking: set "
            "chunking.late=true, or train one with model.chunking.late=true"
        )

    def alone(self) -> "Layout":
        """The layout of the same texts without what the encoder adds to them, of any length."""
        return self

    def query_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt with what the model adds before and after every query."""
        return prompt

    def document_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt with what the model adds before and after every document."""
        return prompt

    @property
    def notes(self) -> list[str]:
        """Lines for the user about settings without an effect."""
        return []

    def longest_text(self, max_length: int) -> int:
        """Tokens of the longest text that the encoder gets."""
        return max_length

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """The most vectors of a query, and of a document."""
        return 1, 1

    def client_settings(self, max_length: int) -> dict[str, Any]:
        """What a client of a serving engine has to know of texts if it does not read it from the model's directory."""
        return {}

    def tokenizer_of(self, role: TextRole) -> PreTrainedTokenizerBase:
        """The tokenizer of texts of a role."""
        return self.tokenizer

    @property
    def dummies(self) -> Sequence[tuple[str | Pair, TextRole]]:
        """What a rank encodes that has fewer chunks of a tower than others, and its role, of each tower."""
        return [(self.dummy, TextRole.document)]

    @property
    def max_token_id(self) -> int:
        """The largest token id."""
        return max_token_id(self.tokenizer)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths, for `TextTokenizer.fingerprint`."""
        return (self.nothing, *([] if self.include_prompt else ["prompts do not count"]))

    def _prompt_lengths(self, prompts: Sequence[str], limit: int) -> dict[str, int]:
        """The number of tokens of each prompt, counted as sentence-transformers (6.2) does.

        The prompt is tokenised alone, and a special token at its end is not counted. If the first word of a text merges
        with the last token of the prompt, the number may be off by one, as in sentence-transformers.
        """
        distinct = [prompt for prompt in dict.fromkeys(prompts) if prompt]
        special = set(self.tokenizer.all_special_ids)
        token_ids = self.fast.ids(distinct, limit) if distinct else []
        lengths = [len(ids) - (bool(ids) and ids[-1] in special) for ids in token_ids]
        return {"": 0, **dict(zip(distinct, lengths, strict=True))}


class TextTokenizer:
    """A Hugging Face tokenizer bound to the layout and the maximal length of a model. Threads may share it.

    Args:
        tokenizer: a fast or slow Hugging Face tokenizer with a padding token. It must not change afterwards.
        max_length: tokens of a text, or of a pair, with special tokens.
        layout: what the tokens of a text become; default: that of models with a vector for each text.
        packed: whether the texts of a chunk are concatenated; else they are padded to the longest.

    Raises ConfigError or ModelError if texts of `max_length` tokens are too short for the layout.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        layout: Layout | None = None,
        *,
        packed: bool = False,
    ) -> None:
        self.tokenizer, self.max_length, self.packed = tokenizer, max_length, packed
        self.layout = Layout(tokenizer) if layout is None else layout
        self.layout.check(max_length)

    def limit(self, role: TextRole, max_length: int | None = None) -> int:
        """The maximal number of cached tokens of a text, where the caller allows `max_length`."""
        return self.layout.limit(role, self.max_length if max_length is None else min(max_length, self.max_length))

    def tokens(
        self,
        texts: Sequence[str] | Sequence[Pair],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """What the encoder gets of each text or pair: truncated tokens, including special tokens, not padded.

        Args:
            texts: texts or pairs; a cross-encoder has both.
            prompts: the prompt that each text begins with, or all texts do; matters if prompts are not pooled.
            role: of the texts; matters if the model treats queries and documents differently.
        """
        return self.layout.tokens(texts, self.limit(role, max_length), prompts, role)

    def ids(
        self,
        texts: Sequence[str] | Sequence[Pair],
        max_length: int | None = None,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> list[list[int]]:
        """The ids of `tokens`, a list for each text."""
        return self.tokens(texts, max_length, prompts, role).lists()

    def chunks(self, texts: Sequence[Any], chunk_tokens: int, prompts: str | Sequence[str] = "") -> list[Chunk]:
        """All texts as chunks of at most `chunk_tokens` tokens including padding; a longer text is a chunk of its own.

        Texts are sorted by length; `Chunk.rows` has their original indices.
        """
        return self.cut(self.tokens(texts, prompts=prompts), chunk_tokens)

    def cut(self, tokens: Tokens, chunk_tokens: int) -> list[Chunk]:
        """`chunks` of texts that are already tokenised."""
        lengths = tokens.lengths.tolist()
        return [self.chunk(tokens, rows) for rows in cut_by_length(lengths, chunk_tokens, packed=self.packed)]

    def chunk(self, tokens: Tokens, rows: Sequence[int]) -> Chunk:
        """The texts `rows` of `tokens` as one chunk, packed or padded."""
        return self.make_chunk(tokens.take(rows), rows)

    def make_chunk(self, tokens: Tokens, rows: Sequence[int]) -> Chunk:
        """Texts as one chunk, packed or padded; `rows` has the index of each in the list it is from."""
        return self.layout.chunk(tokens, rows, packed=self.packed)

    def inputs(self, tokens: BatchTokens) -> EncoderInputs:
        """What the encoder computes of a batch."""
        return self.layout.inputs(tokens, self.max_length)

    def dummy(self, tower: int = 0) -> Chunk:
        """A chunk for a rank that has fewer chunks of a tower than others.

        A forward pass of a sharded model is a collective, so all ranks run the same number of passes.
        """
        item, role = self.layout.dummies[tower]
        items: Sequence[Any] = [item]
        return self.make_chunk(self.tokens(items, role=role), [-1])

    def dummies(self) -> list[Chunk]:
        """A dummy of each tower."""
        return [self.dummy(tower) for tower in range(self.layout.num_towers)]

    def of_tower(self, role: str) -> "TextTokenizer":
        """That of the tower that encodes texts of a role."""
        assert isinstance(self.layout, TowerLayout)
        return self.layout.of_roles[TextRole(role)].with_packing(self.packed)

    def with_packing(self, packed: bool) -> "TextTokenizer":
        """The same with or without packing."""
        return self._with(packed=packed)

    def with_layout(self, layout: Layout) -> "TextTokenizer":
        """The same with another layout."""
        return self._with(layout=layout)

    def with_parts(self, num_parts: int) -> "TextTokenizer":
        """The same for an encoder that returns so many vectors of each text in training."""
        layout = copy.copy(self.layout)
        layout.num_parts = num_parts
        return self.with_layout(layout)

    def untruncated(self) -> "TextTokenizer":
        """The same for texts of any length, without what the encoder adds to them."""
        return self._with(max_length=UNLIMITED, layout=self.layout.alone())

    def _with(self, **changes: Any) -> "TextTokenizer":
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the encoder gets."""
        return self.layout.longest_text(self.max_length)

    @property
    def vectors_per_text(self) -> tuple[int, int]:
        """The most vectors of a query, and of a document."""
        return self.layout.vectors_per_text(self.max_length)

    @cached_property
    def max_token_id(self) -> int:
        """The largest token id."""
        return self.layout.max_token_id

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the tokens of a text, except lengths.

        A user's layout counts by its name: it may tokenize otherwise without an `identity` of its own.
        """
        kind = type(self.layout)
        own = (kind.__module__, kind.__qualname__) if is_own_code(kind) else ()
        return self.layout.fast.fingerprint(*self.layout.identity, *own)


class TowerLayout(Layout):
    """Queries and documents that two towers encode, each with a tokenizer, a maximal length and a layout of its own.

    A chunk has queries or documents alone.
    """

    roles_differ: ClassVar[bool] = True
    num_towers: ClassVar[int] = 2

    def __init__(self, query: TextTokenizer, document: TextTokenizer) -> None:
        super().__init__(document.tokenizer)
        self.of_roles = {TextRole.query: query, TextRole.document: document}
        self.fast = document.layout.fast
        layouts = query.layout, document.layout
        self.include_prompt = all(layout.include_prompt for layout in layouts)
        self.caches_flags = any(layout.caches_flags for layout in layouts)

    def limit(self, role: TextRole, max_length: int) -> int:
        """That of the tower."""
        return self.of_roles[role].limit(role, max_length)

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts of one role."""
        return self.of_roles[role].layout.tokenize(texts, limit, prompts, role)

    def tokenizer_of(self, role: TextRole) -> PreTrainedTokenizerBase:
        """That of the tower."""
        return self.of_roles[role].tokenizer

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """The tokens of texts of one role, with those of queries flagged IS_QUERY."""
        role = TextRole.query if are_queries.any() else TextRole.document
        laid_out = self.of_roles[role].layout.lay_out(tokens, are_queries)
        flag = IS_QUERY if role is TextRole.query else np.uint8(0)
        return Tokens(laid_out.ids, laid_out.flags | flag, laid_out.lengths)

    def towers(
        self, are_queries: NDArray[np.bool_], tokens: Callable[[NDArray[np.int64]], Tokens]
    ) -> NDArray[np.int64]:
        """0 for queries and 1 for documents."""
        return np.where(are_queries, 0, 1)

    @property
    def dummies(self) -> Sequence[tuple[str | Pair, TextRole]]:
        """A query and a document."""
        return [(self.dummy, role) for role in self.of_roles]

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Texts of one role as a chunk for their tower."""
        is_query = bool((tokens.flags & IS_QUERY).any())
        of_tower = self.of_roles[TextRole.query if is_query else TextRole.document]
        plain = Tokens(tokens.ids, tokens.flags & ~IS_QUERY, tokens.lengths)
        chunk = of_tower.layout.chunk(plain, rows, packed=packed)
        chunk.tower = 0 if is_query else 1
        return chunk

    def alone(self) -> "Layout":
        """The same with towers for texts of any length."""
        return TowerLayout(*(tower.untruncated() for tower in self.of_roles.values()))

    def longest_text(self, max_length: int) -> int:
        """The longer of a query and a document."""
        return max(min(max_length, tower.longest_text) for tower in self.of_roles.values())

    @property
    def max_token_id(self) -> int:
        """The largest of both tokenizers."""
        return max(tower.max_token_id for tower in self.of_roles.values())

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of both towers, which cut texts at lengths of their own."""
        return ("towers", *((tower.max_length, tower.fingerprint) for tower in self.of_roles.values()))


def max_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id of a tokenizer."""
    return max(map(int, tokenizer.get_vocab().values()))


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
