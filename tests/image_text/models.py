"""Small random models of texts and pictures as transformers saves them, and pictures to train them on."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from embedtrain.config.recipe import ModelConfig
from embedtrain.data.images.files import PICTURES, Place, read_picture
from tests.small import WORDS, model_options, save_small, small_model

NAMES = ("clip", "siglip", "siglip2", "pair")
DIMENSION = 24
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_PATCHES = {"image_size": 32, "patch_size": 8}


@cache
def end_tokenizer() -> PreTrainedTokenizerFast:
    """Words, with a token at the end of every text, as CLIP and SigLIP have it."""
    words = ["<pad>", "<unk>", *WORDS, "<s>", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    end = words.index("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Lower-case letters, as the tokenizer of SigLIP 2 with a small vocabulary."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *"abcdefghijklmnopqrst"]
    tokenizer = transformers.Siglip2Tokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        padding_side="right",
        model_max_length=16,
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    return tokenizer


def save_image_text(name: str, folder: Path) -> Path:
    """A random model; `pair` is one of VisionTextDualEncoderModel."""
    directory = folder / name
    torch.manual_seed(1)
    if name == "pair":
        return _save_pair(directory)
    tokenizer = letter_tokenizer() if name == "siglip2" else end_tokenizer()
    ids = {"vocab_size": 26, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": tokenizer.eos_token_id}
    text: dict[str, Any] = _SIZES | ids | {"max_position_embeddings": 16}
    vision: dict[str, Any] = dict(_SIZES)
    size = {"height": 32, "width": 32}
    match name:
        case "clip":
            config: Any = transformers.CLIPConfig(
                text_config=text | {"projection_dim": DIMENSION},
                vision_config=vision | _PATCHES | {"projection_dim": DIMENSION},
                projection_dim=DIMENSION,
            )
            model: Any = transformers.CLIPModel(config)
            image: Any = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
            processor: Any = transformers.CLIPProcessor(image_processor=image, tokenizer=tokenizer)
        case "siglip":
            config = transformers.SiglipConfig(text_config=text, vision_config=vision | _PATCHES)
            model = transformers.SiglipModel(config)
            image = transformers.SiglipImageProcessorPil(size=size)
            processor = transformers.SiglipProcessor(image_processor=image, tokenizer=tokenizer)
        case _:
            patches = {"num_patches": 16, "patch_size": 8}
            config = transformers.Siglip2Config(text_config=text, vision_config=vision | patches)
            model = transformers.Siglip2Model(config)
            image = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
            processor = transformers.Siglip2Processor(image_processor=image, tokenizer=tokenizer)
    _randomise(model)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _save_pair(directory: Path) -> Path:
    text, vision = save_parts(directory.parent)
    model = transformers.VisionTextDualEncoderModel.from_vision_text_pretrained(
        str(vision), str(text), projection_dim=DIMENSION
    )
    _randomise(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(text)
    image = transformers.ViTImageProcessorPil.from_pretrained(vision)
    model.save_pretrained(directory)
    processor = transformers.VisionTextDualEncoderProcessor(image_processor=image, tokenizer=tokenizer)
    processor.save_pretrained(directory)
    return directory


def save_parts(folder: Path) -> tuple[Path, Path]:
    """A BERT and a ViT, of which a pair is made."""
    text = save_small(small_model("bert"), folder / "bert", seed=2)
    vision = folder / "vit"
    torch.manual_seed(3)
    model = transformers.ViTModel(transformers.ViTConfig(**_SIZES, **_PATCHES))
    _randomise(model)
    model.save_pretrained(vision)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(vision)
    return text, vision


def _randomise(model: torch.nn.Module) -> None:
    """Wide weights: with the usual ones all pictures have nearly one vector."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif parameter.numel() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)


def image_text(path: Path, **options: Any) -> ModelConfig:
    """The options of a model of texts and pictures."""
    return model_options("image_text", path=str(path), **options)


def row_value(folder: Path, seed: int) -> Any:
    """The value in a row of a file in `folder` that is read as `picture_item`."""
    picture_item(folder, seed)
    return {"image": f"picture_{seed}.png"}


def picture_item(folder: Path, seed: int) -> str:
    """The item of a drawn picture, whose file is written and known to this process."""
    path = folder / f"picture_{seed}.png"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        numbers = np.random.default_rng(seed)
        width, height = numbers.integers(20, 70, 2)
        blocks = numbers.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((int(width), int(height)), Image.Resampling.NEAREST).save(path)
    place = Place(str(path))
    picture = read_picture(place)
    PICTURES.add(picture, place)
    return str(picture)
