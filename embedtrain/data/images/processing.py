"""From a picture's size to its length, and from its pixels to what a vision tower reads.

The results are those of transformers' image processors with Pillow (5.17 to 5.23), for RGB pictures. The host only
resizes, and passes on bytes: normalising happens on the device, with a quarter of the bytes of float32 or an eighth
where each patch is repeated, as in Qwen-VL.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.columns import LARGEST_MAX_PIXELS
from embedtrain.data.images.files import BadPicture

if TYPE_CHECKING:
    from PIL.Image import Image

Channels: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class ImageProcessing(ABC):
    """What a model directory says about pictures. Callable from any thread.

    Sizes are in pixels, width before height as in Pillow; shapes of tensors have the height first.

    Attributes:
        resample: number of Pillow's filter for resizing.
        scale: what a value of 0 to 255 is multiplied with.
        mean, std: of each channel, subtracted and divided by after that.
        patch_size: side of a patch of the vision tower.
    """

    resample: int
    scale: float
    mean: Channels
    std: Channels
    patch_size: int

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches; of tiles where a picture is cut into tiles."""

    @abstractmethod
    def pixel_shape(self, width: int, height: int) -> tuple[int, ...]:
        """The shape of `pixels`, from the size of a picture alone."""

    @abstractmethod
    def pixels(self, image: "Image", width: int, height: int) -> Tensor:
        """The bytes of an RGB picture that go to the device: uint8, of shape `pixel_shape(width, height)`."""

    def num_patches(self, width: int, height: int) -> int:
        """Patches that the vision tower reads, without a class token."""
        rows, columns = self.grid(width, height)
        return rows * columns

    def num_tokens(self, width: int, height: int) -> int:
        """Rows that a picture has in the language model, without the markup around tiles.

        As many as patches in models without one.
        """
        return self.num_patches(width, height)

    @property
    @abstractmethod
    def most_patches(self) -> int:
        """A bound of `num_patches`, of pictures that `check` passes: for plans of memory before any is known."""

    @property
    def most_tokens(self) -> int:
        """A bound of `num_tokens`."""
        return self.most_patches

    @property
    def bytes_per_patch(self) -> float:
        """Bytes of `pixels` for each of `num_patches`, which the size of a picture hardly changes."""
        side = 1024
        return math.prod(self.pixel_shape(side, side)) / self.num_patches(side, side)

    def check(self, width: int, height: int) -> None:  # noqa: B027 - most families read any picture
        """Raise BadPicture if the model cannot read a picture of this size."""

    def normalised(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the tower reads of bytes: uint8 [..., 3, H, W] to floats of the same shape, on the same device.

        On a CPU equal to the processors bit for bit in float32. `dtype` is that of the result; numbers are computed in
        float32.
        """
        values = pixels.to(torch.float32)
        divisor = 1 / self.scale
        if math.isclose(divisor, round(divisor), rel_tol=1e-9):
            # The nearest float32, as the processors compute it in float64. A product with 1 / 255 is not.
            values.div_(round(divisor))
        else:
            values.mul_(self.scale)
        # With plain numbers: a tensor of three would be copied to the device first.
        if len(set(self.mean)) == len(set(self.std)) == 1:
            values.sub_(self.mean[0]).div_(self.std[0])
        else:
            for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
                values[..., channel, :, :].sub_(mean).div_(std)
        return values.to(dtype)

    @property
    def digest(self) -> str:
        """A digest of the settings that change pixels or lengths."""
        text = json.dumps({"family": type(self).__name__} | asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _resized(self, image: "Image", width: int, height: int) -> "Image":
        return image.resize((width, height), resample=self.resample)


@dataclass(frozen=True, kw_only=True)
class FixedSize(ImageProcessing):
    """Pictures of one size: CLIP, SigLIP, PaliGemma, ViT, DINOv2, DINOv3, ConvNeXt.

    `pixels` are uint8 [3, H, W].

    Attributes:
        size: `height` and `width`; or `shortest_edge`, with `longest_edge` or without, then `crop` decides the size;
            empty if pictures are cropped alone.
        crop: height and width of what is cut from the centre, with black where the picture is smaller; None: nothing.
    """

    size: Mapping[str, int]
    crop: tuple[int, int] | None = None

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches, the same for every picture."""
        _, rows, columns = self.pixel_shape(width, height)
        return rows // self.patch_size, columns // self.patch_size

    def pixel_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """3, and height and width, the same for every picture."""
        return 3, *(self.crop or (self.size["height"], self.size["width"]))

    @property
    def most_patches(self) -> int:
        """That of every picture."""
        return self.num_patches(1, 1)

    def check(self, width: int, height: int) -> None:
        """Raise BadPicture if a narrow picture would be huge before it is cropped."""
        columns, rows = self._size_before_crop(width, height)
        if columns * rows > LARGEST_MAX_PIXELS:
            raise BadPicture(
                f"it is too narrow: {width} x {height} pixels become {columns} x {rows} before they are cropped"
            )

    def pixels(self, image: "Image", width: int, height: int) -> Tensor:
        """The resized and cropped picture, uint8 [3, H, W]."""
        image = self._resized(image, *self._size_before_crop(width, height))
        if self.crop is not None:
            rows, columns = self.crop
            # Rounded down also below 0: the odd line of black is where the processors put it.
            left, top = (image.width - columns) // 2, (image.height - rows) // 2
            image = image.crop((left, top, left + columns, top + rows))
        return _channels_first(np.asarray(image))

    def _size_before_crop(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing (`get_resize_output_image_size`, `get_size_with_aspect_ratio`)."""
        if not self.size:
            return width, height
        if (target := self.size.get("shortest_edge")) is None:
            return self.size["width"], self.size["height"]
        short, long = min(width, height), max(width, height)
        exact: float = target
        if (limit := self.size.get("longest_edge")) is not None:
            if long / short * target > limit:
                exact = limit * short / long
                target = round(exact)
            if short == target:
                return width, height
        longer = int(exact * long / short)
        return (target, longer) if width <= height else (longer, target)


@dataclass(frozen=True, kw_only=True)
class NaFlex(ImageProcessing):
    """Pictures of any size, whose sides are scaled alike to at most `max_patches` patches: NaFlex of SigLIP 2.

    `pixels` are patches, row by row: uint8 [patches, 3, patch_size, patch_size]. Those of several pictures are
    concatenated before `patches`.
    """

    max_patches: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches (`get_image_size_for_max_num_patches`)."""
        return _naflex_grid(width, height, self.patch_size, self.max_patches)

    @property
    def most_patches(self) -> int:
        """`max_patches`."""
        return self.max_patches

    def pixel_shape(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Patches, 3, and the sides of a patch."""
        return self.num_patches(width, height), 3, self.patch_size, self.patch_size

    def check(self, width: int, height: int) -> None:
        """Raise BadPicture if a picture is so narrow that the class cannot scale it to `max_patches`."""
        if self.num_patches(width, height) > self.max_patches:
            raise BadPicture(f"it is too narrow: {width} x {height} pixels")

    def pixels(self, image: "Image", width: int, height: int) -> Tensor:
        """The patches of the resized picture, uint8 [patches, 3, patch_size, patch_size]."""
        (rows, columns), side = self.grid(width, height), self.patch_size
        values = np.asarray(self._resized(image, columns * side, rows * side))
        patches = values.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        return torch.from_numpy(np.ascontiguousarray(patches).reshape(-1, 3, side, side))

    def patches(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the tower reads of patches: float [patches, patch_size^2 * 3], the channels of a pixel side by side."""
        return self.normalised(pixels, dtype).permute(0, 2, 3, 1).flatten(1)


@lru_cache(1 << 16)  # a bisection of 24 steps takes 30 microseconds
def _naflex_grid(width: int, height: int, side: int, max_patches: int) -> tuple[int, int]:
    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        rows, columns = (max(1, math.ceil(length * scale / side)) for length in (height, width))
        if rows * columns <= max_patches:
            low = scale
        else:
            high = scale
    rows, columns = (max(1, math.ceil(length * low / side)) for length in (height, width))
    return rows, columns


@dataclass(frozen=True, kw_only=True)
class QwenPatches(ImageProcessing):
    """Pictures of about their own size, within two areas: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, ColQwen.

    `pixels` are patches, uint8 [patches, 3, patch_size, patch_size], in the order of the merger: those of a token
    one after the other, tokens row by row. Those of several pictures are concatenated before `patches`.

    Attributes:
        merge_size: patches along a side of a token.
        temporal_size: how often a patch is repeated, as the frames of a video would be.
        min_area, max_area: pixels of the resized picture; `shortest_edge` and `longest_edge` of `size`, in spite of
            their names.
    """

    merge_size: int
    temporal_size: int
    min_area: int
    max_area: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches, multiples of `merge_size` (`smart_resize`)."""
        side = self.patch_size * self.merge_size
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_area:
            shrink = math.sqrt((height * width) / self.max_area)
            rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
        elif rows * columns * side * side < self.min_area:
            growth = math.sqrt(self.min_area / (height * width))
            rows, columns = (math.ceil(length * growth / side) for length in (height, width))
        return rows * self.merge_size, columns * self.merge_size

    def pixel_shape(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Patches, 3, and the sides of a patch."""
        return self.num_patches(width, height), 3, self.patch_size, self.patch_size

    def num_tokens(self, width: int, height: int) -> int:
        """Rows in the language model: one for `merge_size`^2 patches."""
        return self.num_patches(width, height) // self.merge_size**2

    @property
    def most_patches(self) -> int:
        """As many as `max_area` has; more for a narrow picture, of a single row of tokens, or one that is enlarged."""
        return self.most_tokens * self.merge_size**2

    @property
    def most_tokens(self) -> int:
        """`most_patches` / `merge_size`^2."""
        side = self.patch_size * self.merge_size
        one_row = math.isqrt(_MAX_RATIO * self.max_area) // side
        # Sides a and b in tokens, both rounded up: (a + 1)(b + 1), where a b is fixed and a + b largest at _MAX_RATIO.
        long, short = math.sqrt(self.min_area * _MAX_RATIO) / side, math.sqrt(self.min_area / _MAX_RATIO) / side
        return max(self.max_area // side**2, one_row, math.floor((long + 1) * (short + 1)))

    def check(self, width: int, height: int) -> None:
        """Raise BadPicture if one side is more than 200 times the other."""
        if max(width, height) / min(width, height) > _MAX_RATIO:
            raise BadPicture(
                f"it has {width} x {height} pixels: Qwen-VL reads no side above {_MAX_RATIO} times the other"
            )

    def pixels(self, image: "Image", width: int, height: int) -> Tensor:
        """The patches of the resized picture, uint8 [patches, 3, patch_size, patch_size]."""
        (rows, columns), side, merge = self.grid(width, height), self.patch_size, self.merge_size
        values = np.asarray(self._resized(image, columns * side, rows * side))
        tokens = values.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        patches = tokens.transpose(0, 3, 1, 4, 6, 2, 5)
        return torch.from_numpy(np.ascontiguousarray(patches).reshape(-1, 3, side, side))

    def patches(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the tower reads of patches: float [patches, 3 * temporal_size * patch_size^2]."""
        values = self.normalised(pixels, dtype)
        return values.unsqueeze(2).expand(-1, -1, self.temporal_size, -1, -1).flatten(1)


_MAX_RATIO = 200  # of sides, in `smart_resize`


@dataclass(frozen=True, kw_only=True)
class Tiles(ImageProcessing):
    """Pictures in square tiles, row by row, and the whole of it as a last one: Idefics3, SmolVLM, ModernVBERT.

    `pixels` are uint8 [tiles, 3, tile, tile].

    Attributes:
        size: `longest_edge`, or `height` and `width`, that a picture is resized to first.
        tile: side of a tile.
        splits: whether pictures are cut into tiles; if not, each is one.
        shuffle: patches along a side of a token.
    """

    size: Mapping[str, int]
    tile: int
    splits: bool
    shuffle: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles, without the last one; 0 and 0 if the picture is one tile."""
        _, (columns, rows) = self._sizes(width, height)
        return (0, 0) if columns == rows == self.tile else (rows // self.tile, columns // self.tile)

    def num_tiles(self, width: int, height: int) -> int:
        """Tiles, with that of the whole picture."""
        rows, columns = self.grid(width, height)
        return rows * columns + 1

    def pixel_shape(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Tiles, 3, and the sides of a tile."""
        return self.num_tiles(width, height), 3, self.tile, self.tile

    def num_patches(self, width: int, height: int) -> int:
        """Patches that the vision tower reads, of all tiles."""
        return self.num_tiles(width, height) * (self.tile // self.patch_size) ** 2

    def num_tokens(self, width: int, height: int) -> int:
        """Rows in the language model: one for `shuffle`^2 patches. The markup between tiles is not counted."""
        return self.num_patches(width, height) // self.shuffle**2

    @property
    def most_patches(self) -> int:
        """Those of a square."""
        longest = self.size.get("longest_edge")
        square = (longest, longest) if longest else (self.size["width"], self.size["height"])
        return self.num_patches(*square)

    @property
    def most_tokens(self) -> int:
        """`most_patches` / `shuffle`^2."""
        return self.most_patches // self.shuffle**2

    def check(self, width: int, height: int) -> None:
        """Raise BadPicture if a picture is so narrow that a side of it is lost."""
        _, (columns, rows) = self._sizes(width, height)
        if not columns or not rows:
            raise BadPicture(f"it is too narrow: {width} x {height} pixels")

    def pixels(self, image: "Image", width: int, height: int) -> Tensor:
        """The tiles of the resized picture and the picture itself, uint8 [tiles, 3, tile, tile]."""
        first, second = self._sizes(width, height)
        image, side = self._resized(self._resized(image, *first), *second), self.tile
        rows, columns = self.grid(width, height)
        tiles: list[Image] = []
        for row in range(rows):
            tiles += [
                image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
                for column in range(columns)
            ]
        tiles.append(self._resized(image, side, side) if tiles else image)
        return torch.stack([_channels_first(np.asarray(tile)) for tile in tiles])

    def _sizes(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height after each of two resizes (`get_resize_output_image_size`, `resize_for_vision_encoder`)."""
        if (longest := self.size.get("longest_edge")) is not None:
            width, height = _along_longer(width, height, lambda _: longest, lambda side: side + side % 2)
            width, height = max(width, 1), max(height, 1)
            if max(width, height) > _LARGEST_TILED:
                width, height = _along_longer(width, height, lambda _: _LARGEST_TILED, lambda side: side)
                width, height = max(width, 1), max(height, 1)
        else:
            width, height = self.size["width"], self.size["height"]
        if not self.splits:
            return (width, height), (self.tile, self.tile)

        def whole_tiles(side: int) -> int:
            return math.ceil(side / self.tile) * self.tile

        return (width, height), _along_longer(width, height, whole_tiles, whole_tiles)


_LARGEST_TILED = 4096  # MAX_IMAGE_SIZE of the processors


def _along_longer(
    width: int, height: int, of_longer: Callable[[int], int], of_shorter: Callable[[int], int]
) -> tuple[int, int]:
    """Width and height with another longer side, and the other side in proportion, rounded by `of_shorter`."""
    ratio = width / height
    if width >= height:
        width = of_longer(width)
        return width, of_shorter(int(width / ratio))
    height = of_longer(height)
    return of_shorter(int(height * ratio)), height


def _channels_first(values: NDArray[np.uint8]) -> Tensor:
    """Bytes [H, W, 3] as a tensor [3, H, W] of its own memory."""
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
