"""Model directories of texts and pictures: transformers' classes, and the module Transformer of sentence-transformers.

Settings of padding are written for every library, because the vector of a text of SigLIP depends on them.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel

# Under the name `transformers.AutoImageProcessor`, version 5.17 has one that cannot be used without torchvision.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from embedtrain.config.recipe import ExportConfig
from embedtrain.data.images.files import pillow
from embedtrain.data.images.processing import ImageProcessing, NaFlex
from embedtrain.data.images.settings import PROCESSOR_FILE
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.model_files import ModelFiles, StoredName, TowerGraph, python_block
from embedtrain.formats.sentence_transformers import (
    BATCH_SIZE,
    OLD_MODULE,
    TRANSFORMER_MODULE,
    TRANSFORMER_SETTINGS,
    load_model,
    opening,
    write_modules,
)
from embedtrain.formats.transformers import open_checked, open_tokenizer, write_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.kinds.dense.files import write_settings
from embedtrain.kinds.image_text.model import ImageTextLayout, picture_chunk, stored_name
from embedtrain.kinds.image_text.options import TOWERS, check_export_options
from embedtrain.kinds.image_text.source import PROCESSORS
from embedtrain.models.encoder import Encoder
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

if TYPE_CHECKING:
    from PIL.Image import Image

_NORMALIZE_FOLDER = "1_Normalize"
_GRAPHS = "text_model", "vision_model"
# Width and height of pictures that are drawn to compare what libraries compute: square, wide and narrow.
_PROBE_SIZES = ((96, 96), (200, 120), (90, 300))


class ImageTextFiles(ModelFiles):
    """Transformer with both towers, and Normalize."""

    plural = "models of texts and pictures"
    description = (
        "A model of texts and pictures, with a vector of {dimension} dimensions for each, for texts of up to "
        "{max_length} tokens"
    )
    tags: ClassVar[Sequence[str]] = ("sentence-similarity", "feature-extraction", "image-text-retrieval")
    task = "zero-shot-image-classification"
    agreement = "smallest cosine of a vector"
    has_pooler = False

    def write(self, directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
        """Tokenizer and image processor, and how sentence-transformers calls the class."""
        layout = tokenizer.layout
        assert isinstance(layout, ImageTextLayout)
        own = tokenizer.tokenizer
        modality = {name: {"method": f"get_{name}_features", "method_output_name": "pooler_output"} for name in TOWERS}
        settings: dict[str, Any] = {
            "transformer_task": "feature-extraction",
            "modality_config": modality,
            "module_output_name": "sentence_embedding",
        }
        if layout.padded_length is not None:
            own = copy.copy(own)
            own.model_input_names = ["input_ids"]  # the padding is computed as other tokens are, without a mask
            padding = {"padding": "max_length", "max_length": layout.padded_length, "truncation": True}
            settings["processing_kwargs"] = {"text": padding}
        if isinstance(layout.processing, NaFlex):  # the class of processors has numbers of its own, and ignores these
            patches = {"patch_size": layout.processing.patch_size, "max_num_patches": layout.processing.max_patches}
            settings.setdefault("processing_kwargs", {})["image"] = patches
        write_tokenizer(directory, own, tokenizer.max_length)
        processor = {
            "image_processor": dict(source.settings.image_processor),
            "processor_class": PROCESSORS[source.config.model_type],
        }
        write_json(directory / PROCESSOR_FILE, processor)
        write_json(directory / TRANSFORMER_SETTINGS, settings)
        modules = {"": TRANSFORMER_MODULE}
        if source.vectors.normalize:
            modules[_NORMALIZE_FOLDER] = f"{OLD_MODULE}Normalize"
            (directory / _NORMALIZE_FOLDER).mkdir(exist_ok=True)
        write_modules(directory, modules)
        write_settings(directory, source)

    def usage(self, name: str, prompts: Mapping[str, str], architecture: Path) -> list[str]:
        """sentence-transformers."""
        return [
            *python_block(
                "from PIL import Image",
                "from sentence_transformers import SentenceTransformer",
                "",
                f'model = SentenceTransformer("{name}")',
                'texts = model.encode_query(["a red car", "a cat that sleeps"])',
                'pictures = model.encode_document([Image.open("picture.jpg")])',
                "print(model.similarity(texts, pictures))",
            ),
            "Texts and pictures have a tower each; encode them in separate calls. Transformers opens the directory as "
            "well: `get_text_features` and `get_image_features` return the vectors before their length is set to 1.",
            "",
        ]

    def check_export(self, config: ExportConfig, kind: str) -> None:
        """What has one tower cannot be written."""
        check_export_options(config)

    def stored_names(self, names: Iterable[str], architecture: Path) -> dict[str, StoredName]:
        """Those of the class; temperature and bias are numbers that lose digits in bf16."""
        return {name: StoredName(stored_name(name), is_float32=name.startswith("logit_")) for name in names}

    def probe(
        self, encoder: Encoder, tokenizer: TextTokenizer, prompts: Mapping[str, str], device: torch.device
    ) -> Tensor:
        """The vectors of texts and, below them, of pictures: [N + P, D]."""
        layout = tokenizer.layout
        assert isinstance(layout, ImageTextLayout)
        tokens = tokenizer.tokens(PROBES)
        chunks = [tokenizer.chunk(tokens, [row]) for row in range(len(tokens))]
        for image in probe_images(layout.processing):
            pixels = layout.processing.pixels(image, image.width, image.height)
            grid = layout.processing.grid(image.width, image.height)
            chunks.append(picture_chunk(layout.processing, [pixels], [grid], [0]))
        with torch.no_grad():
            return torch.cat([encoder(chunk.to(device))[0].cpu() for chunk in chunks])

    def of_transformers(self, directory: Path, source: ModelSource) -> Tensor:
        """The same by the class, its tokenizer and its image processor; lengths are set to 1 here."""
        return _by_class(open_checked(AutoModel, directory, source), directory, source)

    def of_peft(
        self,
        base: ModelSource,
        weights: Mapping[str, Tensor],
        attach: Callable[[torch.nn.Module], torch.nn.Module],
        source: ModelSource,
    ) -> Tensor:
        """The same by the class, with adapters in both towers."""
        model = AutoModel.from_config(base.config)
        model.load_state_dict({stored_name(name): weight for name, weight in weights.items()})
        assert source.directory is not None
        return _by_class(attach(model), source.directory, source)

    def of_sentence_transformers(
        self, directory: Path, source: ModelSource, prompts: Mapping[str, str], max_length: int
    ) -> Tensor:
        """The same by SentenceTransformer, several texts and pictures at a time; prompts are compared."""
        with opening(directory):
            model = load_model("SentenceTransformer", directory, source)
            options = {"prompt": "", "batch_size": BATCH_SIZE, "show_progress_bar": False, "convert_to_tensor": True}
            items: list[list[Any]] = [list(PROBES), list(probe_images(source.settings.processing))]
            vectors = torch.cat([torch.as_tensor(model.encode(of_tower, **options)) for of_tower in items])
            stored = dict(model.prompts)
        for name, text in prompts.items():
            if stored.get(name) != text:
                raise CheckpointError(
                    f"sentence-transformers opens {directory} with the prompt {name}={stored.get(name)!r}, not {text!r}"
                )
        return vectors.float().cpu()

    def no_graph(self, source: ModelSource) -> str:
        """None that commands compute with."""
        return "commands compute with no graphs of a model with a tower of texts and one of pictures"

    def graph_names(self, source: ModelSource) -> Sequence[str]:
        """As transformers.js and optimum have them."""
        if isinstance(source.settings.processing, NaFlex):
            raise ConfigError(
                "export.formats: onnx is for pictures of one size, and those of NaFlex have any; leave onnx out"
            )
        return _GRAPHS

    def tower_graphs(self, directory: Path, source: ModelSource) -> Sequence[TowerGraph]:
        """Vectors before their length is set to 1, by the names of CLIP's classes with projections, or of SigLIP's."""
        model, tokenizer = open_checked(AutoModel, directory, source).eval(), open_tokenizer(directory, source)
        is_padded = tokenizer.model_input_names == ["input_ids"]
        has_mask = not is_padded and source.config.model_type != "clip"  # its texts see nothing behind their end
        names = [name for name in tokenizer.model_input_names if has_mask or name == "input_ids"]

        def texts(chosen: Sequence[str]) -> Mapping[str, Tensor]:
            padding = "max_length" if is_padded else True
            return dict(tokenizer(list(chosen), padding=padding, truncation=True, return_tensors="pt"))

        drawn = probe_images(source.settings.processing)
        processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        pictures = [dict(processor(images=[image], return_tensors="pt")) for image in drawn]
        pictures.append({"pixel_values": torch.cat([picture["pixel_values"] for picture in pictures])})
        length = {} if is_padded else {1: "sequence_length"}
        of_class = "pooler_output" if source.config.model_type.startswith("siglip") else None
        return (
            TowerGraph(
                _GRAPHS[0],
                _TracedTower(model, "get_text_features", names),
                {name: {0: "batch_size"} | length for name in names},
                of_class or "text_embeds",
                [*(texts([text]) for text in PROBES), texts(PROBES)],
            ),
            TowerGraph(
                _GRAPHS[1],
                _TracedTower(model, "get_image_features", ["pixel_values"]),
                {"pixel_values": {0: "batch_size"}},
                of_class or "image_embeds",
                pictures,
            ),
        )

    def graph_usage(self) -> list[str]:
        """Both graphs."""
        return [
            "`onnx/text_model.onnx` and `onnx/vision_model.onnx` are the towers in fp32, for onnxruntime and "
            "transformers.js. Their vectors are those before their length is set to 1.",
            "",
        ]


class _TracedTower(torch.nn.Module):
    """A method of transformers' class as a function from tensors, in the order of `names`, to vectors."""

    def __init__(self, model: torch.nn.Module, method: str, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self._method, self._names = model, method, names

    def forward(self, *tensors: Tensor) -> Tensor:
        values = dict(zip(self._names, tensors, strict=True))
        vectors: Tensor = getattr(self.model, self._method)(**values).pooler_output
        return vectors


def _by_class(model: Any, directory: Path, source: ModelSource) -> Tensor:
    """The vectors of `ImageTextFiles.probe` by transformers' class, whose tokenizer is in a directory."""
    tokenizer = open_tokenizer(directory, source)
    try:
        processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    is_padded = tokenizer.model_input_names == ["input_ids"]
    rows = []
    with torch.no_grad():
        for text in PROBES:
            inputs = tokenizer(
                [text], padding="max_length" if is_padded else True, truncation=True, return_tensors="pt"
            )
            rows.append(model.eval().get_text_features(**inputs).pooler_output)
        for image in probe_images(source.settings.processing):
            inputs = processor(images=[image], return_tensors="pt")
            rows.append(model.get_image_features(**inputs).pooler_output)
    vectors = torch.cat(rows).float()
    return F.normalize(vectors, dim=-1) if source.vectors.normalize else vectors


def probe_images(processing: ImageProcessing) -> "list[Image]":
    """Drawn pictures of sizes that the processing leaves as they are.

    Libraries resize with other code than Pillow where torchvision is installed, and differ by a grey level.
    """
    image_class = pillow()
    images = []
    for number, size in enumerate(_PROBE_SIZES):
        if isinstance(processing, NaFlex):
            height, width = (side * processing.patch_size for side in processing.grid(*size))
        else:
            _, height, width = processing.pixel_shape(*size)
        if processing.grid(width, height) != processing.grid(*size):
            continue
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x * 0.11 * (number + 1)), np.cos(y * 0.07), np.sin((x + y) * 0.05 + number)]
        values = np.stack([128 + 127 * wave for wave in waves], axis=-1).astype(np.uint8)
        images.append(image_class.fromarray(values))
    return images
