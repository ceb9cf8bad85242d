"""Comparison of the names and shapes in an export's files with its configuration."""

from pathlib import Path

from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoModel, AutoModelForSequenceClassification

from embedtrain.config.recipe import ModelConfig
from embedtrain.errors import CheckpointError
from embedtrain.models.build import build_encoder
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
    if source.words is not None:
        encoder = build_encoder(source)
        shapes = {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
        if (queries := shapes.pop(QUERY_WEIGHTS, None)) is not None:
            _compare_shapes(directory / QUERY_FOLDER, {STORED_WEIGHT: queries})
        _compare_shapes(directory, {encoder.stored_name(name): shape for name, shape in shapes.items()})
        return source
    with init_empty_weights(include_buffers=False):
        kind = AutoModel if source.head is None else AutoModelForSequenceClassification
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
