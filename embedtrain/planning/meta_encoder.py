"""The encoder that a recipe trains on the meta device, from configuration files alone."""

from dataclasses import dataclass

import torch
from torch import nn

from embedtrain.config.recipe import Recipe
from embedtrain.config.token_vectors import TokenVectors
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.adapters import add_adapters, frozen_dtype
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import download_configuration
from embedtrain.models.source import open_model_source
from embedtrain.models.stored_weights import stored_dtype
from embedtrain.models.types import ModelSource

# Length of texts if neither the recipe nor the model directory sets one.
_DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class MetaEncoder:
    """An encoder on the meta device, with adapters and `requires_grad` as in training."""

    encoder: Encoder
    source: ModelSource
    blocks: list[nn.Module]
    max_length: int  # of texts, in tokens

    @property
    def token_vectors(self) -> TokenVectors | None:
        """The settings of a late-interaction model."""
        return self.source.settings if self.source.kind.name == "late_interaction" else None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the stored weights; without weights, the type in the configuration."""
        return _stored_dtype(self.source)


def build_meta_encoder(recipe: Recipe) -> MetaEncoder:
    """The encoder that a recipe trains, without its weights; raises ConfigError and ModelError as training does."""
    model = recipe.model
    source = open_model_source(download_configuration(model))
    settings = model.config if isinstance(model.config, dict) else {}
    if model.config is not None and model.tokenizer is None and "vocab_size" not in settings:
        source.config.get_text_config().vocab_size = model.vocab_size  # of the tokenizer that is trained on the data
    files = open_adapter(model.lora)
    encoder = build_encoder(source)
    if model.lora.on:
        frozen = frozen_dtype(model.lora.base_dtype, recipe.parallel.precision, _stored_dtype(source))
        add_adapters(encoder, model.lora, files, frozen)
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None) or _DEFAULT_LENGTH
    length = source.tokenization.max_length or min(_DEFAULT_LENGTH, positions)
    if source.kind.name == "late_interaction" and source.settings.document_length is not None:
        length = min(length, source.settings.document_length)
    return MetaEncoder(encoder, source, find_blocks(encoder, recipe.parallel.block_class, required=False), length)


def _stored_dtype(source: ModelSource) -> torch.dtype:
    if source.directory is None or any(source.directory.glob("*.safetensors")):
        return stored_dtype(source)
    return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
