"""The encoder of a recipe on the meta device, from configuration files alone: nothing is downloaded that is large."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.adapters import add_adapters, frozen_dtype
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder, stored_dtype
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import resolve_directory
from embedtrain.models.source import ModelSource, open_model_source

# Of a Hub repository: how a model is built, not its weights, and not its tokenizer.
_CONFIGURATION = [
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*/config.json",
    "*/sentence_*_config.json",
]
# Length of texts where neither the recipe nor the model's directory says one.
_USUAL_LENGTH = 512


@dataclass(frozen=True, slots=True)
class MetaEncoder:
    """An encoder without weights.

    Attributes:
        encoder: parameters on the meta device, adapters in place, `requires_grad` as it is trained.
        blocks: the modules inside that become groups of their own.
        max_length: tokens of a text that are kept.
    """

    encoder: Encoder
    blocks: list[nn.Module]
    max_length: int


def describe(recipe: Recipe) -> MetaEncoder:
    """Build what the recipe trains.

    Raises:
        ConfigError, ModelError: as in training.
    """
    model = recipe.model
    source = open_model_source(_fetched(model))
    given = model.config if isinstance(model.config, dict) else {}
    if model.config is not None and model.tokenizer is None and "vocab_size" not in given:
        source.config.get_text_config().vocab_size = model.vocab_size  # one that is trained on the data
    files = open_adapter(model.lora)
    encoder = build_encoder(source)
    if model.lora.on:
        frozen = frozen_dtype(model.lora.base_dtype, recipe.parallel.precision, _stored(source))
        add_adapters(encoder, model.lora, files, frozen)
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None) or _USUAL_LENGTH
    length = source.tokenization.max_length or min(_USUAL_LENGTH, positions)
    return MetaEncoder(encoder, find_blocks(encoder, recipe.parallel.block_class, required=False), length)


def _fetched(model: ModelConfig) -> ModelConfig:
    """The model with a directory for its Hub id; the repository's configuration files are in it, and nothing else."""
    if model.path is None or model.config is not None or Path(model.path).expanduser().is_dir():
        return model
    only = [*_CONFIGURATION, *(["*.py"] if model.trust_remote_code else [])]
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision", only)
    return replace(model, path=str(directory), revision=None)


def _stored(source: ModelSource) -> torch.dtype:
    """What its weights are stored in; where only its configuration is here, what that says."""
    if source.directory is None or any(source.directory.glob("*.safetensors")):
        return stored_dtype(source)
    return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
