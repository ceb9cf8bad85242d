"""Which `ImageProcessing` a model directory has: `preprocessor_config.json` or `processor_config.json`, and defaults.

A file of settings may lack any of them. Those of a processor's class in transformers (5.17 to 5.23) stand here.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from embedtrain.data.images.processing import Channels, FixedSize, ImageProcessing, NaFlex, QwenPatches, Tiles
from embedtrain.errors import ModelError

SETTINGS_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
_MAX_BYTES = 1 << 20  # of a file of settings; those of the Hub have a thousand
_MAX_SIDE = 1 << 14  # of what a tower reads, so that settings cannot ask for any memory
_MAX_AREA, _MAX_PATCHES = 1 << 26, 1 << 16
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers


class _Settings:
    """Settings of a file, on top of the defaults of their processor's class; reads and checks one at a time."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._path = path
        # null in a file stands for the default, as in the processors.
        self._values = {**defaults, **{name: value for name, value in values.items() if value is not None}}

    def error(self, name: str, expected: str) -> ModelError:
        value = self._values.get(name)
        return ModelError(f"{self._path}: {name}={value!r} should be {expected}")

    def has(self, name: str) -> bool:
        return name in self._values

    def require(self, name: str, value: Any) -> None:
        """Raise ModelError for another value of a setting than the model works with."""
        if self._values.get(name) != value:
            raise self.error(name, json.dumps(value))

    def flag(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def number(self, name: str, low: int, high: int) -> int:
        value = self._values.get(name)
        if not _is_int(value) or not low <= value <= high:
            raise self.error(name, f"a whole number from {low} to {high:,}")
        return int(value)

    def size(self, name: str, *, square: bool, high: int = _MAX_SIDE) -> dict[str, int]:
        """Sides by their names. One number is a square, or the shortest edge; two are height and width."""
        value = self._values.get(name)
        if _is_int(value):
            value = {"height": value, "width": value} if square else {"shortest_edge": value}
        elif isinstance(value, list | tuple) and len(value) == 2:
            value = dict(zip(("height", "width"), value, strict=True))
        if not isinstance(value, dict):
            raise self.error(name, "a number, two numbers, or numbers by names such as height and width")
        sides = {side: number for side, number in value.items() if number is not None}
        if not all(_is_int(number) and 1 <= number <= high for number in sides.values()):
            raise self.error(name, f"whole numbers from 1 to {high:,}")
        return sides

    def fraction(self, name: str) -> float:
        value = self._values.get(name)
        if not _is_finite(value) or not 0 < value <= 1:
            raise self.error(name, "a number above 0, at most 1")
        return float(value)

    def channels(self, name: str) -> Channels:
        value = self._values.get(name)
        numbers = [value] * 3 if isinstance(value, int | float) else value
        if not isinstance(numbers, list | tuple) or len(numbers) != 3 or not all(map(_is_finite, numbers)):
            raise self.error(name, "three numbers")
        return float(numbers[0]), float(numbers[1]), float(numbers[2])

    def common(self, patch_size: int) -> dict[str, Any]:
        """The fields of `ImageProcessing`."""
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        if self.flag("do_normalize"):
            mean, std = self.channels("image_mean"), self.channels("image_std")
            if min(std) <= 0:
                raise self.error("image_std", "three numbers above 0")
        scale = 1.0
        if self.flag("do_rescale"):
            factor = self._values.get("rescale_factor", 1 / 255)
            if not _is_finite(factor) or factor <= 0:
                raise self.error("rescale_factor", "a number above 0")
            scale = float(factor)
        return {
            "resample": self.number("resample", 0, 5),
            "scale": scale,
            "mean": mean,
            "std": std,
            "patch_size": patch_size,
        }


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fixed_size(settings: _Settings, config: Any, *, square: bool) -> FixedSize:
    size = settings.size("size", square=square) if settings.flag("do_resize") else {}
    crop = None
    if settings.flag("do_center_crop"):
        sides = settings.size("crop_size", square=True)
        if set(sides) != {"height", "width"}:
            raise settings.error("crop_size", "a height and a width")
        crop = sides["height"], sides["width"]
    names = set(size)
    if names != {"height", "width"} and (crop is None or names not in _BEFORE_CROP):
        raise settings.error("size", "a height and a width; or a shortest_edge where do_center_crop is true")
    return FixedSize(**settings.common(_patch_size(config)), size=size, crop=crop)


_BEFORE_CROP: tuple[set[str], ...] = (set(), {"shortest_edge"}, {"shortest_edge", "longest_edge"})


def _squares(settings: _Settings, config: Any) -> ImageProcessing:
    return _fixed_size(settings, config, square=True)


def _edges(settings: _Settings, config: Any) -> ImageProcessing:
    return _fixed_size(settings, config, square=False)


def _shrunk(settings: _Settings, config: Any) -> ImageProcessing:
    """ConvNeXt: below 384 pixels, the centre of a picture that is larger by 1 / `crop_pct`."""
    settings.require("do_resize", True)
    sides = settings.size("size", square=False)
    if (side := sides.get("shortest_edge")) is None:
        raise settings.error("size", "a shortest_edge")
    common, square = settings.common(_patch_size(config)), {"height": side, "width": side}
    if side >= 384:
        return FixedSize(**common, size=square)
    before = int(side / settings.fraction("crop_pct"))
    return FixedSize(**common, size={"shortest_edge": before}, crop=(side, side))


def _naflex(settings: _Settings, config: Any) -> ImageProcessing:
    settings.require("do_resize", True)
    side = settings.number("patch_size", 1, 256)
    settings.require("patch_size", _patch_size(config))
    return NaFlex(**settings.common(side), max_patches=settings.number("max_num_patches", 1, _MAX_PATCHES))


def _qwen(settings: _Settings, config: Any) -> ImageProcessing:
    settings.require("do_resize", True)
    vision = _vision(config)
    for name, of_model in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if (value := getattr(vision, of_model, None)) is not None:
            settings.require(name, value)
    areas = settings.size("size", square=False, high=_MAX_AREA)
    for edge, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if settings.has(older):
            areas[edge] = settings.number(older, 1, _MAX_AREA)
        elif edge not in areas and older in areas:
            areas[edge] = areas[older]
    if not {"shortest_edge", "longest_edge"} <= set(areas):
        raise settings.error("size", "areas in pixels, shortest_edge and longest_edge")
    return QwenPatches(
        **settings.common(settings.number("patch_size", 1, 256)),
        merge_size=settings.number("merge_size", 1, 16),
        temporal_size=settings.number("temporal_patch_size", 1, 16),
        min_area=areas["shortest_edge"],
        max_area=areas["longest_edge"],
    )


def _tiles(settings: _Settings, config: Any) -> ImageProcessing:
    settings.require("do_resize", True)
    size = settings.size("size", square=False)
    if "longest_edge" in size:
        size = {"longest_edge": size["longest_edge"]}
    elif set(size) != {"height", "width"}:
        raise settings.error("size", "a longest_edge, or a height and a width")
    tile = settings.size("max_image_size", square=False)
    if "longest_edge" not in tile:
        raise settings.error("max_image_size", "a longest_edge")
    shuffle = getattr(_whole(config), "scale_factor", None) or getattr(_whole(config), "pixel_shuffle_factor", None)
    if not _is_int(shuffle):
        raise settings.error("max_image_size", "of a model whose configuration has a scale_factor")
    return Tiles(
        **settings.common(_patch_size(config)),
        size=size,
        tile=tile["longest_edge"],
        splits=settings.flag("do_image_splitting"),
        shuffle=shuffle,
    )


def _patch_size(config: Any) -> int:
    """Of the vision tower; 16 for a tower without patches, whose cost is counted as if it had them."""
    value = getattr(_vision(config), "patch_size", None)
    return value if _is_int(value) and value > 0 else 16


def _whole(config: Any) -> Any:
    """The configuration of the model with a vision tower, within that of late interaction (ColPali, ColQwen2)."""
    return getattr(config, "vlm_config", None) or config


def _vision(config: Any) -> Any:
    """The configuration of the vision tower, which may be the whole model."""
    return getattr(_whole(config), "vision_config", None) or config


class _Family(NamedTuple):
    """How the settings of a processor's class are read, and its defaults."""

    read: Callable[[_Settings, Any], ImageProcessing]
    defaults: dict[str, Any]


def _family(
    read: Callable[[_Settings, Any], ImageProcessing], *, resample: int, mean: Channels, std: Channels, **more: Any
) -> _Family:
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True}
    return _Family(read, {**steps, "resample": resample, "image_mean": mean, "image_std": std, **more})


_OPENAI: dict[str, Any] = {
    "resample": _BICUBIC,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
_HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_CLIP = _family(_edges, **_OPENAI, size={"shortest_edge": 224}, do_center_crop=True, crop_size=224)
_TILED = _family(
    _tiles,
    **_HALF,
    resample=_LANCZOS,
    size={"longest_edge": 4 * 364},
    max_image_size={"longest_edge": 364},
    do_image_splitting=True,
)
_FAMILIES = {
    "BitImageProcessor": _CLIP,
    "BlipImageProcessor": _family(_squares, **_OPENAI, size=384),
    "CLIPImageProcessor": _CLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "ConvNextImageProcessor": _family(
        _shrunk, **_HALF, resample=_BICUBIC, size={"shortest_edge": 384}, crop_pct=224 / 256
    ),
    # Its class resizes numbers with fractions, which differ from these bytes by a grey level at most.
    "DINOv3ViTImageProcessor": _family(_squares, **_IMAGENET, resample=_BILINEAR, size=224),
    "DeiTImageProcessor": _family(_squares, **_HALF, resample=_BICUBIC, size=256, do_center_crop=True, crop_size=224),
    "Idefics3ImageProcessor": _TILED,
    "Qwen2VLImageProcessor": _family(
        _qwen,
        **_OPENAI,
        size={"shortest_edge": 56**2, "longest_edge": 28**2 * 1280},
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
    ),
    "Siglip2ImageProcessor": _family(_naflex, **_HALF, resample=_BILINEAR, patch_size=16, max_num_patches=256),
    "SiglipImageProcessor": _family(_edges, **_HALF, resample=_BICUBIC, size={"height": 224, "width": 224}),
    "SmolVLMImageProcessor": _TILED,
    "ViTImageProcessor": _family(_squares, **_HALF, resample=_BILINEAR, size=224),
}
# Types of models whose older directories name no processor.
_OF_MODELS = {
    "clip": "CLIPImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "chinese_clip": "ChineseCLIPImageProcessor",
    "qwen2_vl": "Qwen2VLImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip_vision_model": "SiglipImageProcessor",
    "paligemma": "SiglipImageProcessor",
    "vit": "ViTImageProcessor",
    "deit": "DeiTImageProcessor",
    "dinov2": "BitImageProcessor",
}


def read_processing(directory: Path, config: Any) -> ImageProcessing:
    """The image processing of a model directory.

    Args:
        directory: has `processor_config.json` with `image_processor`, or else `preprocessor_config.json`.
        config: the model's configuration (transformers), which has the patch size and names older processors.

    Raises:
        ModelError: the directory names no processor that is known here, or has settings that cannot work.
    """
    return processing_of(*image_settings(directory, config), config)


def processing_of(path: Path, values: Mapping[str, Any], config: Any) -> ImageProcessing:
    """The same of settings that are known already; `path` is where they are from, for messages."""
    name = _processor_name(values, config)
    if name not in _FAMILIES:
        raise ModelError(f"{path}: the image processor {name} is not known: known are {', '.join(sorted(_FAMILIES))}")
    family = _FAMILIES[name]
    return family.read(_Settings(path, values, family.defaults), config)


def image_settings(directory: Path, config: Any) -> tuple[Path, dict[str, Any]]:
    """The file and the settings that transformers reads, with the name of a processor: the processor's file is first.

    Arguments and errors as of `read_processing`.
    """
    path = directory / PROCESSOR_FILE
    values = _read_json(path).get("image_processor") if path.is_file() else None
    if not isinstance(values, dict):
        path = directory / SETTINGS_FILE
        if not path.is_file():
            raise ModelError(f"{path} is missing: the directory does not say how pictures are read")
        values = _read_json(path)
    return path, values | {"image_processor_type": _processor_name(values, config)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it should contain an object")
    except (OSError, ValueError, RecursionError) as error:  # the last for deeply nested brackets
        raise ModelError(f"{path} cannot be read: {error}") from None
    return content


def _processor_name(values: Mapping[str, Any], config: Any) -> str:
    """The name of the processor's class, without the ending of one of its backends."""
    name = values.get("image_processor_type") or values.get("feature_extractor_type")
    if name is None:
        types = (getattr(part, "model_type", None) for part in (config, _vision(config)))
        name = next((_OF_MODELS[kind] for kind in types if kind in _OF_MODELS), f"of {config.model_type}")
    name = str(name).replace("FeatureExtractor", "ImageProcessor")
    return name.removesuffix("Fast").removesuffix("Pil")
