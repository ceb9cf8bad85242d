"""The layouts of static embedding models and of vision-language models; that of others is `data.tokens.Layout`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.data.images.files import PICTURES, BadPicture, decode_picture
from embedtrain.data.images.item import Picture
from embedtrain.data.images.layout import BLANK, PictureLayout
from embedtrain.data.images.processing import FixedSize, ImageProcessing, NaFlex, QwenPatches, Tiles
from embedtrain.data.tokens import Layout
from embedtrain.data.types import SLOT, Chunk, TextRole, Tokens
from embedtrain.errors import DataError
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
    """The tokens that a vision-language model has around items and pictures, as its chat template writes them.

    Attributes:
        before, after: ids around every item.
        image: the id that stands for each row of a picture.
        picture: all ids of a picture of so many rows and columns (`ImageProcessing.grid`), those rows among them.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    image: int
    picture: Callable[[int, int], Sequence[int]]


class VisionLayout(PictureLayout):
    """Items of texts and pictures in any order, as one row of tokens.

    Args:
        family: of the model.
        max_patches: of a chunk.
    """

    roles_differ: ClassVar[bool] = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processing: ImageProcessing,
        family: VisionFamily,
        markup: Markup,
        *,
        max_patches: int,
    ) -> None:
        super().__init__(tokenizer, processing.digest, special_tokens=False)
        self.processing, self.family, self.markup = processing, family, markup
        self.further_limits = (max_patches,)
        self._picture = lru_cache(1 << 12)(self._ids_of_grid)

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
        before, after = list(self.markup.before), list(self.markup.after)
        items = []
        for parts in self.parts(texts, limit):
            left = limit - len(before) - len(after) - sum(self._checked(p) for p in parts if isinstance(p, Picture))
            if left < 0:
                sizes = " and ".join(f"{part.width} x {part.height}" for part in parts if isinstance(part, Picture))
                raise DataError(
                    f"an item has pictures of {sizes} pixels, which have {limit - left} tokens with the markup, and "
                    f"model.max_length={limit}: raise it, or let the model's image processor make pictures smaller"
                )
            cut: list[list[int] | Picture] = [before]
            for part in parts:
                kept = part if isinstance(part, Picture) else part[:left]
                left -= 0 if isinstance(kept, Picture) else len(kept)
                cut.append(kept)
            items.append([*cut, after] if before or after or any(cut) else [[self.nothing]])
        return Tokens.of_parts(items)

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
            flags += [tokens.flags[begin:start], np.zeros(len(of_picture), dtype=np.uint8)]
            grids += self._grids(*size)
            begin, length = start + SLOT, length + len(of_picture)
        ids.append(tokens.ids[begin:])
        flags.append(tokens.flags[begin:])
        expanded = Tokens(np.concatenate(ids), np.concatenate(flags), self.num_tokens(tokens))
        chunk = super().chunk(expanded, rows, packed=packed)
        width = None if packed else chunk.ids.shape[1]
        return chunk.replaced(
            pictures=self.family.picture_rows(expanded.lengths, np.array(first_rows), np.array(grids), width),
            decoded={"pixels": torch.cat([self._pixels(picture) for picture in slots.pictures()])},
        )

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
        markup = self.markup
        return (*super().identity, markup.before, markup.after, markup.image, tuple(markup.picture(2, 2)))


def to_pixels(processing: ImageProcessing) -> Callable[[Any], Tensor]:
    """What a vision tower takes of `Chunk.decoded`, as numbers."""
    if isinstance(processing, QwenPatches | NaFlex):
        return lambda decoded: processing.patches(decoded["pixels"])
    return lambda decoded: processing.normalised(decoded["pixels"])
