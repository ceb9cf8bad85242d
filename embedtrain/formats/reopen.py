"""Opens an exported directory with plain transformers, and compares its files with its configuration."""

from pathlib import Path
from typing import cast

from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import CheckpointError
from embedtrain.formats.cross_encoder import open_checked
from embedtrain.formats.m3 import m3_encoder
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Dense, Encoder
from embedtrain.models.late_interaction import LateInteractionEncoder
from embedtrain.models.module_settings import stored_kind
from embedtrain.models.source import open_model_source
from embedtrain.models.static_queries import QUERY_FOLDER, QUERY_WEIGHTS, STORED_WEIGHT
from embedtrain.models.stored_weights import stored_tensors
from embedtrain.models.types import ModelSource


def require_shapes(directory: Path, *, trust_remote_code: bool) -> ModelSource:
    """Open the directory, and compare all names and shapes in its files with its configuration; reads no weights.

    Raises CheckpointError if a weight is missing, unexpected, or of another shape.
    """
    source = open_model_source(
        ModelConfig(path=str(directory), kind=stored_kind(directory), trust_remote_code=trust_remote_code)
    )
    if source.kind.name == "sparse":
        encoder = build_encoder(source)
        shapes = {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
        if (queries := shapes.pop(QUERY_WEIGHTS, None)) is not None:
            _compare_shapes(directory / QUERY_FOLDER, {STORED_WEIGHT: queries})
        _compare_shapes(directory, {encoder.stored_name(name): shape for name, shape in shapes.items()})
        return source
    with init_empty_weights(include_buffers=False):
        kind = AutoModel if source.kind.name != "cross_encoder" else AutoModelForSequenceClassification
        backbone = kind.from_config(source.config, trust_remote_code=trust_remote_code)
    _compare_shapes(directory, {name: list(tensor.shape) for name, tensor in backbone.state_dict().items()})
    for head in source.dense:
        shapes = {"linear.weight": [head.num_out, head.num_in]} | ({"linear.bias": [head.num_out]} if head.bias else {})
        assert head.directory is not None
        _compare_shapes(head.directory, shapes)
    return source


def _compare_shapes(directory: Path, shapes: dict[str, list[int]]) -> None:
    stored = stored_tensors(directory)
    for name in sorted(stored.keys() ^ shapes.keys()):
        raise CheckpointError(f"{directory}: {name} is {'unexpected' if name in stored else 'missing'} in its files")
    for name, location in stored.items():
        with safe_open(location.path, framework="pt") as file:
            shape = file.get_slice(location.key).get_shape()
        if shape != shapes[name]:
            raise CheckpointError(f"{location.path}: {name} has the shape {shape}, the model expects {shapes[name]}")


def open_encoder(directory: Path, source: ModelSource) -> Encoder:
    """The fp32 backbone that transformers loads from a directory, with our pooling and heads."""
    return add_heads(open_checked(AutoModel, directory, source), source)


def add_heads(backbone: nn.Module, source: ModelSource) -> Encoder:
    """An encoder of a backbone with a directory's pooling, dense heads and normalisation."""
    heads = []
    for dense in source.dense:
        head = Dense(dense.num_in, dense.num_out, bias=dense.bias, activation=dense.activation)
        assert dense.directory is not None
        for name, location in stored_tensors(dense.directory).items():
            with safe_open(location.path, framework="pt") as file:
                head.get_parameter(name).data.copy_(file.get_tensor(location.key))
        heads.append(head)
    own = cast("PreTrainedModel", backbone)
    if source.kind.name == "late_interaction":
        return LateInteractionEncoder(own, heads).eval()
    if source.kind.name == "m3":
        return m3_encoder(own, source)
    return Encoder(own, source.pooling, normalize=source.normalize, dense=heads).eval()


def open_tokenizer(directory: Path, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer as plain transformers loads it from a directory."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    return tokenizer


def tokenize_padded(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], documents: list[str] | None = None
) -> BatchEncoding:
    """One padded batch [N, L] of texts, or of their pairs with `documents`, cut to the model's maximum length."""
    return tokenizer(texts, documents, padding=True, truncation=True, return_tensors="pt")
