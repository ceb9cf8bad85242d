"""Small vision-language models with random weights, and items for them as token ids and pictures of random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk, Packing
from embedtrain.models.encoder import Encoder, PooledHead, prepare_backbone
from embedtrain.models.packing import enable_packing
from embedtrain.models.vision_language import vision_family

IMAGE, START, END = 150, 151, 152
HIDDEN = 32
_TEXT = {
    "vocab_size": 160, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PATCHES = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_IDS = {"image_token_id": IMAGE, "video_token_id": 153, "vision_start_token_id": START, "vision_end_token_id": END}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
_LLAMA = _TEXT | {"model_type": "llama"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE},
        "vision_config": _PATCHES | {"embed_dim": 16, "hidden_size": HIDDEN, "mlp_ratio": 2},
    } | _IDS,
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _ROPE},
        "vision_config": _PATCHES | {
            "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": HIDDEN, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    } | _IDS,
    "qwen3_vl": {
        "text_config": _TEXT | {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_interleaved": True}},
        "vision_config": _PATCHES | {
            "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": HIDDEN, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
    } | _IDS,
    "idefics3": {"text_config": _LLAMA, "vision_config": _SIGLIP, "image_token_id": IMAGE, "scale_factor": 2},
    "smolvlm": {"text_config": _LLAMA, "vision_config": _SIGLIP, "image_token_id": IMAGE, "scale_factor": 2},
    "modernvbert": {
        "text_config": _TEXT | {
            "model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 6, "global_attn_every_n_layers": 2,
            "cls_token_id": 1, "sep_token_id": 2,
        },
        "vision_config": _SIGLIP | {"model_type": "siglip_vision_model"}, "image_token_id": IMAGE,
        "pixel_shuffle_factor": 2,
    },
    "paligemma": {
        "text_config": _TEXT | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8},
        "vision_config": _SIGLIP | {
            "model_type": "siglip_vision_model", "projection_dim": HIDDEN, "vision_use_head": False,
        },
        "projection_dim": HIDDEN, "image_token_id": IMAGE,
    },
}  # fmt: skip
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# An item is a list of numbers of text tokens, and of pictures: height and width in patches (of Qwen), or tiles and 0.
SHAPES: list[list[int | tuple[int, int]]] = [
    [7], [3, (4, 6), 5], [(8, 4)], [2, (4, 4), 1, (2, 6), 4], [12], [1, (8, 4), 6], [7],
]  # fmt: skip


def vision_config(architecture: str) -> PretrainedConfig:
    """The configuration of a small model."""
    return AutoConfig.for_model(architecture, **CONFIGS[architecture])


def random_model(architecture: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Transformers' class with weights that move things, the same in every process."""
    torch.manual_seed(0)
    return randomise(AutoModel.from_config(vision_config(architecture)).to(dtype)).eval()


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """The model with wide weights: with the usual ones all vectors are nearly one."""
    for weight in model.parameters():
        noise = torch.randn(weight.shape)
        weight.data.copy_(noise * 0.15 if weight.dim() > 1 else weight.data + noise * 0.05)
    return model


def vision_encoder(architecture: str, dtype: torch.dtype = torch.float32, pooling: Pooling = Pooling.last) -> Encoder:
    """The encoder of `random_model`, for packed items."""
    model = random_model(architecture, dtype)
    family = vision_family(model.config)
    assert family is not None
    family.prepare(model)
    encoder = Encoder(prepare_backbone(model), PooledHead(HIDDEN, pooling, normalize=True), vision=family)
    enable_packing(encoder)
    return encoder.eval()


@dataclass
class Item:
    """Token ids, and of each picture, or tile: where it begins, its patches, and its pixels."""

    ids: list[int]
    first_rows: list[int]
    grids: list[tuple[int, int]]
    pixels: list[Tensor]


@cache
def items(architecture: str, seed: int = 0) -> list[Item]:
    """Items of SHAPES with random tokens and pixels, float64."""
    random = np.random.default_rng(seed)
    return [item_of(architecture, shape, random) for shape in SHAPES]


def item_of(architecture: str, shape: Sequence[int | tuple[int, int]], random: np.random.Generator) -> Item:
    """An item of random numbers."""
    item = Item([], [], [], [])
    for part in shape:
        if isinstance(part, int):
            item.ids += random.integers(3, 140, part).tolist()
            continue
        if architecture in QWEN:
            blocks, count = [part], part[0] * part[1] // 4
            pixels = random.normal(size=(1, part[0] * part[1], 3 * 2 * 4 * 4))
        else:
            tiles = 1 if architecture == "paligemma" else part[0] // 2
            blocks, count = [(4, 4)] * tiles, 16 if architecture == "paligemma" else 4
            pixels = random.normal(size=(tiles, 3, 16, 16))
        for grid, of_block in zip(blocks, pixels, strict=True):
            item.first_rows.append(len(item.ids) + 1)
            item.ids += [START, *[IMAGE] * count, END]
            item.grids.append(grid)
            item.pixels.append(torch.from_numpy(of_block))
    return item


def to_pixels(architecture: str, pixels: Sequence[Tensor]) -> Tensor:
    """Those of several pictures, as the tower takes them."""
    return torch.cat(list(pixels)) if architecture in QWEN else torch.stack(list(pixels))


def chunk_of(
    architecture: str, encoder: Encoder, chosen: Sequence[Item], *, dummy: bool = True, width: int | None = None
) -> Chunk:
    """Items as one chunk, packed, or padded to `width`; without pictures it has a dummy picture if `dummy`."""
    family = encoder.vision
    assert family is not None
    lengths = np.array([len(item.ids) for item in chosen])
    starts = np.cumsum(lengths) - lengths
    first_rows = [start + row for start, item in zip(starts.tolist(), chosen, strict=True) for row in item.first_rows]
    grids = [grid for item in chosen for grid in item.grids]
    pixels = [part for item in chosen for part in item.pixels]
    decoded, rows = {}, None
    if pixels:
        rows = family.picture_rows(lengths, np.array(first_rows), np.array(grids), width)
        decoded = {"pixels": to_pixels(architecture, pixels)}
    elif dummy:
        height, across = family.dummy_grid
        shape = (height * across, 96) if architecture in QWEN else (1, 3, height * 4, across * 4)
        rows, decoded = family.dummy_rows(), {"pixels": torch.zeros(shape)}
    numbers = tuple(range(len(chosen)))
    if width is None:
        ids = torch.tensor([[number for item in chosen for number in item.ids]])
        packing = Packing.of(lengths, lengths)
        mask = torch.ones_like(ids)
        return Chunk(ids, mask, numbers, packing=packing, has_padding=False, decoded=decoded, pictures=rows)
    ids = torch.tensor([item.ids + [0] * (width - len(item.ids)) for item in chosen])
    mask = torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64))
    return Chunk(ids, mask, numbers, decoded=decoded, pictures=rows)


def class_hidden(architecture: str, model: PreTrainedModel, item: Item) -> Tensor:
    """The hidden states [L, H] of a single item by transformers' class."""
    ids = torch.tensor([item.ids])
    inputs: dict[str, Any] = {}
    if item.pixels:
        pixels = to_pixels(architecture, item.pixels).to(model.dtype)
        if architecture in QWEN:
            grids = torch.tensor([(1, *grid) for grid in item.grids])
            inputs = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).long()}
        else:
            inputs["pixel_values"] = pixels if architecture == "paligemma" else pixels[None]
    if architecture in QWEN:
        model.rope_deltas = None
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).last_hidden_state[0]  # type: ignore[no-any-return]


def class_features(architecture: str, encoder: Encoder, chunk: Chunk) -> Tensor:
    """The last hidden state [H] of the item of a packed chunk, by the encoder's class as transformers calls it."""
    return class_states(architecture, encoder, chunk)[-1]


def class_states(architecture: str, encoder: Encoder, chunk: Chunk, image: int = IMAGE) -> Tensor:
    """All hidden states [L, H] of the item of a packed chunk; `image` is the token of pictures."""
    assert encoder.vision is not None
    inputs: dict[str, Any] = {}
    if chunk.pictures is not None:
        pixels = encoder.vision.to_pixels(chunk.decoded).to(encoder.backbone.dtype)
        if architecture in QWEN:
            is_image = (chunk.ids == image).long()
            inputs = {"pixel_values": pixels, "image_grid_thw": chunk.pictures.inputs["grid_thw"]}
            inputs["mm_token_type_ids"] = is_image
            if not encoder.vision.has_axes:
                inputs["position_ids"] = torch.arange(chunk.ids.shape[1]).expand(3, 1, -1)
        else:
            inputs["pixel_values"] = pixels if architecture == "paligemma" else pixels[None]
    backbone = encoder.backbone
    if architecture in QWEN:
        backbone.rope_deltas = None
    backbone.config._attn_implementation = "sdpa"
    for module in (part for tower in encoder.vision_modules for part in tower.modules()):
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            module.config._attn_implementation = "sdpa"
    if architecture == "qwen3_vl":  # the class's own way of adding rows
        language: Any = encoder.token_model
        vars(language).pop("_deepstack_process", None)
    return backbone(input_ids=chunk.ids, attention_mask=torch.ones_like(chunk.ids), **inputs).last_hidden_state[0]  # type: ignore[no-any-return]
