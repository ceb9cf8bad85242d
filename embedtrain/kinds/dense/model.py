"""The layouts of static embedding models and of vision-language models; that of others is `data.tokens.Layout`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.data.images.files import PICTURES, BadPicture, decode_picture
from embedtrain.data.images.item import Picture, item_parts
from embedtrain.data.images.layout import BLANK, PictureLayout
from embedtrain.data.images.processing import FixedSize, ImageProcessing, NaFlex, QwenPatches, Tiles
from embedtrain.data.tokens import UNLIMITED, FastTokenizer, Layout
from embedtrain.data.types import SLOT, BatchTokens, Chunk, EncoderInputs, TextRole, Tokens
from embedtrain.errors import DataError
from embedtrain.formats.chat_template import ItemTemplate, Piece
from embedtrain.models.vision_language import VisionFamily


class StaticLayout(Layout):
    """Texts without special tokens, as sentence-transformers' StaticEmbedding has them.

    A text without tokens has one that is not pooled, so that its vector is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, special_tokens=False)
        self.nothing, self.caches_flags = int(tokenizer.pad_token_id or 0), True

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts; that of a text without tokens is flagged NOT_POOLED."""
        ids = self.fast.ids(list(texts), limit) if texts else []
        tokens = Tokens.of([text or [self.nothing] for text in ids])
        return Tokens.with_unpooled(tokens.ids, tokens.lengths, np.array([not text for text in ids], dtype=np.int64))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (~self.nothing, "no special tokens")


@dataclass(frozen=True)
class Markup:
    """What a vision-language model reads around items, and in place of pictures.

    Attributes:
        template: what stands around an item.
        image: the id that stands for each row of a picture.
        picture: all ids of a picture of so many rows and columns (`ImageProcessing.grid`), those rows among them.
    """

    template: ItemTemplate
    image: int
    picture: Callable[[int, int], Sequence[int]]


class VisionLayout(PictureLayout):
    """Items of texts and pictures in any order, as one row of tokens.

    A text and what the template writes beside it become tokens together, as in processors of transformers: a tokenizer
    may join the line break before a text with one that the text begins with. The prompt is not a part of the item.

    Args:
        family: of the model.
        max_patches: of a chunk.
    """

    roles_differ: ClassVar[bool] = False
    joins_pictures: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processing: ImageProcessing,
        family: VisionFamily,
        markup: Markup,
        *,
        max_patches: int = UNLIMITED,
    ) -> None:
        super().__init__(tokenizer, processing.digest, special_tokens=False)
        self.processing, self.family, self.markup = processing, family, markup
        self.further_limits = (max_patches,)
        self._picture = lru_cache(1 << 12)(self._ids_of_grid)
        self._cost = lru_cache(1 << 16)(self._cost_of_size)
        self._text_ids = lru_cache(1 << 10)(lambda text: self.fast.ids([text], UNLIMITED)[0])
        self.before, self.after = self._special_ids() if markup.template.special_tokens else ([], [])

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """Those that the tokenizer adds to a text."""
        own = self._text_ids("a")
        ids = FastTokenizer(self.tokenizer).ids(["a"], UNLIMITED)[0]
        start = next((n for n in range(len(ids)) if ids[n : n + len(own)] == own), 0)
        return ids[:start], ids[start + len(own) :]

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of items with slots of their pictures; only texts are cut, from the last one on.

        A DataError for pictures that alone have more tokens than `limit`, or that the model cannot read.
        """
        prompts_of_texts = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        items = [
            self.around(prompt, item_parts(text.removeprefix(prompt)), role)
            for text, prompt in zip(texts, prompts_of_texts, strict=True)
        ]
        ids = iter(
            self.fast.ids(["".join(part) for item in items for part in item if isinstance(part, Piece)], UNLIMITED)
        )
        tokenized = []
        for item in items:
            parts = [part if isinstance(part, Picture) else next(ids) for part in item]
            length = sum(self._checked(part) if isinstance(part, Picture) else len(part) for part in parts)
            excess = length + len(self.before) + len(self.after) - limit
            if excess > 0:
                parts = self._cut(item, parts, excess, limit)
            parts = [self.before, *parts, self.after]
            tokenized.append(parts if any(parts) else [[self.nothing]])
        return Tokens.of_parts(tokenized)

    def around(self, prompt: str, parts: Sequence[str | Picture], role: TextRole) -> list[Piece | Picture]:
        """The texts and pictures of an item, whose `parts` are without the prompt, and what stands around them."""
        return self.markup.template.around(prompt, parts)

    def _cut(
        self, item: Sequence[Piece | Picture], parts: Sequence[list[int] | Picture], excess: int, limit: int
    ) -> list[list[int] | Picture]:
        """Without so many tokens of the texts, of the last one first; what stands around them stays."""
        cut = list(parts)
        for number, piece in reversed(list(enumerate(item))):
            ids = cut[number]
            if isinstance(piece, Picture) or isinstance(ids, Picture):
                continue
            before, after = len(self._text_ids(piece.before)), len(self._text_ids(piece.after))
            end = len(ids) - after
            fewer = min(excess, max(0, end - before))
            cut[number], excess = ids[: end - fewer] + ids[end:], excess - fewer
        if excess > 0:
            pictures = [part for part in item if isinstance(part, Picture)]
            sizes = " and ".join(f"{part.width} x {part.height}" for part in pictures)
            what = f"pictures of {sizes} pixels, which have" if sizes else "a prompt, which has"
            where = next((f"{PICTURES.place(part)}: " for part in pictures if part != BLANK), "")
            can_shrink = bool(sizes) and isinstance(self.processing, QwenPatches)
            hint = "raise it" + ", or lower model.image.max_pixels" * can_shrink
            raise DataError(
                f"{where}an item has {what} {limit + excess} tokens with what stands around them, and "
                f"model.max_length={limit}: {hint}"
            )
        return cut

    def _checked(self, picture: Picture) -> int:
        """The tokens of a picture that the model can read."""
        if picture != BLANK:
            try:
                self.processing.check(picture.width, picture.height)
            except BadPicture as bad:
                raise DataError(f"{PICTURES.place(picture)}: {bad}") from None
        return len(self._ids(picture.width, picture.height)[0])

    def _ids(self, width: int, height: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All ids of a picture, and where its grids of rows begin among them: one, or one for each tile."""
        return self._picture(*self.processing.grid(width, height))

    def _ids_of_grid(self, rows: int, columns: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        ids = np.array(self.markup.picture(rows, columns), dtype=np.int32)
        is_row = np.concatenate([[False], ids == self.markup.image])
        return ids, np.flatnonzero(is_row[1:] & ~is_row[:-1])

    def _grids(self, width: int, height: int) -> list[tuple[int, int]]:
        """Patches of each grid, high and wide."""
        if not isinstance(self.processing, Tiles):
            return [self.processing.grid(width, height)]
        side = self.processing.tile // self.processing.patch_size
        return [(side, side)] * self.processing.num_tiles(width, height)

    def num_tokens(self, tokens: Tokens) -> NDArray[np.int64]:
        """Tokens with those of pictures instead of their slots."""
        slots, counts = tokens.slots(), tokens.lengths.copy()
        extra = [len(self._ids(width, height)[0]) - SLOT for width, height in slots.sizes.tolist()]
        np.add.at(counts, slots.owners, np.array(extra, dtype=np.int64))
        return counts

    def chunk_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """Of a picture, what the vision tower computes besides its tokens."""
        slots, costs = tokens.slots(), self.num_tokens(tokens).astype(np.float64)
        np.add.at(costs, slots.owners, [self._cost(*size) for size in slots.sizes.tolist()])
        return np.ceil(costs).astype(np.int64)

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """With `chunk_costs`."""
        inputs = super().inputs(tokens, max_length)
        return replace(inputs, costs=self.chunk_costs(inputs.tokens(np.arange(len(inputs.lengths)))))

    def _cost_of_size(self, width: int, height: int) -> float:
        patches = np.array([rows * columns for rows, columns in self._grids(width, height)])
        return float(self.family.costs(patches).sum())

    def further_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """The patches of each item, int64 [N, 1]."""
        slots, patches = tokens.slots(), np.zeros((len(tokens), 1), dtype=np.int64)
        counts = [self.processing.num_patches(width, height) for width, height in slots.sizes.tolist()]
        np.add.at(patches[:, 0], slots.owners, np.array(counts, dtype=np.int64))
        return patches

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Items as one chunk, with the pixels of their pictures, whose files are read now."""
        slots = tokens.slots()
        if not len(slots):
            return super().chunk(tokens, rows, packed=packed)
        ids, flags, first_rows = list[NDArray[np.int32]](), list[NDArray[np.uint8]](), list[int]()
        grids, begin, length = list[tuple[int, int]](), 0, 0
        for start, size in zip(slots.starts.tolist(), slots.sizes.tolist(), strict=True):
            of_picture, firsts = self._ids(*size)
            length += start - begin
            first_rows += (firsts + length).tolist()
            ids += [tokens.ids[begin:start], of_picture]
            flags += [tokens.flags[begin:start], self.picture_flags(of_picture)]
            grids += self._grids(*size)
            begin, length = start + SLOT, length + len(of_picture)
        ids.append(tokens.ids[begin:])
        flags.append(tokens.flags[begin:])
        expanded = Tokens(np.concatenate(ids), np.concatenate(flags), self.num_tokens(tokens))
        chunk = super().chunk(expanded, rows, packed=packed)
        width = None if packed else chunk.ids.shape[1]
        return chunk.replaced(
            pictures=self.family.picture_rows(expanded.lengths, np.array(first_rows), np.array(grids), width),
            decoded={"pixels": self._all_pixels(slots.pictures(), grids)},
        )

    def picture_flags(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The flags of all ids of a picture."""
        return np.zeros(len(ids), dtype=np.uint8)

    def _all_pixels(self, pictures: Sequence[Picture], grids: Sequence[tuple[int, int]]) -> Tensor:
        """The bytes of pictures, in memory that is allocated once: all of a chunk may be gigabytes."""
        is_patches = isinstance(self.processing, QwenPatches)
        count = sum(rows * columns for rows, columns in grids) if is_patches else len(grids)
        width, height = pictures[0].width, pictures[0].height
        shape = self.processing.pixel_shape(width, height)
        values = shape if isinstance(self.processing, FixedSize) else shape[1:]
        pixels, begin = torch.empty((count, *values), dtype=torch.uint8), 0
        for picture in pictures:
            part = self._pixels(picture)
            pixels[begin : begin + len(part)] = part
            begin += len(part)
        return pixels

    def with_further(self, chunk: Chunk) -> Chunk:
        """The chunk with a picture of zeros whose rows stand nowhere, if it has none."""
        if chunk.pictures is not None:
            return chunk
        shape = self.processing.pixel_shape(BLANK.width, BLANK.height)
        if isinstance(self.processing, QwenPatches):
            shape = (int(np.prod(self.family.dummy_grid)), *shape[1:])
        elif isinstance(self.processing, Tiles):
            shape = (1, *shape[1:])
        else:
            shape = (1, *shape)
        pixels = torch.zeros(shape, dtype=torch.uint8)
        return chunk.replaced(pictures=self.family.dummy_rows(), decoded={"pixels": pixels})

    def _pixels(self, picture: Picture) -> Tensor:
        """The bytes of a picture, which those of others are concatenated to."""
        width, height = picture.width, picture.height
        if picture == BLANK:
            pixels = torch.zeros(self.processing.pixel_shape(width, height), dtype=torch.uint8)
        else:
            pixels = self.processing.pixels(decode_picture(PICTURES.place(picture), picture), width, height)
        return pixels[None] if isinstance(self.processing, FixedSize) else pixels

    def longest_text(self, max_length: int) -> int:
        """`max_length`, which no picture exceeds."""
        return max_length

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens besides those of texts and the sizes of pictures."""
        markup, around = self.markup, (tuple(self.before), tuple(self.after))
        return (*super().identity, str(markup.template), *around, markup.image, tuple(markup.picture(2, 2)))


def to_pixels(processing: ImageProcessing) -> Callable[[Any], Tensor]:
    """What a vision tower takes of `Chunk.decoded`, as numbers."""
    if isinstance(processing, QwenPatches | NaFlex):
        return lambda decoded: processing.patches(decoded["pixels"])
    return lambda decoded: processing.normalised(decoded["pixels"])
