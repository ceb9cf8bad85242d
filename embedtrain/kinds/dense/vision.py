"""Vision-language models: how their directories say how pictures are read and what stands around items.

See `models/vision_language.py` for what they compute.
"""

import contextlib
import copy
import functools
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Under the name `transformers.AutoImageProcessor`, version 5.17 has one that cannot be used without torchvision.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import written
from embedtrain.data.images.files import PICTURES, Place, pillow, read_picture
from embedtrain.data.images.item import Picture, item_parts
from embedtrain.data.images.processing import FixedSize, ImageProcessing, QwenPatches, Tiles
from embedtrain.data.images.settings import PROCESSOR_FILE, image_settings, processing_of
from embedtrain.data.tokens import UNLIMITED, TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.chat_template import ItemTemplate, read_item_template, write_item_template
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.sentence_transformers import DirectoryModules
from embedtrain.formats.source import StoredModel
from embedtrain.formats.transformers import TOKENIZER_FILES, open_tokenizer, read_tokenizer, write_tokenizer
from embedtrain.kinds.dense.model import Markup, VisionLayout, to_pixels
from embedtrain.kinds.dense.options import DenseOptions, ImageOptions, check_vision
from embedtrain.models.encoder import Encoder, Head, prepare_backbone
from embedtrain.models.file_references import read_json
from embedtrain.models.security import require_safe_files
from embedtrain.models.types import ModelSource
from embedtrain.models.vision_language import VisionFamily, vision_family
from embedtrain.utils.files import write_json

if TYPE_CHECKING:
    from PIL.Image import Image

# By `model_type`: the class of transformers that reads texts and pictures, and that of videos, which it also needs.
_PROCESSORS: dict[str, tuple[str, str | None]] = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "idefics3": ("Idefics3Processor", None),
    "smolvlm": ("SmolVLMProcessor", "SmolVLMVideoProcessor"),
    "modernvbert": ("Idefics3Processor", None),
    "paligemma": ("PaliGemmaProcessor", None),
}
_TEMPLATE_FILE, _VIDEO_FILE = "chat_template.json", "video_preprocessor_config.json"
_PLAIN = "{prompt}{item}"
# Width and height of pictures that are drawn to compare what libraries compute: square, wide and narrow.
_PROBE_SIZES = ((96, 96), (200, 120), (60, 150))
_PROBE_TEXTS = ("What is this?", "  two\nlines\n")


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """What a vision-language model has besides its configuration.

    Attributes:
        processing: what makes numbers of a picture.
        processor: the content of `processor_config.json`.
        template: what stands around an item.
        chat_template: a chat template that writes it.
        chat_options: of `apply_chat_template`.
        frozen: whether the vision tower is not trained.
        has_axes: whether positions have the axes of the family, see `VisionFamily`.
    """

    processing: ImageProcessing
    processor: Mapping[str, Any]
    template: ItemTemplate
    chat_template: str
    chat_options: Mapping[str, Any]
    frozen: bool = False
    has_axes: bool = True

    @property
    def is_new(self) -> bool:
        """Nothing of it has weights."""
        return False


def vision_settings(source: ModelSource) -> VisionSettings:
    """Those of a vision-language model; a kind with settings of its own has them in these, as `vision`."""
    settings = source.settings
    vision: VisionSettings = settings if isinstance(settings, VisionSettings) else settings.vision
    return vision


def reads_pictures(source: ModelSource) -> bool:
    """Whether a model is a vision-language model."""
    return isinstance(source.settings, VisionSettings) or getattr(source.settings, "vision", None) is not None


def read_vision(files: StoredModel, model: DenseOptions) -> VisionSettings | None:
    """The settings of a directory; None of a model that reads texts alone.

    A ModelError for a model with a vision tower whose family is not known, or files that cannot be used.
    """
    config, directory = files.config, files.directory
    is_vision = getattr(config, "vision_config", None) is not None
    check_vision(model, is_vision=is_vision)
    if not is_vision:
        return None
    processing, processor = read_processing(directory, config, model.image)
    template, chat_template, chat_options = _read_template(files, model)
    return VisionSettings(
        processing=processing,
        processor=processor,
        template=template,
        chat_template=chat_template,
        chat_options=chat_options,
        frozen=model.image.frozen,
    )


def read_processing(
    directory: Path, config: PretrainedConfig, image: ImageOptions
) -> tuple[ImageProcessing, dict[str, Any]]:
    """How a directory says that pictures are read, with the options of a recipe, and what libraries read of it.

    Changes the configuration to what vectors need of it. Errors are those of `read_vision`.
    """
    require_known(config, directory)
    if isinstance(vision := config.vision_config, PretrainedConfig) and vision.model_type.startswith("siglip"):
        vision.vision_use_head = False  # it pools a picture, which no vector needs
    if config.model_type == "paligemma":
        _attend_both_ways(config.get_text_config())
    where, values = image_settings(directory, config)
    values = _with_areas(values, processing_of(where, values, config), image)
    processing = processing_of(where, values, config)
    return processing, _processor(directory, config, processing, values)


def new_vision(config: PretrainedConfig, model: DenseOptions) -> VisionSettings | None:
    """Those of a model of random weights: how pictures are read, and the chat template, of `model.tokenizer`."""
    return read_vision(files_of_config(config, model), model)


def files_of_config(config: PretrainedConfig, model: ModelConfig) -> StoredModel:
    """The files that a model of random weights has: those of `model.tokenizer`, if it reads pictures."""
    directory, is_vision = Path(), getattr(config, "vision_config", None) is not None
    if is_vision:
        if model.tokenizer is None:
            raise ConfigError(
                f"model.config.model_type={config.model_type}: how pictures are read, and the chat template, are in "
                "the files of a model; write its directory or Hub id as model.tokenizer"
            )
        options = "model.tokenizer", "model.tokenizer_revision"
        directory = resolve_directory(model.tokenizer, model.tokenizer_revision, *options, TOKENIZER_FILES)
        require_safe_files(directory, trust_remote_code=model.trust_remote_code)
    return StoredModel(
        root=directory,
        directory=directory,
        config=config,
        modules=DirectoryModules(transformer=directory),
        transformer={},
        settings={},
        trust_remote_code=model.trust_remote_code,
    )


def _attend_both_ways(config: PretrainedConfig) -> None:
    """Let all tokens attend to each other, as in the prefix of PaliGemma, which an item is.

    The class (transformers 5.23) does so with the token types of its processor, also beyond windows, and without them
    only where nothing is padded: sentence-transformers gives none for texts.
    """
    config.use_bidirectional_attention, config.is_causal = True, False
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def require_known(config: PretrainedConfig, where: Path | str) -> None:
    """A ModelError for a model with a vision tower that is of no known family."""
    if config.model_type not in _PROCESSORS:
        raise ModelError(
            f"{where} holds {config.model_type}, a model with a vision tower that is not known here; known are "
            f"{', '.join(_PROCESSORS)}"
        )


def _with_areas(values: dict[str, Any], stored: ImageProcessing, image: ImageOptions) -> dict[str, Any]:
    """The settings of an image processor with `model.image.min_pixels` and `max_pixels`."""
    chosen = {name: getattr(image, name) for name in ("min_pixels", "max_pixels")}
    if all(value is None for value in chosen.values()):
        return values
    if not isinstance(stored, QwenPatches):
        name, value = next((name, value) for name, value in chosen.items() if value is not None)
        raise ConfigError(f"model.image.{name}={value}: is for Qwen-VL, whose pictures have any size; leave it out")
    smallest, largest = chosen["min_pixels"] or stored.min_area, chosen["max_pixels"] or stored.max_area
    if smallest > largest:
        raise ConfigError(f"model.image.min_pixels={smallest}: is above the largest number of pixels, {largest}")
    kept = {name: value for name, value in values.items() if name not in chosen}
    return kept | {"size": {"shortest_edge": smallest, "longest_edge": largest}}


def _processor(
    directory: Path, config: PretrainedConfig, processing: ImageProcessing, values: Mapping[str, Any]
) -> dict[str, Any]:
    """What transformers and sentence-transformers read of a processor, in one file."""
    path = directory / PROCESSOR_FILE
    stored = read_json(path) if path.is_file() else {}
    stored = {name: value for name, value in stored.items() if name not in ("chat_template", "auto_map")}
    name, video = _PROCESSORS[config.model_type]
    processor = stored | {"processor_class": name, "image_processor": dict(values)}
    if video is not None and "video_processor" not in processor:
        path = directory / _VIDEO_FILE
        of_video = read_json(path) if path.is_file() else {}
        processor["video_processor"] = {"video_processor_type": video} | of_video
    if isinstance(processing, Tiles):
        length = _tokens_of_grid(processing, 0, 0)
        if stored.get("image_seq_len", length) != length:
            raise ModelError(
                f"{directory / PROCESSOR_FILE}: image_seq_len={stored['image_seq_len']!r:.40}, and a tile of "
                f"{processing.tile} pixels has {length} tokens"
            )
        processor["image_seq_len"] = length
    elif isinstance(processing, FixedSize):
        length = processing.most_patches
        if values.get("image_seq_length", length) != length:
            raise ModelError(
                f"{directory}: image_seq_length={values['image_seq_length']!r:.40} of its image processor, and a "
                f"picture has {length} patches"
            )
        processor["image_processor"]["image_seq_length"] = length
    return processor


def _read_template(files: StoredModel, model: DenseOptions) -> tuple[ItemTemplate, str, dict[str, Any]]:
    """What stands around an item, a chat template that writes it, and options of `apply_chat_template`."""
    directory = files.directory
    tokenizer = read_tokenizer(directory, trust_remote_code=model.trust_remote_code)
    token, picture = picture_token(tokenizer, files.config), picture_text(tokenizer, files.config)
    processing = files.transformer.get("processing_kwargs") or {}
    modalities = files.transformer.get("modality_config")
    chat = stored_chat_template(directory, tokenizer)
    if isinstance(modalities, Mapping) and "message" not in modalities:
        chat = None
    if files.config.model_type == "paligemma":
        return _read_prefix(directory, tokenizer, token, chat, model)
    if model.item_template is not None or chat is None:
        text = _PLAIN if model.item_template is None else model.item_template
        template = ItemTemplate.of_text(text, picture, tokenizer.bos_token)
        return template, write_item_template(template), {}
    if not isinstance(processing, Mapping) or set(processing) - {"chat_template"}:
        raise ModelError(
            f"{directory}: processing_kwargs of sentence-transformers has {', '.join(map(str, processing))}; supported "
            "with a vision-language model is chat_template"
        )
    options = dict(processing.get("chat_template") or {})
    options.pop("restore_suffix", None)
    tokenizer.chat_template = chat
    return read_item_template(tokenizer, str(directory), token, options), chat, options


def _read_prefix(
    directory: Path, tokenizer: PreTrainedTokenizerBase, token: str, chat: str | None, model: DenseOptions
) -> tuple[ItemTemplate, str, dict[str, Any]]:
    """What PaliGemma's processor writes around an item; a chat template of another directory would add to it."""
    if model.item_template is not None:
        raise ConfigError(
            f"model.item_template={written(model.item_template)}: what stands around an item is written by PaliGemma's "
            "processor; leave it out"
        )
    if not isinstance(tokenizer.bos_token, str):
        raise ModelError(f"{directory}: its tokenizer has no bos_token, which stands behind pictures of PaliGemma")
    template = ItemTemplate.of_prefix(token, tokenizer.bos_token)
    written_template = write_item_template(template)
    if chat not in (None, written_template):
        raise ModelError(
            f"{directory} has a chat template, and PaliGemma's processor adds more to what it writes: remove "
            "chat_template.jinja, and that in tokenizer_config.json"
        )
    return template, written_template, {}


def stored_chat_template(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template of a directory, of the processor before that of the tokenizer; None without one."""
    path = directory / _TEMPLATE_FILE
    if not (directory / "chat_template.jinja").is_file() and path.is_file():
        of_processor = read_json(path).get("chat_template")
        if isinstance(of_processor, str):
            return of_processor
    stored = tokenizer.chat_template
    if isinstance(stored, Mapping):  # several by name
        stored = stored.get("default")
    return stored if isinstance(stored, str) and stored else None


def picture_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> str:
    """The token that stands for each row of a picture; a ModelError if the tokenizer does not have it."""
    token = tokenizer.convert_ids_to_tokens(config.image_token_id)
    if not isinstance(token, str) or tokenizer(token, add_special_tokens=False)["input_ids"] != [config.image_token_id]:
        raise ModelError(
            f"the tokenizer has no token with the id {config.image_token_id}, which stands for a picture by "
            "image_token_id in config.json: use the model's own tokenizer"
        )
    return token


def picture_text(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> str:
    """What stands for a picture as the processors of transformers expect it, without a template of the directory."""
    token = picture_token(tokenizer, config)
    ids = [getattr(config, f"vision_{name}_token_id", None) for name in ("start", "end")]
    if not all(isinstance(number, int) for number in ids):
        return token
    start, end = tokenizer.convert_ids_to_tokens(ids)
    return f"{start}{token}{end}"


def vision_layout(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> VisionLayout:
    """How items become tokens and rows of a chunk."""
    return VisionLayout(tokenizer, *layout_parts(source, tokenizer))


def layout_parts(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase
) -> tuple[ImageProcessing, VisionFamily, Markup]:
    """What a layout is made of besides the tokenizer."""
    settings, config = vision_settings(source), source.config
    family = vision_family(config, has_axes=settings.has_axes)
    assert family is not None
    picture = functools.partial(picture_ids, tokenizer, config, settings.processing, settings.template)
    picture_token(tokenizer, config)
    markup = Markup(settings.template, int(config.image_token_id), picture)
    return settings.processing, family, markup


def vision_encoder(source: ModelSource, model: PreTrainedModel, head: Head) -> Encoder:
    """The encoder of a model of transformers."""
    settings = vision_settings(source)
    family = vision_family(source.config, to_pixels(settings.processing), has_axes=settings.has_axes)
    assert family is not None
    family.prepare(model)
    encoder = Encoder(prepare_backbone(model), head, vision=family)
    encoder.decoded_bytes = settings.processing.bytes_per_patch * family.merge**2
    if settings.frozen:
        for module in encoder.vision_modules:
            module.requires_grad_(False)
    return encoder


def picture_ids(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    processing: ImageProcessing,
    template: ItemTemplate,
    rows: int,
    columns: int,
) -> list[int]:
    """All ids of a picture with so many rows and columns, as the processors of transformers write them as a text."""
    token = picture_token(tokenizer, config)
    written = _tiled(tokenizer, token, rows, columns) if isinstance(processing, Tiles) else token
    text = template.picture.replace(token, written)
    count = _tokens_of_grid(processing, rows, columns)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [copied for number in ids for copied in [number] * (count if number == config.image_token_id else 1)]


def _tokens_of_grid(processing: ImageProcessing, rows: int, columns: int) -> int:
    """Tokens of a grid of rows, which is a whole picture or one of its tiles."""
    if isinstance(processing, Tiles):
        return (processing.tile // processing.patch_size // processing.shuffle) ** 2
    return rows * columns // (processing.merge_size**2 if isinstance(processing, QwenPatches) else 1)


def _tiled(tokenizer: PreTrainedTokenizerBase, token: str, rows: int, columns: int) -> str:
    """A picture in tiles, with one token for each: Idefics3Processor and SmolVLMProcessor."""
    edge = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = f"{edge}{getattr(tokenizer, 'global_image_token', '<global-img>')}{token}{edge}"
    lines = (
        "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{token}" for column in range(columns)) for row in range(rows)
    )
    return "".join(f"{line}\n" for line in lines) + ("\n" if rows else "") + whole


# Directories


def write_processor(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Write tokenizer, chat template and processor; returns settings of sentence-transformers' Transformer."""
    settings = vision_settings(source)
    own = copy.copy(tokenizer.tokenizer)
    own.chat_template = settings.chat_template
    write_tokenizer(directory, own, tokenizer.max_length)
    write_json(directory / PROCESSOR_FILE, dict(settings.processor))
    of_modality = {"method": "forward", "method_output_name": "last_hidden_state"}
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": of_modality,
            "image": of_modality,
            "message": of_modality | {"format": "structured"},
        },
        "module_output_name": "token_embeddings",
        "unpad_inputs": False,
    } | ({"processing_kwargs": {"chat_template": dict(settings.chat_options)}} if settings.chat_options else {})


@contextlib.contextmanager
def probe_items(layout: VisionLayout, limit: int, *, has_mixed: bool = True) -> Iterator[list[str]]:
    """Items with drawn pictures of sizes that no library resizes, for texts of at most `limit` tokens.

    Without `has_mixed` each is one picture.

    Libraries resize with other code than Pillow where torchvision is installed, and differ by a grey level. Pictures
    in tiles are always resized, and have one colour.
    """
    with tempfile.TemporaryDirectory() as folder:
        pictures = []
        for number, image in enumerate(_probe_images(layout.processing)):
            place = Place(str(Path(folder) / f"{number}.png"))
            image.save(place.file)
            pictures.append(read_picture(place))
            PICTURES.add(pictures[-1], place)
        first, second = _PROBE_TEXTS
        items = [str(picture) for picture in pictures]
        if has_mixed:
            items += [f"{picture}{first}" for picture in pictures[:1]]
            items += [f"{second}{picture}" for picture in pictures[1:2]]
            items += [f"{pictures[0]}{first}{picture}" for picture in pictures[-1:]]
        lengths = layout.num_tokens(layout.tokenize(items, UNLIMITED))
        yield [item for item, length in zip(items, lengths.tolist(), strict=True) if length <= limit]


def _probe_images(processing: ImageProcessing) -> "list[Image]":
    image_class, images = pillow(), []
    for number, size in enumerate(_PROBE_SIZES):
        if isinstance(processing, Tiles):
            images.append(image_class.new("RGB", size, (200 - 60 * number, 40 + 70 * number, 90)))
            continue
        height, width = (side * processing.patch_size for side in processing.grid(*size))
        if processing.grid(width, height) != processing.grid(*size):
            continue
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x * 0.11 * (number + 1)), np.cos(y * 0.07), np.sin((x + y) * 0.05 + number)]
        images.append(image_class.fromarray(np.stack([128 + 127 * wave for wave in waves], axis=-1).astype(np.uint8)))
    return images


def open_parts(item: str) -> list["str | Image"]:
    """The texts and the pictures of an item."""
    image_class = pillow()
    return [
        image_class.open(PICTURES.place(part).file).convert("RGB") if isinstance(part, Picture) else part
        for part in item_parts(item)
    ]


def open_processor(directory: Path, source: ModelSource) -> Any:
    """The processor of a directory by its class in transformers, with Pillow, and without one of videos.

    That of videos needs torchvision, and `AutoProcessor` opens none without it.
    """
    name, _ = _PROCESSORS[source.config.model_type]
    try:
        image = open_image_processor(directory, source)
        tokenizer = open_tokenizer(directory, source)
        base = getattr(transformers, name)
        opened = type(name, (base,), {"check_argument_for_proper_class": lambda *_: None})
        parts: dict[str, Any] = {"image_processor": image, "tokenizer": tokenizer}
        if "video_processor" in base.get_attributes():
            parts["video_processor"] = None
        if "image_seq_len" in vision_settings(source).processor:
            parts["image_seq_len"] = read_json(directory / PROCESSOR_FILE)["image_seq_len"]
        return opened(**parts, chat_template=tokenizer.chat_template)
    except Exception as error:
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error


def open_image_processor(directory: Path, source: ModelSource) -> Any:
    """The image processor of a directory, with Pillow."""
    if isinstance(vision_settings(source).processing, Tiles):
        # Version 5.17 has a placeholder under this name where torchvision is not installed, which it does not need.
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        is_smolvlm = source.config.model_type == "smolvlm"
        opened = SmolVLMImageProcessorPil if is_smolvlm else Idefics3ImageProcessorPil
        return opened.from_pretrained(directory, local_files_only=True)
    return AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")


def encode_with_class(
    model: nn.Module, processor: Any, items: Sequence[str], source: ModelSource, heads: Any, max_length: int
) -> Tensor:
    """Vectors of items, [N, D], by transformers' class and its processor: one at a time, without packing."""
    template, rows = vision_settings(source).template, []
    layout = vision_layout(source, processor.tokenizer)
    num_after = len(layout.fast.ids([template.end], max_length)[0]) + len(layout.after)
    for item in items:
        parts = open_parts(item)
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content or [{"type": "text", "text": ""}]}],
            tokenize=False,
            **vision_settings(source).chat_options,
        )
        images = [part for part in parts if not isinstance(part, str)]
        # As tokenizer.json has it otherwise, which cuts what stands behind an item.
        options = {"return_tensors": "pt", "add_special_tokens": template.special_tokens, "truncation": False}
        if template.after_pictures is not None and not images:  # PaliGemma's processor refuses texts
            inputs = processor.tokenizer([text], **options)
        else:
            inputs = processor(text=[text], images=[images] if images else None, **options)
        length = inputs["input_ids"].shape[1]
        if length > max_length:  # a text, which is cut before what stands behind it
            kept = [*range(max_length - num_after), *range(length - num_after, length)]
            inputs = {name: values[:, kept] for name, values in inputs.items()}
        inputs = {name: values for name, values in inputs.items() if name != "labels"}
        hidden = model(**inputs).last_hidden_state
        rows.append(heads(hidden, Chunk(inputs["input_ids"], inputs["attention_mask"]))[0])
    return torch.cat(rows).float()


def missing_packages(source: ModelSource) -> list[str]:
    """Packages without which `AutoProcessor` cannot open the processor, nearly always for its videos."""
    _, video = _PROCESSORS[source.config.model_type]
    is_placeholder = getattr(getattr(transformers, "Idefics3ImageProcessorPil", None), "is_dummy", False)  # 5.17
    needs_torchvision = video is not None or (isinstance(vision_settings(source).processing, Tiles) and is_placeholder)
    needed = ["torchvision"] * needs_torchvision + ["num2words"] * (source.config.model_type == "smolvlm")
    return [name for name in needed if importlib.util.find_spec(name) is None]


def encode_pictures(model: Any, source: ModelSource, max_length: int) -> Tensor:
    """Vectors of `probe_items` by SentenceTransformer, [N, D]."""
    with probe_items(vision_layout(source, model.tokenizer), max_length) as items:
        contents = [
            [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
                for part in open_parts(item)
            ]
            for item in items
        ]
        messages = [[{"role": "user", "content": content}] for content in contents]
        vectors = model.encode(messages, prompt="", batch_size=2, convert_to_tensor=True, show_progress_bar=False)
    return torch.as_tensor(vectors).float().cpu()
