"""Opens models of texts and pictures: CLIP, SigLIP and SigLIP 2 of one directory, and pairs of two models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PretrainedConfig, VisionTextDualEncoderConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from embedtrain.config.kinds import Kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.data.images.processing import ImageProcessing
from embedtrain.data.images.settings import image_settings, processing_of
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.sentence_transformers import SETTINGS, read_similarity, read_truncate_dim
from embedtrain.formats.source import read_files, source_of
from embedtrain.formats.transformers import read_config
from embedtrain.kinds.image_text.model import stored_name
from embedtrain.kinds.image_text.options import TOWERS, ImageTextOptions
from embedtrain.models.build import assemble_encoder, read_model
from embedtrain.models.encoder import disable_unused
from embedtrain.models.security import require_safe_files
from embedtrain.models.stored_weights import TensorLocation
from embedtrain.models.types import ModelSource, Tokenization, VectorSettings

_PAIR = "vision-text-dual-encoder"
# The types of models whose classes have the same two towers, and the processors that transformers opens them with.
PROCESSORS = {
    "clip": "CLIPProcessor",
    "siglip": "SiglipProcessor",
    "siglip2": "Siglip2Processor",
    _PAIR: "VisionTextDualEncoderProcessor",
}
# Of a model that is made from a configuration: transformers' own settings, with the size of the vision tower.
_IMAGE_PROCESSORS = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor", "siglip2": "Siglip2ImageProcessor"}


@dataclass(frozen=True, kw_only=True)
class ImageTextSettings:
    """What a model of texts and pictures has besides its configuration.

    Attributes:
        processing: what makes numbers of a picture.
        image_processor: the same as transformers writes it.
        frozen: the towers that are not trained.
        folders: of a new pair, the directory of each tower by its name; empty: one directory has the whole model.
    """

    processing: ImageProcessing
    image_processor: Mapping[str, Any]
    frozen: tuple[str, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        """Whether the projections start from the seed."""
        return bool(self.folders)


def read(kind: Kind, directory: Path, model: ImageTextOptions) -> ModelSource:
    """A directory of transformers or sentence-transformers with both towers."""
    files = read_files(directory, model)
    require_known(files.config, directory)
    source = source_of(kind, files)
    if files.modules.kinds not in ([], ["Transformer"], ["Transformer", "Normalize"]):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(files.modules.kinds)}; supported with a model of "
            "texts and pictures is a Transformer and an optional Normalize"
        )
    vectors = source.vectors
    if files.modules.kinds:
        similarity = read_similarity(files.settings, directory, tuple(VectorSimilarity))
        vectors = replace(vectors, truncate_dim=read_truncate_dim(directory / SETTINGS), similarity=similarity)
    where, values = image_settings(files.directory, files.config)
    settings = ImageTextSettings(
        processing=processing_of(where, values, files.config), image_processor=values, frozen=frozen(model)
    )
    source = replace(source, vectors=vectors, settings=settings)
    return with_options(source, model)


def assembled(kind: Kind, model: ImageTextOptions) -> ModelSource | None:
    """A pair of the models of model.text.path and model.image.path, with new projections; None without them."""
    if model.text.path is None or model.image.path is None:
        return None
    folders, configs = dict[str, Path](), dict[str, PretrainedConfig]()
    for name in TOWERS:
        tower = getattr(model, name)
        options = f"model.{name}.path", f"model.{name}.revision"
        folders[name] = resolve_directory(tower.path, tower.revision, *options)
        require_safe_files(folders[name], trust_remote_code=False)
        config = read_config(folders[name], trust_remote_code=False)
        part = getattr(config, "text_config" if name == "text" else "vision_config", config)
        if type(part) not in MODEL_MAPPING:
            raise ConfigError(
                f"{options[0]}={tower.path}: transformers has no model of its own for {part.model_type}; choose another"
            )
        configs[name] = part
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        configs["image"], configs["text"], projection_dim=model.projection_dim
    )
    for part in (config, config.text_config, config.vision_config):
        disable_unused(part)
    where, values = image_settings(folders["image"], configs["image"])
    settings = ImageTextSettings(
        processing=processing_of(where, values, configs["image"]),
        image_processor=values,
        frozen=frozen(model),
        folders=folders,
    )
    source = ModelSource(
        kind=kind,
        settings=settings,
        directory=folders["text"],  # has the tokenizer
        config=config,
        tokenization=Tokenization(),
        prompts={"query": "", "document": ""},
    )
    return with_options(source, model)


def new(source: ModelSource, model: ImageTextOptions) -> ModelSource:
    """A model of random weights."""
    require_known(source.config, Path("model.config"))
    kind = source.config.model_type
    if kind == _PAIR:
        raise ConfigError(
            f"model.config.model_type={kind}: how pictures are read is in the files of a vision tower; write "
            "model.text.path and model.image.path"
        )
    vision = source.config.vision_config
    values: dict[str, Any] = {"image_processor_type": _IMAGE_PROCESSORS[kind]}
    if kind == "clip":
        values |= {"size": {"shortest_edge": vision.image_size}, "crop_size": vision.image_size}
    elif kind == "siglip":
        values["size"] = {"height": vision.image_size, "width": vision.image_size}
    else:
        values |= {"patch_size": vision.patch_size, "max_num_patches": vision.num_patches}
    processing = processing_of(Path("model.config"), values, source.config)
    settings = ImageTextSettings(processing=processing, image_processor=values, frozen=frozen(model))
    return with_options(replace(source, settings=settings), model)


def with_options(source: ModelSource, model: ImageTextOptions) -> ModelSource:
    """The model with the options in place of the settings of its files."""
    stored: VectorSettings = source.vectors
    vectors = replace(
        stored,
        normalize=stored.normalize if model.normalize is None else model.normalize,
        similarity=model.similarity or stored.similarity,
    )
    return replace(source, vectors=vectors)


def frozen(model: ImageTextOptions) -> tuple[str, ...]:
    """The towers that are not trained."""
    return tuple(name for name in TOWERS if getattr(model, name).frozen)


def require_known(config: PretrainedConfig, where: Path) -> None:
    """A ModelError unless the class has a tower of texts and one of pictures that are known here."""
    if config.model_type not in PROCESSORS:
        raise ModelError(
            f"{where} holds {config.model_type}, which is not known as a model of texts and pictures; known are "
            f"{', '.join(PROCESSORS)}, and pairs of model.text.path and model.image.path"
        )


def read_weights(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of a directory, or of the two directories of a new pair, and the names of those that they lack.

    A pooler that a model of texts lacks is new.
    """
    settings: ImageTextSettings = source.settings
    if not settings.folders:
        model, missing = read_model(source, AutoModel, source.config)
        names = {stored_name(name): name for name in assemble_encoder(source).state_dict()}
        state = model.state_dict()
        return (
            {name: state[key].detach() for key, name in names.items()},
            {name for key, name in names.items() if key in missing},
        )
    weights, absent = dict[str, Tensor](), set[str]()
    for name, config in zip(TOWERS, (source.config.text_config, source.config.vision_config), strict=True):
        part, missing = read_model(replace(source, directory=settings.folders[name]), AutoModel, config)
        new = {key for key in missing if key.startswith("pooler.")}
        if new and name in settings.frozen:
            raise ModelError(
                f"model.{name}.frozen=true: {settings.folders[name]} lacks a pooler, which would stay random; train "
                "the tower, or choose another model"
            )
        weights |= {f"{name}.backbone.{key}": value for key, value in part.state_dict().items() if key not in new}
        absent |= {f"{name}.backbone.{key}" for key in missing - new}
    return weights, absent


def located(shapes: Mapping[str, torch.Size], stored: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """Where the weights of an encoder are among those of a directory that has all of them."""
    return {name: stored[key] for name in shapes if (key := stored_name(name)) in stored}
