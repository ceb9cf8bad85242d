"""Vision-language models: the rows of pictures, from a vision tower, among the packed tokens of a language model.

The vision tower is called by itself, for all pictures of a chunk at once. Its rows take the places of the image tokens
among the embeddings, at indices that the host knows, and the language model computes the packed row as it does that of
texts. Everything that depends on the sizes of pictures alone is computed on the host: positions along several axes, and
what a tower with patches of any number needs to know of its grids. So no pass reads anything back from the device.

Transformers' class does the same for padded items: its results, for single items, are those of the tests.

P: pictures of a chunk; R: their rows in the language model; T: tokens; H: hidden size.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from embedtrain.data.types import Chunk, Packing, PictureInputs, PictureRows, gather_ranges
from embedtrain.models.attention import known_padding

# The attention of a tower whose pictures have different numbers of patches, see `packing.py`. Transformers' classes
# call it once for all pictures, with their boundaries, if its name has "flash" in it, and once for each otherwise.
VISION_ATTENTION = "embedtrain_flash_vision"


# Float pixels, or patches, as a vision tower takes them, from `Chunk.decoded`, on the device.
ToPixels: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]


class VisionFamily(ABC):
    """What differs between families of vision-language models: names of modules, positions, inputs of the tower.

    Attributes:
        language: the module of the language model in the backbone.
        vision: the modules of the tower and of what projects its rows, each of which a pass calls once.
        first_position: the position id of an item's first token.
        attention: of the tower, a name of transformers' attention interface.

    Args:
        to_pixels: default: the pixels as they are.
        has_axes: whether positions have several axes, if those of the family have; else they count on through pictures.
    """

    language: ClassVar[str]
    vision: ClassVar[tuple[str, ...]]
    first_position: ClassVar[int] = 0
    attention: ClassVar[str] = "sdpa"

    def __init__(self, config: PretrainedConfig, to_pixels: ToPixels | None = None, *, has_axes: bool = True) -> None:
        self.vision_config, self.text_config, self.has_axes = config.vision_config, config.get_text_config(), has_axes
        self.to_pixels = to_pixels or (lambda decoded: decoded["pixels"])
        self.merge = self.patches_per_side(config)

    @abstractmethod
    def patches_per_side(self, config: PretrainedConfig) -> int:
        """Patches along each side of the square that is one token of the language model."""

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and earlier tokens."""
        return True

    @property
    def width(self) -> int:
        """The hidden size of the tower."""
        config = self.vision_config
        return int(getattr(config, "embed_dim", None) or config.hidden_size)  # that of Qwen2-VL is another one

    @property
    def attention_layers(self) -> list[tuple[int, int | None]]:
        """Numbers of layers of the tower, and the patches that a patch attends to in them; None: those of its grid."""
        config = self.vision_config
        return [(int(getattr(config, "depth", None) or config.num_hidden_layers), None)]

    @property
    def grid_patches(self) -> int | None:
        """Patches of every grid; None: any number."""
        return None

    def pixel_shape(self, grids: NDArray[np.int64]) -> tuple[int, ...]:
        """The shape of what the tower takes of grids, int64 [P, 2]."""
        config, side = self.vision_config, self.vision_config.image_size
        return len(grids), getattr(config, "num_channels", 3), side, side

    @property
    def cost_per_token(self) -> float:
        """What the tower computes of a token of the smallest picture, in tokens of the language model."""
        patches = int(np.prod(self.dummy_grid))
        return float(self.costs(np.array([patches]))[0]) * self.merge**2 / patches

    def costs(self, patches: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the tower computes of pictures with these patches, [P], in tokens of the language model, [P].

        Products with weights and with keys and values of the tower, over the products of a token with weights.
        """
        vision, text, width = self.vision_config, self.text_config, self.width
        inner = getattr(vision, "intermediate_size", None) or width * vision.mlp_ratio
        weights = 4 * width**2 + (3 if getattr(vision, "model_type", "").startswith("qwen2_5") else 2) * width * inner
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = text.num_attention_heads + (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        token = text.num_hidden_layers * text.hidden_size * (2 * heads * size + 3 * text.intermediate_size)
        counts, total = patches.astype(np.float64), np.zeros(len(patches))
        for layers, reach in self.attention_layers:
            seen = counts if reach is None else np.minimum(counts, reach)
            total += layers * counts * (weights + 2 * width * seen)
        return total / float(token)

    def language_model(self, backbone: nn.Module) -> nn.Module:
        """The part that computes tokens."""
        return backbone.get_submodule(self.language)

    def vision_modules(self, backbone: nn.Module) -> list[nn.Module]:
        """The parts that only passes with pictures compute."""
        return [backbone.get_submodule(name) for name in self.vision]

    def set_attention(self, backbone: nn.Module) -> None:
        """Let the tower compute attention as `attention` says, in place.

        Its configuration is copied before: classes share that of whoever made them, and refuse this name in it.
        """
        copies: dict[int, tuple[PretrainedConfig, PretrainedConfig]] = {}  # with the originals, which keep their ids
        for module in self.vision_modules(backbone):
            for part in module.modules():
                config = getattr(part, "config", None)
                if isinstance(config, PretrainedConfig):
                    _, own = copies.setdefault(id(config), (config, copy.copy(config)))
                    own._attn_implementation = self.attention
                    part.config = own

    def prepare(self, backbone: PreTrainedModel) -> None:
        """Set attention, and disable what an embedding model does not use, in place."""
        self.set_attention(backbone)
        tower: Any = self.vision_modules(backbone)[0]
        if getattr(tower, "head", None) is not None:  # of SigLIP, which pools a picture
            tower.use_head, tower.head, tower.config.vision_use_head = False, None, False

    def picture_rows(
        self,
        lengths: NDArray[np.int64],
        first_rows: NDArray[np.int64],
        grids: NDArray[np.int64],
        width: int | None = None,
    ) -> PictureRows:
        """The pictures of a chunk of items.

        Args:
            lengths: tokens of each item, with those of its pictures.
            first_rows: int64 [P], the token at which each picture, or tile, begins among all of them.
            grids: int64 [P, 2], its height and width in patches.
            width: tokens to which items are padded on the right; None: they are packed.
        """
        cells = grids // self.merge
        rows = gather_ranges(np.arange(lengths.sum()), first_rows, cells.prod(axis=1))
        positions = self.positions(lengths, first_rows, cells) if self.has_axes else None
        if width is not None:
            is_token = np.arange(width) < lengths[:, None]
            rows = np.flatnonzero(is_token)[rows]
            if positions is not None:
                padded = np.zeros((len(positions), *is_token.shape), dtype=np.int64)
                padded[:, is_token] = positions
                positions = padded
        elif positions is not None:
            positions = positions[:, None]
        return PictureRows(
            torch.from_numpy(rows),
            self.inputs(grids),
            None if positions is None else torch.from_numpy(positions),
            patches=grids.prod(axis=1).tolist(),
        )

    def dummy_rows(self) -> PictureRows:
        """A picture of `dummy_grid` that has no place among the tokens of a chunk."""
        return PictureRows(torch.zeros(0, dtype=torch.int64), self.inputs(np.array([self.dummy_grid])))

    @property
    def dummy_grid(self) -> tuple[int, int]:
        """Height and width, in patches, of the smallest picture that the tower takes."""
        return self.merge, self.merge

    def inputs(self, grids: NDArray[np.int64]) -> PictureInputs:
        """What the tower takes besides pixels, from grids in patches, int64 [P, 2]: height and width."""
        return {}

    def positions(
        self, lengths: NDArray[np.int64], first_rows: NDArray[np.int64], cells: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Position ids of all tokens, int64 [axes, T]; None: those of texts. `cells` are the tokens of each grid."""
        return None

    @abstractmethod
    def features(self, backbone: nn.Module, pixels: Tensor, inputs: PictureInputs) -> tuple[Tensor, Sequence[Tensor]]:
        """The rows of pictures, [R, H], and those that are added behind each of the first layers."""


class QwenVision(VisionFamily):
    """Qwen2-VL: patches of any number, merged 2 x 2, in one row; three axes of positions."""

    language, vision = "language_model", ("visual",)
    attention = VISION_ATTENTION

    def inputs(self, grids: NDArray[np.int64]) -> PictureInputs:
        """Boundaries and coordinates of the patches of each picture."""
        with_time, counts = _with_time(grids), grids.prod(axis=1)
        return {
            "grid_thw": with_time,
            "position_ids": get_vision_position_ids(with_time, self.vision_config.spatial_merge_size),
            "cu_seqlens": Packing.of(counts, counts),
        }

    def pixel_shape(self, grids: NDArray[np.int64]) -> tuple[int, ...]:
        """The values of each patch."""
        config = self.vision_config
        channels = getattr(config, "in_channels", 3)
        return int(grids.prod(axis=1).sum()), channels * config.temporal_patch_size * config.patch_size**2

    def patches_per_side(self, config: PretrainedConfig) -> int:
        """Those of the merger."""
        return int(config.vision_config.spatial_merge_size)

    def positions(
        self, lengths: NDArray[np.int64], first_rows: NDArray[np.int64], cells: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See `grid_positions`."""
        return grid_positions(lengths, first_rows, cells)

    def features(self, backbone: nn.Module, pixels: Tensor, inputs: PictureInputs) -> tuple[Tensor, Sequence[Tensor]]:
        """The class hands boundaries through to the attention, untouched: they are a packing."""
        longest = {
            name.replace("cu_", "max_").replace("seqlens", "seqlen"): packing.longest
            for name, packing in inputs.items()
            if isinstance(packing, Packing)
        }
        output = backbone.get_submodule("visual")(pixels, return_dict=True, **inputs, **longest)
        return output.pooler_output, getattr(output, "deepstack_features", None) or ()


class Qwen25Vision(QwenVision):
    """Qwen2.5-VL: most layers attend within windows of patches."""

    def inputs(self, grids: NDArray[np.int64]) -> PictureInputs:
        """Those of Qwen2-VL, and the windows."""
        config, inputs = self.vision_config, dict(super().inputs(grids))
        merge = config.spatial_merge_size
        index, ends = get_vision_window_index(_with_time(grids), merge, config.window_size, config.patch_size)
        counts = ends.diff().numpy().astype(np.int64)
        inputs["window_index"], inputs["cu_window_seqlens"] = index, Packing.of(counts, counts)
        return inputs

    @property
    def attention_layers(self) -> list[tuple[int, int | None]]:
        """Most layers attend within windows."""
        config, full = self.vision_config, len(self.vision_config.fullatt_block_indexes)
        return [(full, None), (config.depth - full, (config.window_size // config.patch_size) ** 2)]


class Qwen3Vision(QwenVision):
    """Qwen3-VL: positions are interpolated, and rows of inner layers are added behind the first language layers."""

    def prepare(self, backbone: PreTrainedModel) -> None:
        """Rows are added at indices: the class adds them by a mask, whose number of rows it reads from the device."""
        super().prepare(backbone)
        # A private name of transformers, checked on 5.17 and 5.23: (hidden states, where, rows) -> hidden states.
        language: Any = self.language_model(backbone)
        language._deepstack_process = add_rows

    def inputs(self, grids: NDArray[np.int64]) -> PictureInputs:
        """Those of Qwen2-VL, and how the learned positions of a square are interpolated for each grid."""
        config = self.vision_config
        indices, weights = get_vision_interpolation_indices_and_weights(
            _with_time(grids),
            num_grid_per_side=int(config.num_position_embeddings**0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=config.spatial_merge_size,
        )
        return {**super().inputs(grids), "interp_indices": indices, "interp_weights": weights}


class TileVision(VisionFamily):
    """Idefics3, SmolVLM and ModernVBERT: square tiles of one size, a batch."""

    language, vision = "text_model", ("vision_model", "connector")

    @property
    def is_causal(self) -> bool:
        """That of ModernVBERT is an encoder."""
        return bool(self.text_config.model_type != "modernbert")

    def patches_per_side(self, config: PretrainedConfig) -> int:
        """Those of the pixel shuffle."""
        return int(config.pixel_shuffle_factor if hasattr(config, "pixel_shuffle_factor") else config.scale_factor)

    @property
    def grid_patches(self) -> int:
        """Those of a tile."""
        return int(np.prod(self.dummy_grid))

    @property
    def dummy_grid(self) -> tuple[int, int]:
        """A whole tile."""
        return (self.vision_config.image_size // self.vision_config.patch_size,) * 2

    def features(self, backbone: nn.Module, pixels: Tensor, inputs: PictureInputs) -> tuple[Tensor, Sequence[Tensor]]:
        """All tiles are pictures: the class leaves out those of zeros, and reads their number from the device."""
        tower, connector = self.vision_modules(backbone)
        options: dict[str, Any] = {}
        if self.vision_config.model_type in ("idefics3_vision", "smolvlm_vision"):
            # The class makes this mask in host memory, and the copy to the device waits for all work queued there.
            options["patch_attention_mask"] = pixels.new_ones((len(pixels), *self.dummy_grid), dtype=torch.bool)
        hidden = tower(pixel_values=pixels, return_dict=True, **options).last_hidden_state
        rows: Tensor = connector(hidden)
        return rows.flatten(0, 1), ()


class PaliGemmaVision(VisionFamily):
    """PaliGemma: pictures of one size, a batch; positions count from 1."""

    language, vision = "language_model", ("vision_tower", "multi_modal_projector")
    first_position = 1

    @property
    def is_causal(self) -> bool:
        """An item is the prefix of its class."""
        return False

    def prepare(self, backbone: PreTrainedModel) -> None:
        """Let all tokens attend to each other, as in the prefix that the model was trained with, also with padding.

        Without token types the class (transformers 5.23) computes a causal mask for padded items, and none for others.
        """
        super().prepare(backbone)
        config: Any = self.language_model(backbone).config
        if getattr(config, "use_bidirectional_attention", None):
            config.is_causal = False

    def patches_per_side(self, config: PretrainedConfig) -> int:
        """A token has one patch."""
        return 1

    @property
    def grid_patches(self) -> int:
        """Those of a picture."""
        return int(np.prod(self.dummy_grid))

    @property
    def dummy_grid(self) -> tuple[int, int]:
        """A whole picture."""
        return (self.vision_config.image_size // self.vision_config.patch_size,) * 2

    def features(self, backbone: nn.Module, pixels: Tensor, inputs: PictureInputs) -> tuple[Tensor, Sequence[Tensor]]:
        """The rows of the last layer, projected."""
        tower, projector = self.vision_modules(backbone)
        rows: Tensor = projector(tower(pixels).last_hidden_state)
        return rows.flatten(0, 1), ()


# By `model_type`.
FAMILIES: dict[str, type[VisionFamily]] = {
    "qwen2_vl": QwenVision,
    "qwen2_5_vl": Qwen25Vision,
    "qwen3_vl": Qwen3Vision,
    "idefics3": TileVision,
    "smolvlm": TileVision,
    "modernvbert": TileVision,
    "paligemma": PaliGemmaVision,
}


def vision_family(
    config: PretrainedConfig, to_pixels: ToPixels | None = None, *, has_axes: bool = True
) -> VisionFamily | None:
    """The family of a vision-language model; None of other models."""
    family = FAMILIES.get(config.model_type)
    return None if family is None else family(config, to_pixels, has_axes=has_axes)


def embed_pictures(backbone: PreTrainedModel, family: VisionFamily, chunk: Chunk) -> dict[str, Any]:
    """Inputs of the language model for a chunk with pictures: embeddings with their rows, [N, L, H], and further ones.

    A dummy picture has no rows here: the tower computes it, its result is cut to nothing, and the gradients of its
    weights are zero. A product with zero would not be finite if the tower's result is not.
    """
    assert chunk.pictures is not None
    embeddings: Tensor = backbone.get_input_embeddings()(chunk.ids)
    is_trained = any(weight.requires_grad for part in family.vision_modules(backbone) for weight in part.parameters())
    # Without it, a frozen tower would keep what its backward pass needs.
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()), known_padding(False):
        pixels = family.to_pixels(chunk.decoded).to(embeddings.dtype)
        features, deeper = family.features(backbone, pixels, chunk.pictures.inputs)
    rows = chunk.pictures.rows
    features, *deeper = (part[: len(rows)].to(embeddings.dtype) for part in (features, *deeper))
    placed = embeddings.flatten(0, 1).index_copy(0, rows, features).view_as(embeddings)
    more = {"visual_pos_masks": rows, "deepstack_visual_embeds": deeper} if deeper else {}
    return {"inputs_embeds": placed, **more}


def add_rows(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """Hidden states [N, L, H] with features [R, H] added at the flat indices `rows`, int64 [R]."""
    flat = hidden.flatten(0, 1)
    return flat.index_add(0, rows, features.to(hidden.dtype)).view_as(hidden)


def grid_positions(
    lengths: NDArray[np.int64], first_rows: NDArray[np.int64], cells: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Positions of tokens as `get_rope_index` of the Qwen-VL classes computes them for pictures: int64 [3, T].

    Tokens of a text count on, along all axes. The tokens of a picture have the position at which it begins along the
    first axis, and count its rows and columns along the others; what follows begins behind the larger number of both.
    Arguments are those of `VisionFamily.picture_rows`, with `cells`, int64 [P, 2], the rows and columns in tokens.
    """
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    counts, sides = cells.prod(axis=1), cells.max(axis=1)
    # What the tokens of earlier pictures do not count, of this item and of those before.
    skipped = np.zeros(total + 1, dtype=np.int64)
    np.add.at(skipped, first_rows + counts, counts - sides)
    numbers = np.arange(total) - np.cumsum(skipped)[:total]
    positions = np.tile(numbers - np.repeat(numbers[starts], lengths), (3, 1))
    for first, (height, width) in zip(first_rows.tolist(), cells.tolist(), strict=True):
        tokens, base = slice(first, first + height * width), positions[0, first]
        positions[0, tokens] = base
        positions[1, tokens] = base + np.repeat(np.arange(height), width)
        positions[2, tokens] = base + np.tile(np.arange(width), height)
    return positions


def _with_time(grids: NDArray[np.int64]) -> Tensor:
    """Grids with one frame each: int64 [P, 3]."""
    return torch.from_numpy(np.concatenate([np.ones((len(grids), 1), dtype=np.int64), grids], axis=1))
