"""The types from rows to the encoder: GlobalBatch, Tokens, Chunk."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.data.chunks import FurtherCosts
from embedtrain.data.images.item import Picture
from embedtrain.data.rows import Example


class TextRole(str, Enum):
    """What a text is encoded as. Some models treat queries and documents differently, besides their prompts."""

    query = "query"
    document = "document"


class Pair(NamedTuple):
    """Two texts that a cross-encoder scores together, or a window of a long document."""

    query: str
    document: str
    # The first token of the document that the model reads, of as many as fit; None: from the beginning, or where the
    # tokenizer cuts texts from the left.
    start: int | None = None


# Flags of a token; 0 is a token that is pooled, attended to and has a vector, of a document or its first segment.
# PICTURE is no token: a number of the slot in which a picture stands until a chunk is made. STARTS_CHUNK is the first
# token of a chunk of a document, but for the first chunk; ANSWERS is the first of one that answers the row's query.
NOT_POOLED, NO_VECTOR, SECOND_SEGMENT, IS_QUERY, NOT_ATTENDED, PICTURE, STARTS_CHUNK, ANSWERS = (
    np.uint8(1 << bit) for bit in range(8)
)
SLOT = 4  # numbers of a picture among the ids: both halves of its key, width, height


def gather_ranges(values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Concatenated ranges of `values`, each with its start and length."""
    ends = np.cumsum(lengths)
    indices = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
    selected: NDArray[Any] = values[indices]
    return selected


def no_answers() -> NDArray[np.int64]:
    """The `known_answers` of a batch without any."""
    return np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The P pictures of tokens, in order.

    Attributes:
        starts: int64 [P], where the slot of each begins among all ids.
        owners: int64 [P], the text of each.
        keys: int64 [P], of its file's content.
        sizes: int64 [P, 2], width and height.
    """

    starts: NDArray[np.int64]
    owners: NDArray[np.int64]
    keys: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def pictures(self) -> list[Picture]:
        """As they stand in items."""
        return [Picture(key, *size) for key, size in zip(self.keys.tolist(), self.sizes.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of N texts or pairs, one text after the other.

    Attributes:
        ids: int32 [T].
        flags: uint8 [T], of each token NOT_POOLED, NO_VECTOR, SECOND_SEGMENT, IS_QUERY, NOT_ATTENDED, PICTURE,
            STARTS_CHUNK and ANSWERS.
        lengths: int64 [N], tokens of each text; a picture counts SLOT.
    """

    ids: NDArray[np.int32]
    flags: NDArray[np.uint8]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> "Tokens":
        """Tokens without flags from the ids of each text."""
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return cls.plain(
            np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum())), lengths
        )

    @classmethod
    def plain(cls, ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> "Tokens":
        """Tokens without flags."""
        return cls(ids, np.zeros(len(ids), dtype=np.uint8), lengths)

    @classmethod
    def with_unpooled(
        cls, ids: NDArray[np.int32], lengths: NDArray[np.int64], counts: NDArray[np.integer[Any]]
    ) -> "Tokens":
        """Tokens of which the first of each text, `counts` [N], are flagged NOT_POOLED."""
        positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(ids, np.where(positions < np.repeat(counts, lengths), NOT_POOLED, np.uint8(0)), lengths)

    @classmethod
    def of_parts(cls, items: Sequence[Sequence[Sequence[int] | Picture]]) -> "Tokens":
        """Tokens of items from the parts of each: the ids of a text, or a picture, which becomes a slot."""
        ids, flags, lengths = list[int](), list[int](), list[int]()
        for item in items:
            first = len(ids)
            for part in item:
                numbers = slot_of(part) if isinstance(part, Picture) else part
                ids += numbers
                flags += [int(PICTURE) if isinstance(part, Picture) else 0] * len(numbers)
            lengths.append(len(ids) - first)
        return cls(np.array(ids, dtype=np.int32), np.array(flags, dtype=np.uint8), np.array(lengths, dtype=np.int64))

    @classmethod
    def concatenated(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """The texts of all parts, in order; at least one part."""
        ids, flags, lengths = zip(*((part.ids, part.flags, part.lengths) for part in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(flags), np.concatenate(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def lists(self) -> list[list[int]]:
        """The ids of each text."""
        ids, ends = self.ids.tolist(), np.cumsum(self.lengths).tolist()
        return [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    def take(self, texts: Sequence[int] | NDArray[np.int64]) -> "Tokens":
        """The texts with these numbers, [n]."""
        numbers = np.asarray(texts, dtype=np.int64)
        starts, lengths = (np.cumsum(self.lengths) - self.lengths)[numbers], self.lengths[numbers]
        return Tokens(gather_ranges(self.ids, starts, lengths), gather_ranges(self.flags, starts, lengths), lengths)

    def count(self, flag: np.uint8) -> NDArray[np.int64]:
        """Tokens of each text that have a flag: int64 [N]."""
        if not (self.flags & flag).any():
            return np.zeros(len(self), dtype=np.int64)
        owners = np.repeat(np.arange(len(self)), self.lengths)
        return np.bincount(owners[self.flags & flag != 0], minlength=len(self))

    def slots(self) -> Slots:
        """The pictures."""
        starts = np.flatnonzero(self.flags & PICTURE)[::SLOT]
        high, low, width, height = (self.ids[starts + number].astype(np.int64) for number in range(SLOT))
        owners = np.searchsorted(np.cumsum(self.lengths), starts, side="right")
        return Slots(starts, owners, high << 32 | low & 0xFFFFFFFF, np.stack([width, height], axis=1))


def slot_of(picture: Picture) -> list[int]:
    """The numbers of a picture among ids, each of int32: [SLOT]."""
    low = picture.key & 0xFFFFFFFF
    return [picture.key >> 32, low - (1 << 32) if low >= 1 << 31 else low, picture.width, picture.height]


class BatchTokens(Protocol):
    """The tokens of the T texts of a global batch: all B queries, then all documents, row by row.

    Attributes:
        num_documents: int64 [B], of each row.
        lengths: int64 [T], cached tokens of each text.
        keys: int64 [T], hashes of the texts without prompts, the same in every process.
    """

    num_documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.int64]

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts, as they are cached: what `Layout.tokenize` gives."""
        ...


class ComparedTexts(Protocol):
    """The texts that a loss compares: all B queries, then all documents, row by row, a row's positive first."""

    @property
    def num_documents(self) -> NDArray[np.int64]:
        """[B], of each row."""
        ...

    @property
    def keys(self) -> NDArray[np.int64]:
        """[T], equal exactly where two texts are equal, the same in every process."""
        ...


@dataclass(frozen=True, slots=True)
class InputTexts:
    """The `ComparedTexts` of inputs that hold several each, such as the chunks of a document.

    Attributes:
        order: int64 [T], the number of each text, in the order in which the encoder returns them, input by input.
        counts: int64 [n], texts of each input, at least one.
    """

    num_documents: NDArray[np.int64]
    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def owners(self) -> NDArray[np.int64]:
        """The input of each text: int64 [T]."""
        owners = np.empty_like(self.order)
        owners[self.order] = np.repeat(np.arange(len(self.counts)), self.counts)
        return owners

    def of_inputs(self, inputs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The texts that the encoder returns of these inputs, in order."""
        starts = np.cumsum(self.counts) - self.counts
        return gather_ranges(self.order, starts[inputs], self.counts[inputs])


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """What the encoder computes of a global batch: texts, or pairs of texts; `Layout.inputs` makes it.

    Attributes:
        num_queries: how many of the first inputs are queries; the others are documents, or pairs with a document.
        rows: int64 [n], the row of each input.
        lengths: int64 [n], tokens of each input.
        costs: int64 [n], those that the encoder computes, at least 1.
        sizes: of each part of the embeddings, int64 [n], the rows that the encoder returns of each input; None: one, or
            one of each of its `texts`.
        tokens: the tokens of inputs of one tower, int64 [m], which `TextTokenizer.make_chunk` takes.
        towers: int64 [n], the tower that encodes each input; None: there is one.
        further: what inputs cost besides tokens; None: nothing.
        texts: of inputs that hold several texts; None: an input is one text, or a pair.
    """

    num_queries: int
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    costs: NDArray[np.int64]
    sizes: tuple[NDArray[np.int64] | None, ...]
    tokens: Callable[[NDArray[np.int64]], Tokens]
    towers: NDArray[np.int64] | None = None
    further: FurtherCosts | None = None
    texts: InputTexts | None = None

    def compared(self, tokens: BatchTokens) -> ComparedTexts:
        """The texts that a loss compares, of a batch with these tokens."""
        return tokens if self.texts is None else self.texts

    @property
    def owners(self) -> NDArray[np.int64]:
        """The input of each encoded text: int64."""
        return np.arange(len(self.lengths)) if self.texts is None else self.texts.owners

    def texts_of(self, inputs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the texts that the encoder returns of these inputs, in order."""
        return inputs if self.texts is None else self.texts.of_inputs(inputs)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one batch over all ranks, in an order that does not depend on the number of ranks."""

    step: int
    rows: Sequence[Example]  # may read its elements lazily, so that a rank reads only its own
    source: int | None = None  # of all rows, if every batch has rows of one source
    row_sources: NDArray[np.int64] | None = None  # [B], of each row, if a batch has rows of several sources
    tokens: BatchTokens | None = None  # None until the data is tokenised
    has_loss_columns: bool = True  # whether rows hold scores, ids, labels or vectors besides texts
    has_ids: bool | None = None  # whether a document of any rank may have an id; None: `rows` says it
    # int64 [B], documents of other rows that `tokens` has of each row, after those of `rows`; None: none.
    num_batch_negatives: NDArray[np.int64] | None = None
    # int64 [E, 2], keys of a query and of a document of the batch that is a positive of it in any row of the data;
    # those of the drawn positives may be missing.
    known_answers: NDArray[np.int64] = field(default_factory=no_answers)

    def rows_of_rank(self, rank: int, size: int) -> tuple[Example, ...]:
        """The rows of rank `rank` of `size`: every `size`-th row, so that ranks differ by at most one."""
        return tuple(self.rows[rank::size])


class PackedKeys:
    """The tokens of packed texts that are attended to, where some are not: those at the beginning of each text.

    Not a dataclass, as `Packing`.

    Attributes:
        lengths: attended tokens of each text, at least one: [N].
        longest: the most of a text.
        longest_partial: tokens of the longest text that has tokens without attention.
        starts: int32 [N + 1], the offset of each text among the attended tokens, and the end.
        tokens: int64 [K], the attended tokens.
        attended: bool [T], whether a token is attended to.
        host_starts: `starts` on the host, as in `Packing`.
    """

    __slots__ = ("attended", "host_starts", "lengths", "longest", "longest_partial", "starts", "tokens")

    def __init__(
        self,
        lengths: tuple[int, ...],
        longest_partial: int,
        starts: Tensor,
        tokens: Tensor,
        attended: Tensor,
        host_starts: Tensor | None = None,
    ) -> None:
        self.lengths, self.longest_partial, self.starts, self.tokens = lengths, longest_partial, starts, tokens
        self.attended, self.longest = attended, max(lengths)
        self.host_starts = starts if host_starts is None else host_starts

    @classmethod
    def of(cls, lengths: NDArray[np.int64], key_lengths: NDArray[np.int64]) -> "PackedKeys | None":
        """From the tokens and the attended tokens of each text, int64 [N]; None if these are the same."""
        if np.array_equal(lengths, key_lengths):
            return None
        total = int(lengths.sum())
        positions = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        attended = positions < np.repeat(key_lengths, lengths)
        starts = np.concatenate([[0], np.cumsum(key_lengths)]).astype(np.int32)
        return cls(
            tuple(key_lengths.tolist()),
            int(lengths[key_lengths < lengths].max()),
            torch.from_numpy(starts),
            torch.from_numpy(np.flatnonzero(attended)),
            torch.from_numpy(attended),
        )

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PackedKeys":
        """The same with `change` applied to all tensors."""
        tensors = change(self.starts), change(self.tokens), change(self.attended)
        return PackedKeys(self.lengths, self.longest_partial, *tensors, self.host_starts)


class Packing:
    """Offsets of N texts that are concatenated into one row of T tokens, without padding.

    Not a dataclass: torch.compile guards the fields of a dataclass and would recompile for every batch.

    Attributes:
        lengths: tokens of each text, at least one: [N].
        longest: tokens of the longest text. Compiled code reads it; from `lengths` it would be compiled for each batch.
        starts: int32 [N + 1], the offset of each text, and the end.
        positions: int64 [1, T], position of each token in its text, from 0.
        keys: the tokens that are attended to; None: all.
        host_starts: `starts` on the host, for compiled code, which may read a tensor but no number of each text.
        masks: those of windows in attention, which the layers share, by their sizes.
    """

    __slots__ = ("host_starts", "keys", "lengths", "longest", "masks", "positions", "starts")

    def __init__(
        self,
        lengths: tuple[int, ...],
        starts: Tensor,
        positions: Tensor,
        keys: PackedKeys | None = None,
        host_starts: Tensor | None = None,
    ) -> None:
        self.lengths, self.starts, self.positions, self.keys = lengths, starts, positions, keys
        self.longest, self.host_starts = max(lengths), starts if host_starts is None else host_starts
        self.masks: dict[tuple[int, int, bool], Tensor] = {}

    @classmethod
    def of(cls, lengths: NDArray[np.int64], key_lengths: NDArray[np.int64]) -> "Packing":
        """From the tokens, at least one, and the attended tokens of each text: int64 [N]."""
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return cls(
            tuple(lengths.tolist()),
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(positions[None, :]),
            PackedKeys.of(lengths, key_lengths),
        )

    @property
    def key_lengths(self) -> tuple[int, ...] | None:
        """Attended tokens of each text, which come first in it; None: all."""
        return None if self.keys is None else self.keys.lengths

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of consecutive texts of equal length: (number of texts, length)."""
        return [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Packing":
        """The same with `change` applied to all tensors."""
        keys = None if self.keys is None else self.keys.map_tensors(change)
        return Packing(self.lengths, change(self.starts), change(self.positions), keys, self.host_starts)


@dataclass(frozen=True, slots=True)
class QueryWords:
    """The Q queries of a chunk whose weights are looked up, because the model does not encode queries.

    Attributes:
        words: int64 [K], the distinct tokens of each query, query by query.
        queries: int64 [K], the number of the query of each.
        count: Q.
        order: int64 [N], the index of each text of the chunk among the encoded texts, followed by the queries.
    """

    words: Tensor
    queries: Tensor
    count: int
    order: Tensor

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "QueryWords":
        """The same with `change` applied to all tensors."""
        return QueryWords(change(self.words), change(self.queries), self.count, change(self.order))


# Inputs of a vision tower besides pixels, by the names of its arguments.
PictureInputs: TypeAlias = Mapping[str, Tensor | Packing]


class PictureRows:
    """The pictures among the tokens of a chunk. Not a dataclass, as `Packing`.

    A chunk without pictures has one dummy instead in a pass in which chunks of other ranks have pictures, so that all
    ranks compute the vision tower; it has no rows.

    Attributes:
        rows: int64 [R], the flat index among the tokens of each row that the tower returns, in the order of its rows.
        inputs: of the tower besides pixels.
        positions: int64 [axes, N, L] or [axes, 1, T], the position ids of all tokens; None: those of texts.
        patches: those of each picture, or tile, [P]; empty: of a dummy.
    """

    __slots__ = ("inputs", "patches", "positions", "rows")

    def __init__(
        self, rows: Tensor, inputs: PictureInputs, positions: Tensor | None = None, patches: Sequence[int] = ()
    ) -> None:
        self.rows, self.inputs, self.positions, self.patches = rows, inputs, positions, tuple(patches)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PictureRows":
        """The same with `change` applied to all tensors."""
        inputs = {
            name: change(value) if isinstance(value, Tensor) else value.map_tensors(change)
            for name, value in self.inputs.items()
        }
        positions = None if self.positions is None else change(self.positions)
        return PictureRows(change(self.rows), inputs, positions, self.patches)


class Chunk:
    """What the encoder takes: N texts padded to L tokens, or packed into one row of T tokens.

    Not a dataclass: FSDP would copy the fields of a dataclass, number by number, in every forward pass.

    Attributes:
        ids: int64 [N, L], or [1, T].
        mask: the same shape, 1 where a token is real and attended to. Padding may be on either side.
        rows: index of each text in the list it is from; -1 for a dummy, whose embedding is dropped.
        pooled: the same shape, 1 where a token is pooled or has a lexical weight; None: all real tokens.
        packing: offsets of packed texts; None: the texts are padded.
        has_padding: whether the mask has a 0, known without reading it from a device.
        types: the same shape, the token types of pairs; None: all are 0.
        token_rows: int64 [R], the tokens that have a vector, or with `segments` are pooled, as flat indices in ids,
            text by text; None: a text has one vector, or all tokens of a packed chunk are pooled.
        sizes: int64 [N], vectors of each text; None: one.
        segments: offsets, among the tokens of `token_rows`, of what is pooled to a vector each; None: each text is.
        row_ids: int64 [R], the ids of these tokens, if texts are compared by them; see `Part`.
        query_words: texts that are not encoded; then only the others are in ids, and `rows` are those of all. None:
            there are none.
        tower: the number of the encoder's tower that takes it, always with all of its texts.
        decoded: what `Layout.decode` gives besides tokens, such as pixels, by name; nothing in checks of a backbone.
        grids: int64 [P, ...], the size of each picture in patches, on the host, where the encoder has to know it before
            it computes; None: it need not.
        pictures: those among the tokens; None: the pass has none on any rank.
    """

    __slots__ = (
        "decoded",
        "grids",
        "has_padding",
        "ids",
        "mask",
        "packing",
        "pictures",
        "pooled",
        "query_words",
        "row_ids",
        "rows",
        "segments",
        "sizes",
        "token_rows",
        "tower",
        "types",
    )

    def __init__(
        self,
        ids: Tensor,
        mask: Tensor,
        rows: tuple[int, ...] = (),
        *,
        pooled: Tensor | None = None,
        packing: Packing | None = None,
        has_padding: bool = True,
        types: Tensor | None = None,
        token_rows: Tensor | None = None,
        sizes: NDArray[np.int64] | None = None,
        segments: Packing | None = None,
        row_ids: Tensor | None = None,
        query_words: QueryWords | None = None,
        tower: int = 0,
        decoded: Mapping[str, Tensor] | None = None,
        grids: NDArray[np.int64] | None = None,
        pictures: PictureRows | None = None,
    ) -> None:
        self.ids, self.mask, self.rows, self.pooled = ids, mask, rows, pooled
        self.packing, self.has_padding, self.types = packing, has_padding, types
        self.token_rows, self.sizes, self.row_ids, self.query_words = token_rows, sizes, row_ids, query_words
        self.segments = segments
        self.tower, self.decoded, self.grids, self.pictures = tower, decoded or {}, grids, pictures

    @classmethod
    def of_one_token(cls, device: torch.device) -> "Chunk":
        """A dummy of the token 0."""
        ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
        return cls(ids, torch.ones_like(ids), (-1,))

    def replaced(self, **changes: Any) -> "Chunk":
        """The same with other values of these attributes."""
        return Chunk(**{name: getattr(self, name) for name in Chunk.__slots__} | changes)

    def to(self, device: torch.device) -> "Chunk":
        """The same chunk on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Chunk":
        """The same with `change` applied to all tensors."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return self.replaced(
            ids=change(self.ids),
            mask=change(self.mask),
            pooled=changed(self.pooled),
            packing=None if self.packing is None else self.packing.map_tensors(change),
            types=changed(self.types),
            token_rows=changed(self.token_rows),
            segments=None if self.segments is None else self.segments.map_tensors(change),
            row_ids=changed(self.row_ids),
            query_words=None if self.query_words is None else self.query_words.map_tensors(change),
            decoded={name: change(tensor) for name, tensor in self.decoded.items()},
            pictures=None if self.pictures is None else self.pictures.map_tensors(change),
        )

    @property
    def is_dummy(self) -> bool:
        """Whether it is computed only because other ranks have a chunk of its tower."""
        return self.rows == (-1,)

    @property
    def known_mask(self) -> Tensor | None:
        """The mask of padded texts; None if all tokens are real and attended to."""
        return self.mask if self.has_padding else None

    @property
    def lengths(self) -> Tensor:
        """Int64 [N], real tokens of each text; of padded texts, those that are attended to."""
        return self.mask.sum(dim=1) if self.packing is None else torch.tensor(self.packing.lengths)
