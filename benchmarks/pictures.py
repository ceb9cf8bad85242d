"""Encoding pictures compared with SentenceTransformer.encode; both times include reading and decoding the files."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageDraw
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.inputs import text_tokenizer
from benchmarks.measure import interleave, markdown, ratio, require, speed, unit
from benchmarks.workloads import descriptions
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.data.images.files import PICTURES, Place, read_picture
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.image_text.options import ImageTextOptions

PICTURE_COUNT = 96
TITLE = f"Encoding {PICTURE_COUNT} pictures in fp32, against SentenceTransformer.encode"
MIN_COSINE = 0.9999
# Width and height in pixels: screenshots, photographs, pages, banners, and small pictures.
SIZES = ((640, 480), (1024, 768), (800, 1100), (1200, 300), (224, 224), (480, 854))
VOCABULARY = 32_768  # more than the tokenizer has, to which processors add tokens
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
Encode = Callable[[int], Tensor]


def measure(num_pictures: int = PICTURE_COUNT, **sizes: int) -> str:
    rows = []
    with joined_world() as world, tempfile.TemporaryDirectory() as folder:
        paths = draw_pictures(Path(folder) / "pictures", num_pictures)
        for name, save in (("CLIP, ViT-B/32", save_clip), ("SigLIP 2 NaFlex, base", save_naflex)):
            directory = Path(folder) / name.split(",")[0].replace(" ", "-")
            save(directory, **sizes)
            calls = ours(world, directory, paths), theirs(world, directory, paths)
            our_rounds, their_rounds = interleave(*calls)
            cosine = min(
                float(F.cosine_similarity(a.value, b.value).min())
                for a, b in zip(our_rounds, their_rounds, strict=True)
            )
            require(cosine >= MIN_COSINE, f"{name}: a vector's cosine with theirs is {cosine}")
            counts = [num_pictures] * len(our_rounds)
            speeds = [f"{speed(rounds, counts):.1f}" for rounds in (our_rounds, their_rounds)]
            rows.append([name, *speeds, ratio(our_rounds, their_rounds), f"{cosine:.6f}"])
    header = ["model", *(f"{side}, pictures / {unit()}" for side in ("ours", "theirs"))]
    return markdown([*header, "ratio", "min cosine of ours with theirs"], rows)


def ours(world: World, directory: Path, paths: list[Path]) -> Encode:
    """Encodes the files with embedtrain."""
    options = ImageTextOptions(path=str(directory))
    model = load_model(options, ParallelConfig(precision=Precision.fp32), world, seed=0)
    encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)

    def encode(_round_number: int) -> Tensor:
        items = []
        for path in paths:
            picture = read_picture(Place(str(path)))
            PICTURES.add(picture, Place(str(path)))
            items.append(str(picture))
        return encoder.encode_all(items)

    return encode


def theirs(world: World, directory: Path, paths: list[Path]) -> Encode:
    """Encodes the files with sentence-transformers."""
    model = SentenceTransformer(str(directory), device=str(world.device))

    def encode(_round_number: int) -> Tensor:
        pictures: Any = [Image.open(path) for path in paths]
        vectors: Tensor = model.encode(
            pictures, convert_to_tensor=True, show_progress_bar=False, normalize_embeddings=True
        )
        return vectors.float()

    return encode


def draw_pictures(folder: Path, count: int) -> list[Path]:
    """Pages of text as PNG and smooth colours as JPEG, of several sizes, in turn."""
    folder.mkdir(parents=True)
    texts, paths = [description for _, description in descriptions()], []
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        if number % 2:
            random = np.random.default_rng(number)
            colours = Image.fromarray(random.integers(0, 255, (6, 6, 3), dtype=np.uint8))
            page = colours.resize((width, height), Image.Resampling.BICUBIC)
        else:
            page = Image.new("RGB", (width, height), "white")
            words = " ".join(texts[number * 20 : number * 20 + 20])
            lines = [words[start : start + width // 7] for start in range(0, len(words), max(1, width // 7))]
            ImageDraw.Draw(page).multiline_text((10, 10), "\n".join(lines[: height // 16]), fill="black")
        paths.append(folder / f"{number:03}.{'jpg' if number % 2 else 'png'}")
        page.save(paths[-1])
    return paths


def save_clip(directory: Path, **sizes: int) -> None:
    """A directory with the sizes of openai/clip-vit-base-patch32 unless `sizes` says otherwise, and random weights."""
    tokenizer = text_tokenizer(77)
    config = transformers.CLIPConfig(text_config=_text_config(tokenizer) | sizes, vision_config=sizes)
    image = transformers.CLIPImageProcessorPil()
    _save(transformers.CLIPModel(config), transformers.CLIPProcessor(image, tokenizer), directory)


def save_naflex(directory: Path, **sizes: int) -> None:
    """A directory with the sizes of google/siglip2-base-patch16-naflex unless `sizes` says otherwise."""
    tokenizer = text_tokenizer(64)
    config = transformers.Siglip2Config(text_config=_text_config(tokenizer) | sizes, vision_config=sizes)
    image = transformers.Siglip2ImageProcessorPil()
    _save(transformers.Siglip2Model(config), transformers.Siglip2Processor(image, tokenizer), directory)


def _text_config(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    special = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    return {"vocab_size": VOCABULARY, "pad_token_id": tokenizer.pad_token_id, **special}


def _save(model: Any, processor: Any, directory: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # with the usual weights, all pictures have nearly one vector
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
