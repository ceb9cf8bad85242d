"""Encoding pictures compared with SentenceTransformer.encode; both times include reading and decoding the files."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageDraw
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as Pooled
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from benchmarks.inputs import text_tokenizer
from benchmarks.measure import interleave, markdown, ratio, require, speed, unit
from benchmarks.workloads import descriptions
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import ParallelConfig, Pooling, Precision
from embedtrain.data.images.files import PICTURES, Place, read_picture
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.kinds.image_text.options import ImageTextOptions

PICTURE_COUNT = 96
TITLE = f"Encoding {PICTURE_COUNT} pictures in fp32, against SentenceTransformer.encode"
MIN_COSINE = 0.9999
# Width and height in pixels: screenshots, photographs, pages, banners, and small pictures.
SIZES = ((640, 480), (1024, 768), (800, 1100), (1200, 300), (224, 224), (480, 854))
VOCABULARY = 32_768  # more than the tokenizer has, to which processors add tokens
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}:
{%- for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}<end_of_utterance>{% endfor %}"""
Encode = Callable[[int], Tensor]


def measure(num_pictures: int = PICTURE_COUNT, **sizes: int) -> str:
    rows = []
    with joined_world() as world, tempfile.TemporaryDirectory() as folder:
        paths = draw_pictures(Path(folder) / "pictures", num_pictures)
        for name, save in MODELS.items():
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
    model = load_ours(world, directory)
    encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)

    def encode(_round_number: int) -> Tensor:
        return encoder.encode_all(picture_items(paths))

    return encode


def load_ours(world: World, directory: Path) -> LoadedModel:
    """Opens a directory with embedtrain."""
    is_dense = (directory / "chat_template.jinja").is_file()
    dense = DenseOptions(path=str(directory), pooling=Pooling.last)
    options = dense if is_dense else ImageTextOptions(path=str(directory))
    return load_model(options, ParallelConfig(precision=Precision.fp32), world, seed=0)


def picture_items(paths: Sequence[Path]) -> list[str]:
    """The items of files, whose headers are read."""
    items = []
    for path in paths:
        picture = read_picture(Place(str(path)))
        PICTURES.add(picture, Place(str(path)))
        items.append(str(picture))
    return items


def theirs(world: World, directory: Path, paths: list[Path]) -> Encode:
    """Encodes the files with sentence-transformers."""
    model = load_theirs(world, directory)

    def encode(_round_number: int) -> Tensor:
        pictures: Any = [Image.open(path) for path in paths]
        vectors: Tensor = model.encode(
            pictures, convert_to_tensor=True, show_progress_bar=False, normalize_embeddings=True
        )
        return vectors.float()

    return encode


def load_theirs(world: World, directory: Path) -> SentenceTransformer:
    """Opens a directory with sentence-transformers; it needs to be told how a vision-language model pools."""
    device = str(world.device)
    if not (directory / "chat_template.jinja").is_file():
        return SentenceTransformer(str(directory), device=device)
    transformer = Transformer(str(directory))
    pooling = Pooled(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device=device)


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


def save_idefics3(directory: Path, **sizes: int) -> None:
    """Six layers in both towers unless `sizes` says otherwise: up to four tiles of 49 tokens, and the whole picture."""
    tokenizer = _byte_tokenizer()
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    tokenizer.add_tokens(marks, special_tokens=True)
    layers = {"num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 768} | sizes
    text = {"model_type": "llama", "hidden_size": 256, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.Idefics3Config(
        text_config=text | layers,
        vision_config={"hidden_size": 192, "image_size": 224, "patch_size": 16} | layers,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    edges = {"size": {"longest_edge": 448}, "max_image_size": {"longest_edge": 224}}
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(**edges), tokenizer, image_seq_len=49, chat_template=CHAT_TEMPLATE
    )
    _save(transformers.AutoModel.from_config(config), processor, directory)


def save_qwen(directory: Path, **sizes: int) -> None:
    """Qwen3-VL of 49 to 850 tokens of a picture; six and eight layers unless `sizes` says otherwise.

    The vision tower computes 1.3 times what the language model does of the same pictures, in Qwen3-VL-2B 1.2 times.
    """
    tokenizer = _byte_tokenizer()
    picture = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_tokens([*picture, "<|video_pad|>", "<end_of_utterance>"], special_tokens=True)
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, [*picture, "<|video_pad|>"])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", "".join(picture))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    depth, layers = (sizes.get("num_hidden_layers", number) for number in (6, 8))
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [16, 8, 8], "mrope_interleaved": True}
    text = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": VOCABULARY}
    vision = {"hidden_size": 192, "num_heads": 4, "intermediate_size": 768, "out_hidden_size": 512, "patch_size": 16}
    config = transformers.Qwen3VLConfig(
        text_config=text | heads | {"num_hidden_layers": layers, "rope_parameters": rope},
        vision_config=vision | {"depth": depth, "deepstack_visual_indexes": list(range(min(3, depth)))},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24},
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    _save(transformers.AutoModel.from_config(config), tokenizer, directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes: the processor counts on tokens for line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([text for text, _ in descriptions()], trainer)
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=1024
    )


MODELS = {
    "CLIP, ViT-B/32": save_clip,
    "SigLIP 2 NaFlex, base": save_naflex,
    "Idefics3, 6 + 6 layers": save_idefics3,
}


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
