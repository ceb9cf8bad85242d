"""Lengths and pixels from settings of a model directory, compared with transformers' image processors with Pillow."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from embedtrain.data.images.files import BadPicture
from embedtrain.data.images.processing import FixedSize, ImageProcessing, NaFlex, QwenPatches, Tiles
from embedtrain.data.images.settings import read_processing
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from tests.pretend_cuda.device import host_reads

Image = pytest.importorskip("PIL.Image")

VISION = SimpleNamespace(model_type="vision", patch_size=16, spatial_merge_size=2, temporal_patch_size=2)
CONFIG = SimpleNamespace(model_type="model", scale_factor=2, vision_config=VISION)
# Of each family: what the class of transformers is built with. Small targets, so that noise is resized quickly.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": ("clip", "CLIP", {}),
    "clip_odd": ("clip", "CLIP", {"size": {"shortest_edge": 50}, "crop_size": {"height": 61, "width": 40}}),
    "clip_edges": ("clip", "CLIP", {"size": {"shortest_edge": 50, "longest_edge": 70}, "crop_size": 60}),
    "clip_crop_alone": ("clip", "CLIP", {"do_resize": False, "crop_size": 32}),
    "chinese_clip": ("chinese_clip", "ChineseCLIP", {"size": {"height": 64, "width": 48}, "do_center_crop": False}),
    "dinov2": ("bit", "Bit", {"size": {"shortest_edge": 37}, "crop_size": 32}),
    "siglip": ("siglip", "Siglip", {"size": {"height": 64, "width": 96}}),
    "paligemma": ("siglip", "Siglip", {"size": {"height": 112, "width": 112}, "resample": 3}),
    "unscaled": ("siglip", "Siglip", {"do_rescale": False, "do_normalize": False}),
    "scaled_otherwise": ("siglip", "Siglip", {"rescale_factor": 0.0078, "image_mean": [1.0, 0.9, 0.8]}),
    "vit": ("vit", "ViT", {"resample": 2}),
    "deit": ("deit", "DeiT", {}),
    "convnext": ("convnext", "ConvNext", {"size": {"shortest_edge": 50}}),
    "convnext_384": ("convnext", "ConvNext", {}),
    "blip": ("blip", "Blip", {"size": {"height": 96, "width": 96}}),
    "naflex": ("siglip2", "Siglip2", {"max_num_patches": 64}),
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", {"patch_size": 14, "max_pixels": 50_000}),
    "qwen3_vl": (
        "qwen2_vl",
        "Qwen2VL",
        {
            "patch_size": 16,
            "size": {"shortest_edge": 4096, "longest_edge": 64 * 1024},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    ),
    "idefics3": ("idefics3", "Idefics3", {"size": {"longest_edge": 300}, "max_image_size": {"longest_edge": 96}}),
    "one_tile": ("idefics3", "Idefics3", {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 96}}),
    "smolvlm": ("smolvlm", "SmolVLM", {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}}),
    "unsplit": ("idefics3", "Idefics3", {"do_image_splitting": False, "max_image_size": {"longest_edge": 64}}),
}
# Whose numbers float32 rounds otherwise: the processor scales in float64.
ROUNDED = {"scaled_otherwise"}


Case: TypeAlias = tuple[str, str, dict[str, Any]]


def processor(case: Case) -> Any:
    """The image processor of transformers with Pillow, without torchvision."""
    module, family, options = case
    package = pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(package, f"{family}ImageProcessorPil")(**options)


def processing_of(name: str, folder: Path, *, case: Case | None = None, **config: Any) -> tuple[Any, ImageProcessing]:
    """The processor of a case, and what is read of the directory that it saves."""
    theirs = processor(case or CASES[name])
    theirs.save_pretrained(folder)
    vision = SimpleNamespace(**vars(VISION) | {"patch_size": getattr(theirs, "patch_size", None) or 16})
    return theirs, read_processing(folder, SimpleNamespace(**vars(CONFIG) | {"vision_config": vision} | config))


def sizes(count: int, largest: int = 3000) -> list[tuple[int, int]]:
    """Widths and heights, the same in every run: of any ratio up to 150."""
    rng = np.random.default_rng(7)
    drawn = np.exp(rng.uniform(np.log(20), np.log(largest), (count, 2))).astype(int)
    fixed = [(1, 1), (17, 41), (28, 28), (30, min(largest, 3000)), (224, 224), (640, 427), (801, 599)]
    return [*fixed, *map(tuple, drawn.tolist())][:count]


def noise(width: int, height: int, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    theirs, ours = processing_of(name, tmp_path)
    for number, (width, height) in enumerate(sizes(14, 500)):
        image = noise(width, height, number)
        expected = theirs(images=[image], return_tensors="pt")
        pixels = ours.pixels(image, width, height)
        assert pixels.dtype == torch.uint8
        assert pixels.is_contiguous()
        assert tuple(pixels.shape) == ours.pixel_shape(width, height)
        values = expected["pixel_values"]
        if isinstance(ours, QwenPatches):
            result = ours.patches(pixels)
            assert expected["image_grid_thw"].tolist() == [[1, *ours.grid(width, height)]]
        elif isinstance(ours, NaFlex):
            result = ours.patches(pixels)
            assert expected["spatial_shapes"].tolist() == [list(ours.grid(width, height))]
            assert int(expected["pixel_attention_mask"].sum()) == len(result) == ours.num_patches(width, height)
            values = values[0, : len(result)]
        else:
            result = ours.normalised(pixels)
            values = values[0]
        assert result.shape == values.shape
        if name in ROUNDED:
            torch.testing.assert_close(result, values.float(), rtol=0, atol=1e-6)
        else:
            assert torch.equal(result, values.float()), f"{width} x {height}"


@pytest.mark.parametrize("name", [name for name, (module, _, _) in CASES.items() if module == "qwen2_vl"])
def test_lengths_of_qwen(name: str, tmp_path: Path) -> None:
    theirs, ours = processing_of(name, tmp_path)
    for width, height in sizes(200):
        patches = theirs.get_number_of_image_patches(height, width)
        assert ours.num_patches(width, height) == patches
        assert ours.num_tokens(width, height) == patches // 4
        assert ours.pixel_shape(width, height)[0] == patches


def test_lengths_of_naflex(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.models.siglip2.image_processing_pil_siglip2")
    for side, most in ((16, 256), (14, 64), (16, 1024)):
        ours = NaFlex(resample=2, scale=1.0, mean=(0,) * 3, std=(1,) * 3, patch_size=side, max_patches=most)
        for width, height in sizes(200):
            target = module.get_image_size_for_max_num_patches(height, width, side, most)
            rows, columns = ours.grid(width, height)
            assert (rows * side, columns * side) == target
            assert ours.num_tokens(width, height) == rows * columns <= most


@pytest.mark.parametrize("longest", [2048, 1536, 5000, 364])
def test_lengths_of_tiles(longest: int, tmp_path: Path) -> None:
    """Real sizes of tiles; the processor's own count is of grids, 0 for a picture of one tile."""
    module = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    theirs = module.Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": 512})
    theirs.save_pretrained(tmp_path)
    ours = read_processing(tmp_path, SimpleNamespace(**vars(CONFIG) | {"scale_factor": 4}))
    assert isinstance(ours, Tiles)
    for width, height in sizes(200):
        tiles, rows, columns = theirs.get_number_of_image_patches(height, width)
        assert ours.grid(width, height) == (rows, columns)
        assert ours.num_tiles(width, height) == max(tiles, 1)
        assert ours.num_patches(width, height) == max(tiles, 1) * 1024
        assert ours.num_tokens(width, height) == max(tiles, 1) * 64


def test_lengths_of_one_size(tmp_path: Path) -> None:
    _, ours = processing_of("siglip", tmp_path)
    assert isinstance(ours, FixedSize)
    assert {(ours.grid(*size), ours.num_patches(*size), ours.num_tokens(*size)) for size in sizes(20)} == {
        ((4, 6), 24, 24)
    }


@pytest.mark.parametrize("name", ["clip", "naflex", "qwen2_vl", "qwen3_vl", "enlarging", "idefics3", "unsplit", "odd"])
def test_no_picture_has_more_than_the_bound(name: str, tmp_path: Path) -> None:
    options = {"size": {"shortest_edge": 50_000, "longest_edge": 60_000}, "patch_size": 16}
    others: dict[str, Case] = {
        "enlarging": ("qwen2_vl", "Qwen2VL", options),
        "odd": ("idefics3", "Idefics3", {"size": {"longest_edge": 4999}, "max_image_size": {"longest_edge": 500}}),
    }
    _, ours = processing_of(name, tmp_path, case=others.get(name))
    rng = np.random.default_rng(5)
    narrow = [(length, round(length * 199.9)) for length in rng.integers(1, 300, 100).tolist()]
    patches, tokens = 0, 0
    for width, height in [*sizes(300), *narrow, *((height, width) for width, height in narrow)]:
        try:
            ours.check(width, height)
        except BadPicture:
            continue
        patches = max(patches, ours.num_patches(width, height))
        tokens = max(tokens, ours.num_tokens(width, height))
    assert 0.6 * ours.most_patches <= patches <= ours.most_patches
    assert 0.6 * ours.most_tokens <= tokens <= ours.most_tokens


def test_dinov3_differs_by_a_grey_level_at_most(tmp_path: Path) -> None:
    """Its class exists for torchvision alone, and resizes numbers from 0 to 1, as torch does here."""
    settings = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": {"height": 64, "width": 64}}
    ours = read_processing(write(tmp_path, settings), CONFIG)
    mean, std = (torch.tensor(values)[:, None, None] for values in (ours.mean, ours.std))
    assert ours.mean == (0.485, 0.456, 0.406)
    for width, height in ((640, 427), (100, 90), (33, 500)):
        image = noise(width, height)
        scaled = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())[None] / 255
        resized = torch.nn.functional.interpolate(scaled, (64, 64), mode="bilinear", antialias=True)
        difference = (ours.normalised(ours.pixels(image, width, height)) - (resized[0] - mean) / std).abs()
        assert (difference * std * 255).max() < 1.01


def test_bytes_become_the_numbers_of_the_processor(tmp_path: Path) -> None:
    """All 256 values of each channel, bit for bit, also where the means of channels differ."""
    theirs, ours = processing_of("clip", tmp_path)
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 256, 3)
    expected = theirs.normalize(theirs.rescale(values.transpose(2, 0, 1), 1 / 255), ours.mean, ours.std)
    result = ours.normalised(torch.from_numpy(values.transpose(2, 0, 1).copy()))
    assert np.array_equal(result.numpy(), expected)
    assert ours.normalised(torch.zeros(3, 1, 1, dtype=torch.uint8), torch.bfloat16).dtype == torch.bfloat16


def test_patches_of_several_pictures_are_concatenated(tmp_path: Path) -> None:
    theirs, ours = processing_of("qwen3_vl", tmp_path)
    assert isinstance(ours, QwenPatches)
    images = [noise(*size) for size in ((100, 90), (301, 64), (33, 200))]
    expected = theirs(images=images, return_tensors="pt")
    pixels = torch.cat([ours.pixels(image, *image.size) for image in images])
    assert torch.equal(ours.patches(pixels), expected["pixel_values"])
    assert pixels.numel() * 8 == expected["pixel_values"].numel() * 4  # an eighth of the bytes


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 128, "num_key_value_heads": 2}
QWEN = {
    **TEXT,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
# The configuration of a small model with a vision tower, and the case whose settings its directory has.
TOWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "CLIPVisionModel": ("CLIPVisionConfig", {**SMALL, "image_size": 224, "patch_size": 16}, "clip"),
    "SiglipVisionModel": ("SiglipVisionConfig", {**SMALL, "image_size": 224, "patch_size": 16}, "vit"),
    "Dinov2Model": ("Dinov2Config", {**SMALL, "image_size": 32, "patch_size": 16, "mlp_ratio": 1}, "dinov2"),
    "Qwen2VLModel": (
        "Qwen2VLConfig",
        {"text_config": QWEN, "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}},
        "qwen2_vl",
    ),
    "Qwen2_5_VLModel": (
        "Qwen2_5_VLConfig",
        {
            "text_config": QWEN,
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [0],
            },
        },
        "qwen2_vl",
    ),
    "Qwen3VLModel": (
        "Qwen3VLConfig",
        {
            "text_config": QWEN,
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
        },
        "qwen3_vl",
    ),
    "Idefics3Model": (
        "Idefics3Config",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SMALL, "image_size": 96, "patch_size": 16},
        },
        "idefics3",
    ),
    "SmolVLMModel": (
        "SmolVLMConfig",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SMALL, "image_size": 64, "patch_size": 16},
        },
        "smolvlm",
    ),
    "ModernVBertModel": (
        "ModernVBertConfig",
        {
            "text_config": {**SMALL, "vocab_size": 128, "pad_token_id": 0},
            "vision_config": {**SMALL, "image_size": 64, "patch_size": 16},
            "pixel_shuffle_factor": 2,
        },
        "smolvlm",
    ),
    "PaliGemmaModel": (
        "PaliGemmaConfig",
        {
            "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
            "vision_config": {**SMALL, "image_size": 112, "patch_size": 14, "projection_dim": 32},
            "projection_dim": 32,
        },
        "paligemma",
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_towers_give_as_many_rows_as_are_counted(name: str, tmp_path: Path) -> None:
    """Real classes with their own configurations: patches and a class token, or rows of a language model."""
    import transformers

    config_class, options, case = TOWERS[name]
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    config = getattr(transformers, config_class)(**options)
    theirs = processor(CASES[case])
    theirs.save_pretrained(tmp_path)
    ours = read_processing(tmp_path, config)
    model = getattr(transformers, name)(config).eval()
    for size in ((150, 100), (37, 211), (64, 64)):
        image = noise(*size)
        pixels = ours.pixels(image, *size)
        with torch.no_grad():
            if not hasattr(model, "get_image_features"):
                states = model(pixel_values=ours.normalised(pixels)[None]).last_hidden_state
                class_tokens = 0 if name == "SiglipVisionModel" else 1
                assert states.shape[1] == ours.num_patches(*size) + class_tokens
                continue
            if isinstance(ours, QwenPatches):
                grid = torch.tensor([[1, *ours.grid(*size)]])
                features = model.get_image_features(ours.patches(pixels), grid).pooler_output
            else:
                features = model.get_image_features(ours.normalised(pixels)[None]).pooler_output
            assert sum(part[..., 0].numel() for part in features) == ours.num_tokens(*size)


@pytest.mark.parametrize(
    ("whole", "model", "options"),
    [
        ("ColPaliConfig", "PaliGemmaConfig", {"vision_config": {"patch_size": 14}}),
        ("ColQwen2Config", "Qwen2VLConfig", {}),
        ("ColModernVBertConfig", "ModernVBertConfig", {"pixel_shuffle_factor": 3}),
    ],
)
def test_configurations_of_late_interaction(whole: str, model: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Their vision tower is in a configuration within."""
    import transformers

    case = {"ColPaliConfig": "paligemma", "ColQwen2Config": "qwen2_vl", "ColModernVBertConfig": "idefics3"}[whole]
    if not hasattr(transformers, whole):
        pytest.skip(f"this transformers has no {whole}")
    inner = getattr(transformers, model)(**options)
    processor(CASES[case]).save_pretrained(tmp_path)
    outer = getattr(transformers, whole)(vlm_config=inner)
    assert read_processing(tmp_path, outer) == read_processing(tmp_path, inner)


def write(folder: Path, settings: dict[str, Any], file: str = "preprocessor_config.json") -> Path:
    (folder / file).write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_older_names_of_settings(tmp_path: Path) -> None:
    """What directories of the Hub have: numbers for sizes, areas by other names, classes of other backends."""
    clip = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "resample": 3}
    ours = read_processing(write(tmp_path, clip), CONFIG)
    assert isinstance(ours, FixedSize)
    assert (ours.size, ours.crop, ours.mean[0]) == ({"shortest_edge": 224}, (224, 224), 0.48145466)

    vit = {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224}
    ours = read_processing(write(tmp_path, vit), SimpleNamespace(model_type="vit", patch_size=32))
    assert isinstance(ours, FixedSize)
    assert (ours.size, ours.crop, ours.resample) == ({"height": 224, "width": 224}, None, 2)
    assert ours.grid(1, 1) == (7, 7)

    qwen = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 3136, "max_pixels": 12845056}
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    config = SimpleNamespace(model_type="qwen2_vl", vision_config=vision)
    first = read_processing(write(tmp_path, qwen), config)
    assert isinstance(first, QwenPatches)
    assert (first.min_area, first.max_area) == (3136, 12845056)
    del qwen["min_pixels"], qwen["max_pixels"]
    for size in ({"min_pixels": 3136, "max_pixels": 12845056}, {"shortest_edge": 3136, "longest_edge": 12845056}):
        assert read_processing(write(tmp_path, {**qwen, "size": size}), config) == first


def test_the_file_of_the_processor_comes_first(tmp_path: Path) -> None:
    siglip = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "resample": None}
    write(tmp_path, {"image_processor_type": "CLIPImageProcessor"})
    assert read_processing(tmp_path, CONFIG).pixel_shape(9, 9) == (3, 224, 224)
    write(tmp_path, {"image_seq_len": 64, "processor_class": "Idefics3Processor"}, "processor_config.json")
    assert read_processing(tmp_path, CONFIG).pixel_shape(9, 9) == (3, 224, 224)
    write(tmp_path, {"image_processor": siglip, "processor_class": "P"}, "processor_config.json")
    ours = read_processing(tmp_path, CONFIG)
    assert (ours.pixel_shape(9, 9), ours.resample) == ((3, 32, 32), 3)  # null stands for the default


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"image_processor_type": "DonutImageProcessor"}, "DonutImageProcessor.*SiglipImageProcessor"),
        ({}, "of model"),
        ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "size"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"longest_edge": 5}}, "size"),
        ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"shortest_edge": 5}}, "crop_size"),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 10**9, "width": 1}}, "size"),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 0, "width": 1}}, "size"),
        ({"image_processor_type": "SiglipImageProcessor", "size": "224"}, "size"),
        ({"image_processor_type": "SiglipImageProcessor", "resample": 9}, "resample=9"),
        ({"image_processor_type": "SiglipImageProcessor", "resample": True}, "resample=True"),
        ({"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5]}, "image_mean"),
        ({"image_processor_type": "SiglipImageProcessor", "image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"image_processor_type": "SiglipImageProcessor", "image_std": [0.5, 0.5, float("nan")]}, "image_std"),
        ({"image_processor_type": "SiglipImageProcessor", "rescale_factor": 0}, "rescale_factor"),
        ({"image_processor_type": "SiglipImageProcessor", "do_resize": "yes"}, "do_resize"),
        ({"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 10**9}, "max_num_patches"),
        ({"image_processor_type": "Siglip2ImageProcessor", "patch_size": 14}, "patch_size=14 should be 16"),
        ({"image_processor_type": "Siglip2ImageProcessor", "do_resize": False}, "do_resize"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}, "patch_size=14 should be 16"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 4}, "merge_size=4"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "size": {"longest_edge": 9}}, "size"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "max_pixels": 10**12}, "max_pixels"),
        ({"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"height": 9}}, "max_image_size"),
        ({"image_processor_type": "Idefics3ImageProcessor", "size": {"shortest_edge": 9}}, "size"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        read_processing(write(tmp_path, settings), CONFIG)
    assert "preprocessor_config.json" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a":' * 100_000])
def test_a_damaged_file_of_settings_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        read_processing(tmp_path, CONFIG)
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        read_processing(tmp_path, CONFIG)


def test_narrow_pictures_are_refused(tmp_path: Path) -> None:
    """Those that a processor refuses, and those that need gigabytes before they are cropped."""
    theirs, qwen = processing_of("qwen3_vl", tmp_path)
    qwen.check(200, 1)
    with pytest.raises(ValueError, match="200"):
        theirs.get_number_of_image_patches(1, 201)
    for size in ((201, 1), (1, 201)):
        with pytest.raises(BadPicture, match=f"{size[0]} x {size[1]}"):
            qwen.check(*size)
    _, clip = processing_of("clip", tmp_path)
    clip.check(1, 3000)
    with pytest.raises(BadPicture, match="1 x 60000"):
        clip.check(1, 60000)
    few = NaFlex(resample=2, scale=1.0, mean=(0,) * 3, std=(1,) * 3, patch_size=16, max_patches=4)
    few.check(1, 1_000_000)
    with pytest.raises(BadPicture, match="1 x 100000000"):
        few.check(1, 100_000_000)
    _, tiles = processing_of("smolvlm", tmp_path)
    for size in sizes(200):
        tiles.check(*size)


def test_the_digest_names_what_changes_pixels_or_lengths(tmp_path: Path) -> None:
    read = {name: processing_of(name, tmp_path)[1] for name in CASES}
    again = {name: processing_of(name, tmp_path)[1] for name in CASES}
    assert [ours.digest for ours in read.values()] == [ours.digest for ours in again.values()]
    assert len({ours.digest for ours in read.values()}) == len(CASES)
    _, longer = processing_of("smolvlm", tmp_path, scale_factor=4)
    assert longer.digest != read["smolvlm"].digest


def on_the_device(world: World, folder: str) -> dict[str, tuple[bool, dict[str, int]]]:
    """Of each family: whether the device gives the CPU's numbers, and what made the host wait meanwhile."""
    results = {}
    for name in ("clip", "siglip", "naflex", "qwen3_vl", "idefics3"):
        path = Path(folder) / name
        path.mkdir()
        _, ours = processing_of(name, path)
        pixels = ours.pixels(noise(90, 70), 90, 70)
        convert = ours.patches if isinstance(ours, NaFlex | QwenPatches) else ours.normalised
        sent = pixels.to(world.device)
        with host_reads() as reads:
            received = convert(sent)
        results[name] = (received.device == world.device and torch.equal(received.cpu(), convert(pixels)), dict(reads))
    return results


def test_the_host_waits_for_no_pixel(cuda_ranks, tmp_path: Path) -> None:
    (results,) = cuda_ranks(1, on_the_device, str(tmp_path))
    assert results == dict.fromkeys(results, (True, {}))
    assert len(results) == 5
